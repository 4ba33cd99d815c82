"""`megackpt generate`: logits against plain models, keys and values kept, any tensor-parallel size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megackpt.config.errors import UsageError
from megackpt.config.parallel import ParallelConfig
from megackpt.mesh.device import DeviceSeam
from megackpt.model.decoding import Decoder
from megackpt.persist.convert import write_checkpoint, write_folder
from megackpt.train.generate import Sampling, load_generator
from tests.persist.convert.made import MODELS, VOCAB, weights_of
from tests.persist.convert.plain_models import gpt2, llama
from tests.pool import run_distributed

PROMPT = [3, 250, 17, 99, 140]
COUNT = 21


def _generate(rank: int, world_size: int, root: str, sampling: Sampling) -> tuple[Tensor, list[int]]:
    """Logits at every position of a fixed text, fed in parts of several sizes; and a continuation."""
    parallel = ParallelConfig(tensor=world_size, world_size=world_size)
    generator = load_generator(root, parallel, DeviceSeam.create("cpu", rank, None))
    ids = _text()
    decoder = Decoder(generator.chunk, generator.tp, sequences=2, capacity=ids.shape[1])
    sizes = [5, 1, 1, 7, 1, 9]
    logits = [decoder(part) for part in ids.split(sizes, dim=1)]
    return torch.stack(logits), generator.continue_(PROMPT, COUNT, sampling)


def _text() -> Tensor:
    return torch.randint(VOCAB, (2, 24), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("name", MODELS)
def test_converted_weights_give_the_logits_of_a_plain_model(tmp_path: Path, name: str) -> None:  # CV-01, CV-03, CV-05
    """Ours against the formulas over the exported tensors; a text fed in parts against the whole text at once."""
    model = MODELS[name]
    write_checkpoint(tmp_path / "ours", weights_of(model))
    write_folder(tmp_path / "theirs", weights_of(model))
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    plain, content = gpt2 if name == "gpt2" else llama, load_file(tmp_path / "theirs" / "model.safetensors")
    expected = torch.stack([plain(content, config, ids) for ids in _text()])  # [2, s, V]
    ends = torch.tensor([5, 6, 7, 14, 15, 24]) - 1
    greedy = list(PROMPT)
    for _ in range(COUNT):
        greedy.append(int(plain(content, config, torch.tensor(greedy))[-1].argmax()))
    tensor = 3 if name == "llama 6 heads 3 kv" else 2
    for ranks in (1, 2) if tensor == 2 else (1,):
        for logits, made in run_distributed(_generate, ranks, str(tmp_path / "ours"), Sampling()):
            assert (logits - expected[:, ends].transpose(0, 1)).abs().max() <= 1e-5
            assert made == greedy[len(PROMPT) :]


def test_sampling_is_repeatable_and_within_its_bounds(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "ours", weights_of(MODELS["gpt2"]))
    root, hot = str(tmp_path / "ours"), Sampling(temperature=3.0, seed=4)
    ((_, once),) = run_distributed(_generate, 1, root, hot)
    assert [made for _, made in run_distributed(_generate, 2, root, hot)] == [once, once]
    ((_, other),) = run_distributed(_generate, 1, root, Sampling(temperature=3.0, seed=5))
    ((_, one),) = run_distributed(_generate, 1, root, Sampling(temperature=3.0, top_k=1))
    ((_, greedy),) = run_distributed(_generate, 1, root, Sampling())
    assert once != other and one == greedy


def test_top_k_and_top_p_take_the_likeliest() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.15, 0.35]]).log()
    draws = {"k": {"top_k": 2}, "p": {"top_p": 0.8}, "all": {}}
    seen = {}
    for name, bounds in draws.items():
        sampling = Sampling(temperature=1.0, **bounds)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(0)
        seen[name] = {int(sampling.choose(logits, generator)) for _ in range(200)}
    assert seen == {"k": {1, 3}, "p": {1, 2, 3}, "all": {0, 1, 2, 3}}
    for wrong in ({"temperature": -1.0}, {"top_p": 0.0, "temperature": 1.0}, {"top_k": 3}):
        with pytest.raises(UsageError):
            Sampling(**wrong)  # type: ignore[arg-type]


def test_too_long_and_foreign_prompts_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "ours", weights_of(MODELS["gpt2"]))
    assert run_distributed(_refusals, 1, str(tmp_path / "ours"))[0] == [
        "5 tokens of prompt and --num-tokens 33 are more than the model's 37 positions."
        " Nearest valid: --num-tokens 32.",
        "token 257 is outside of the vocabulary, 0 to 256",
        "the prompt has no tokens",
    ]


def _refusals(rank: int, world_size: int, root: str) -> list[str]:
    generator = load_generator(root, ParallelConfig(), DeviceSeam.create("cpu", rank, None))
    said = []
    for tokens, count in ((PROMPT, 33), ([257], 1), ([], 1)):
        try:
            generator.continue_(tokens, count, Sampling())
        except UsageError as error:
            said.append(str(error))
    return said
