"""Converted weights in training, and trained weights converted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megackpt.persist.convert import read_checkpoint, write_checkpoint, write_folder
from megackpt.persist.convert.huggingface import read_folder
from megackpt.train.checkpoint import load_run
from tests.layouts import LLAMA, SMALL_GPT, SMALL_LLAMA, Flags, Layout, built, train_all, whole_weights
from tests.persist.convert.made import llama, tensors_of, weights_of
from tests.pool import run_distributed

MADE: Flags = LLAMA | {
    "num-layers": 5,
    "hidden-size": 48,
    "num-attention-heads": 8,
    "num-query-groups": 2,
    "kv-channels": 10,
    "ffn-hidden-size": 168,
    "seq-length": 20,
    "vocab-size": 257,
    "finetune": True,
}


def _loaded(rank: int, world_size: int, flags: Flags, layout: Layout) -> dict[str, Tensor]:
    trainer = built(flags, layout)
    load_run(trainer)
    return whole_weights(trainer)


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, pp=2)], ids=str)
def test_a_run_starts_from_converted_weights(tmp_path: Path, layout: Layout) -> None:
    write_checkpoint(tmp_path / "ours", weights_of(llama(8, 2, 10)), file_bytes=60_000)
    found = run_distributed(_loaded, layout.world_size, MADE | {"load": str(tmp_path / "ours")}, layout)
    seen: dict[str, Tensor] = {}
    for weights in found:
        seen |= weights
    expected = tensors_of(llama(8, 2, 10))
    assert set(seen) == set(expected)
    assert all(torch.equal(seen[name][: len(tensor)], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("flags", [SMALL_GPT, SMALL_LLAMA], ids=["gpt", "llama"])
def test_trained_weights_leave_for_hugging_face(tmp_path: Path, flags: Flags) -> None:
    run = flags | {"train-iters": 2, "save": str(tmp_path / "run"), "recompute-granularity": "full"}
    run_distributed(train_all, 4, run, Layout(tp=2, pp=2))
    ours = read_checkpoint(tmp_path / "run")
    theirs = read_folder(write_folder(tmp_path / "theirs", ours))
    assert (ours.vocab, theirs.vocab) == (509, 509)
    for name in ours.tensors:
        assert torch.equal(ours.make(name), theirs.make(name)), name
