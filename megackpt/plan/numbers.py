"""The numbers a plan is made from: the model's shape and how it is laid out.  Frozen, JSON in and out.

Letters: s sequence, b micro-batch, h hidden, t tensor-, c context-, p pipeline-, d data-parallel size, v chunks per
stage, n micro-batches per step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megackpt.plan.split import Split, even_split

POSITIONS = ("learned_absolute", "rope", "none")
NORMS = ("LayerNorm", "RMSNorm")
ACTIVATIONS = ("gelu", "swiglu", "squared_relu")
DEVICES = ("cuda", "cpu")
ACTIVATION_BYTES = (2, 4, 8)


@dataclass(frozen=True)
class ModelNumbers:
    """A GPT model as a planner sees it.  Sizes are of the whole model, never of a shard."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocab: int
    padded_vocab: int
    seq: int
    norm: str = "LayerNorm"
    qk_norm: bool = False  # of every query and key over its own channels
    positions: str = "learned_absolute"
    max_positions: int = 0  # rows of a learned position embedding; 0: seq
    rotary_share: float = 1.0
    biases: bool = True
    tied: bool = True
    activation: str = "gelu"
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    fused_attention: bool = True
    softmax_fp32: bool = True
    loss_chunk: int = 0  # positions whose logits exist at a time; 0: all
    resets_positions: bool = False  # they count anew in every document, so each token's own is kept
    resets_attention: bool = False  # it stays inside documents: one fused kernel for each, whose outputs are joined

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_size", "ffn", "vocab", "seq"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.padded_vocab < self.vocab:
            raise ValueError(f"padded_vocab {self.padded_vocab} is smaller than vocab {self.vocab}")
        for name, choices in (("norm", NORMS), ("positions", POSITIONS), ("activation", ACTIVATIONS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(choices)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads do not divide into {self.kv_heads} key/value heads")
        if not self.max_positions:
            object.__setattr__(self, "max_positions", self.seq)

    @staticmethod
    def gpt(layers: int, hidden: int, heads: int, vocab: int, seq: int, **rest: Any) -> ModelNumbers:
        """The classic shape: head size h/a, ffn 4h, a vocabulary that is padded already."""
        if hidden % heads:
            raise ValueError(f"hidden {hidden} is not a multiple of heads {heads}")
        return ModelNumbers(layers, hidden, heads, heads, hidden // heads, 4 * hidden, vocab, vocab, seq, **rest)

    @property
    def gated(self) -> bool:
        return self.activation == "swiglu"

    @property
    def rotated(self) -> int:
        """Channels of a head that are rotated."""
        return int(self.head_size * self.rotary_share) if self.positions == "rope" else 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> ModelNumbers:
        return ModelNumbers(**data)


@dataclass(frozen=True)
class Layout:
    """Who holds what: sizes of the axes, micro-batches, precision, and the layers by [stage][chunk]."""

    pieces: Split
    t: int = 1
    c: int = 1
    d: int = 1
    n: int = 1
    micro_batch: int = 1
    sequence_parallel: bool = False
    act_bytes: int = 2  # of weights and activations: 2 (bf16, fp16), 4 (fp32), 8 (fp64)
    grad_bytes: int = 0  # of main gradients; 0: wide_bytes
    sharded_optimizer: bool = False
    bucket_size: int = 0  # elements of a bucket of gradients; 0: Megatron's default
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    schedule: str = "1f1b"
    device: str = "cuda"  # kernels differ in what they save
    tp_rank: int | None = None  # ranks differ only in padded vocabulary; None: the one that has most to do

    def __post_init__(self) -> None:
        for name in ("t", "c", "d", "n", "micro_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.act_bytes not in ACTIVATION_BYTES:
            raise ValueError(f"act_bytes={self.act_bytes} is not one of {ACTIVATION_BYTES}")
        if self.device not in DEVICES:
            raise ValueError(f"device={self.device!r} is not one of {', '.join(DEVICES)}")
        if not self.pieces or any(len(stage) != len(self.pieces[0]) for stage in self.pieces):
            raise ValueError("every stage must have the same number of chunks, and there must be one")
        order = [layer for chunk in range(self.v) for stage in self.pieces for layer in stage[chunk]]
        if order != list(range(len(order))):
            raise ValueError("the pieces do not hold every layer exactly once, in the order of the model")
        if self.grad_bytes and self.grad_bytes not in (self.act_bytes, self.wide_bytes):
            raise ValueError(f"grad_bytes={self.grad_bytes} is neither act_bytes nor {self.wide_bytes}")
        if not self.grad_bytes:
            object.__setattr__(self, "grad_bytes", self.wide_bytes)
        if self.t == 1:
            object.__setattr__(self, "sequence_parallel", False)

    @staticmethod
    def even(layers: int, p: int = 1, v: int = 1, **rest: Any) -> Layout:
        """Layers divided as the trainer divides them."""
        return Layout(even_split(layers, p, v), **rest)

    @staticmethod
    def of_counts(counts: Sequence[Sequence[int]], **rest: Any) -> Layout:
        """Layers by their number, [stage][chunk]."""
        stages: list[list[range]] = [[] for _ in counts]
        first = 0
        for chunk in range(len(counts[0])):
            for stage, row in enumerate(counts):
                stages[stage].append(range(first, first + row[chunk]))
                first += row[chunk]
        return Layout(tuple(tuple(stage) for stage in stages), **rest)

    @property
    def p(self) -> int:
        return len(self.pieces)

    @property
    def v(self) -> int:
        return len(self.pieces[0])

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.t * self.c * self.d * self.p

    @property
    def communicators(self) -> int:
        """Process groups of a rank whose communicators hold memory: tensor parallel, data parallel (with context), and
        one for each direction between stages."""
        return sum(size > 1 for size in (self.t, self.d * self.c)) + 2 * (self.p > 1)

    @property
    def splits_backward(self) -> bool:
        """Weight gradients are actions of their own."""
        return self.schedule == "zb-h1"

    @property
    def wide_bytes(self) -> int:
        """Of masters, moments, statistics and losses: fp32, or fp64 for an fp64 model."""
        return max(4, self.act_bytes)

    @property
    def has_masters(self) -> bool:
        """fp32 and fp64 parameters are their own masters."""
        return self.act_bytes < self.wide_bytes

    def is_first(self, stage: int, chunk: int) -> bool:
        """Whether this piece owns the embedding."""
        return stage == 0 and chunk == 0

    def is_last(self, stage: int, chunk: int) -> bool:
        """Whether this piece owns the head and the loss."""
        return stage == self.p - 1 and chunk == self.v - 1

    def layers_of(self, stage: int) -> int:
        return sum(len(chunk) for chunk in self.pieces[stage])

    def to_json(self) -> dict[str, Any]:
        """The fields; pieces as [first, stop] pairs."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "pieces"}
        return data | {"pieces": [[[r.start, r.stop] for r in stage] for stage in self.pieces]}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Layout:
        rest = {name: value for name, value in data.items() if name != "pieces"}
        return Layout(tuple(tuple(range(*pair) for pair in stage) for stage in data["pieces"]), **rest)


@dataclass(frozen=True)
class Widths:
    """What one rank's tensors measure, in elements, and their bytes per element."""

    rows: int  # s b / c: rows of a gathered tensor
    shard: int  # the same, divided by t under sequence parallelism
    hidden: int
    queries: int  # a d / t
    packed: int  # (a + 2 g) d / t
    ffn: int  # f / t
    up: int  # f / t, twice that if gated
    vocab: int  # V / t
    scores: int  # a s s b / (t c)
    log_sum: int  # a s b / (t c)
    act: int
    wide: int
    grad: int

    @staticmethod
    def of(model: ModelNumbers, layout: Layout) -> Widths:
        """Raises ValueError when something does not divide over the ranks."""
        t, c = layout.t, layout.c
        for what, size, parts in (
            ("heads", model.heads, t),
            ("key/value heads", model.kv_heads, t),
            ("ffn", model.ffn, t),
            ("padded vocabulary", model.padded_vocab, t),
            ("sequence", model.seq, c * (t if layout.sequence_parallel else 1)),
        ):
            if size % parts:
                raise ValueError(f"{what} {size} does not divide over {parts} ranks")
        rows = model.seq // c * layout.micro_batch
        heads = model.heads // t
        return Widths(
            rows=rows,
            shard=rows // t if layout.sequence_parallel else rows,
            hidden=model.hidden,
            queries=heads * model.head_size,
            packed=(model.heads + 2 * model.kv_heads) // t * model.head_size,
            ffn=model.ffn // t,
            up=model.ffn // t * (2 if model.gated else 1),
            vocab=model.padded_vocab // t,
            scores=heads * model.seq * rows,
            log_sum=heads * rows,
            act=layout.act_bytes,
            wide=layout.wide_bytes,
            grad=layout.grad_bytes,
        )
