"""Continue texts with the weights of a checkpoint: one model per tensor-parallel group, whatever layout saved it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from megackpt.config.checks import nearest_divisors
from megackpt.config.data import DataConfig
from megackpt.config.errors import UsageError
from megackpt.config.model import ModelConfig
from megackpt.config.parallel import ParallelConfig
from megackpt.config.precision import PrecisionConfig
from megackpt.config.stored import read_section
from megackpt.data.tokenizer import Tokenizer, build_tokenizer
from megackpt.mesh.device import DeviceSeam
from megackpt.mesh.parameter import records
from megackpt.mesh.process_mesh import ProcessMesh
from megackpt.mesh.sink import AutogradSink
from megackpt.model import GPTChunk, build_chunk
from megackpt.model.decoding import Decoder
from megackpt.persist import NamedShard, RunState, load
from megackpt.persist.convert.ours import open_checkpoint
from megackpt.precision.policy import Precision
from megackpt.recompute import RngLedger
from megackpt.tensor.context import TensorParallel
from megackpt.train.agree import together


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen: greedily at temperature 0, else drawn from the `top_k` likeliest tokens (0: all)
    that together have probability `top_p`."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1234

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise UsageError(f"--temperature must not be negative; got {self.temperature:g}. 0 is greedy.")
        if self.top_k < 0:
            raise UsageError(f"--top-k must not be negative; got {self.top_k}. 0 takes all tokens.")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p must be above 0 and at most 1; got {self.top_p:g}.")
        if self.temperature == 0 and (self.top_k > 1 or self.top_p < 1):
            raise UsageError("--top-k and --top-p have no effect without --temperature: greedy takes the likeliest.")

    def choose(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """Logits [b, V] -> token ids [b, 1].  Computed on the CPU in fp32, so that equal logits give equal tokens."""
        logits = logits.float().cpu()
        if self.temperature == 0:
            return logits.argmax(-1, keepdim=True)
        ordered, order = (logits / self.temperature).sort(-1, descending=True)
        likely = ordered.softmax(-1)
        before = likely.cumsum(-1) - likely
        out = before >= self.top_p  # never the likeliest, before which there is nothing
        if self.top_k:
            out[:, self.top_k :] = True
        chosen = torch.multinomial(likely.masked_fill(out, 0.0), 1, generator=generator)
        return order.gather(-1, chosen)


@dataclass(frozen=True)
class Generator:
    """A loaded model that continues token sequences."""

    model: ModelConfig
    vocab: int
    chunk: GPTChunk
    tp: TensorParallel
    tokenizer: Tokenizer | None
    notes: tuple[str, ...] = ()
    """What the load has to say, such as that another checkpoint was taken."""

    def continue_(
        self, tokens: Sequence[int], count: int, sampling: Sampling, on_token: Callable[[int], None] | None = None
    ) -> list[int]:
        """Up to `count` new tokens after `tokens`; fewer if the tokenizer's end of document comes, which is left out.

        `on_token` is told each one as it comes.  All ranks call it together and get the same.  Raises UsageError for
        an empty prompt, an id outside of the vocabulary, or a text that is longer than the model's positions.
        """
        _check(tokens, count, self)
        device = self.tp.device
        generator = torch.Generator().manual_seed(sampling.seed)
        decoder = Decoder(self.chunk, self.tp, sequences=1, capacity=len(tokens) + count)
        end = self.tokenizer.special.eod if self.tokenizer is not None else None
        made: list[int] = []
        new = torch.tensor([list(tokens)], device=device)
        while len(made) < count:
            chosen = sampling.choose(decoder(new), generator)
            token = int(chosen.item())
            if token == end:
                break
            made.append(token)
            if on_token is not None:
                on_token(token)
            new = chosen.to(device)
        return made


def _check(tokens: Sequence[int], count: int, generator: Generator) -> None:
    if not tokens:
        raise UsageError("the prompt has no tokens")
    if bad := [t for t in tokens if not 0 <= t < generator.vocab]:
        raise UsageError(f"token {bad[0]} is outside of the vocabulary, 0 to {generator.vocab - 1}")
    limit = generator.model.seq_length
    if len(tokens) + count > limit:
        raise UsageError(
            f"{len(tokens)} tokens of prompt and --num-tokens {count} are more than the model's {limit} positions."
            f" Nearest valid: --num-tokens {max(0, limit - len(tokens))}."
        )


def load_generator(
    root: str | Path,
    parallel: ParallelConfig,
    seam: DeviceSeam,
    *,
    iteration: int | None = None,
    data: DataConfig | None = None,
) -> Generator:
    """The model of a checkpoint under `root`, on the ranks of this run; called by all of them.

    `data` names another tokenizer than the checkpoint's.  Raises UsageError and CheckpointError on every rank.
    """
    _, run = together(lambda: open_checkpoint(root, iteration))
    config, vocab = run["extra"]["config"], int(run["extra"]["vocab_size"])
    stored = read_section(config, "model")
    assert isinstance(stored, ModelConfig)
    length = max(stored.seq_length, stored.max_position_embeddings)
    model = replace(stored, seq_length=length, max_position_embeddings=length)
    # The padding that this layout needs, not that of the run: a checkpoint's heads load with any.
    model = model.with_query_groups(-(-model.unpadded_query_groups // parallel.tensor) * parallel.tensor)
    if model.ffn_hidden_size % parallel.tensor:
        raise UsageError(
            f"--tensor-model-parallel-size {parallel.tensor} does not divide {model.ffn_hidden_size} columns of the"
            f" MLP. Nearest valid: {nearest_divisors(parallel.tensor, model.ffn_hidden_size)}."
        )
    mesh = ProcessMesh.create(parallel, seam)
    dtype = together(lambda: _dtype(config))
    tp = TensorParallel.create(
        mesh,
        sequence_parallel=False,
        ledger=RngLedger(defaults=False),
        sink=AutogradSink(),
        dtype=dtype,
        device=seam.device,
        seed=0,
    )
    chunk = build_chunk(model, tp, vocab, range(model.num_layers), first=True, last=True)
    shards = [NamedShard(f"model.{r.name}", p.detach(), r) for p, r in records(chunk.named_parameters())]
    report = load(root, RunState(shards), mesh, want={"model"}, iteration=iteration)
    notes = report.messages if report is not None else ()
    return Generator(model, vocab, chunk, tp, together(lambda: _tokenizer(config, data)), notes)


def _dtype(config: str) -> torch.dtype:
    try:
        precision = read_section(config, "precision")
    except UsageError:
        return torch.float32  # converted weights: whatever they are stored as, they become fp32
    assert isinstance(precision, PrecisionConfig)
    return Precision.from_config(precision).params_dtype


def _tokenizer(config: str, data: DataConfig | None) -> Tokenizer | None:
    """The named tokenizer, else the checkpoint's, else none: prompts are then numbers."""
    if data is None:
        try:
            stored = read_section(config, "data")
        except UsageError:
            return None
        assert isinstance(stored, DataConfig)
        data = stored
    return None if data.tokenizer is None else build_tokenizer(data.tokenizer)
