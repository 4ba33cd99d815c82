"""Communication beside computation on two GPUs: the same bits as without, by the command line that users give.

What is reduced or gathered too early, or read before it has arrived, shows as other bits; the logic itself (what is
started when, what waits for what) is proven on a CPU in `tests/train/test_distributed_optimizer.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.layouts import GPT, Flags, Layout, logged, words
from tests.pool import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
WATCHED = ("iteration", "lm_loss", "grad_norm", "skipped_iterations")
LARGER: Flags = GPT | {
    "hidden-size": 768,
    "ffn-hidden-size": 2688,
    "seq-length": 256,
    "max-position-embeddings": 256,
    "micro-batch-size": 2,
    "global-batch-size": 16,
    "bf16": True,
    "deterministic-mode": True,
    "ddp-bucket-size": 1_000_000,  # many buckets on the way at once
    "train-iters": 8,
    "check-replicas-interval": 2,
}
MODES: dict[str, Flags] = {
    "grad": {"overlap-grad-reduce": True},
    "sharded": {"use-distributed-optimizer": True},
    "both": {"use-distributed-optimizer": True, "overlap-grad-reduce": True, "overlap-param-gather": True},
}


def rows(flags: Flags, layout: Layout, path: Path) -> list[tuple[object, ...]]:
    """The numbers of every step of a run under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["pretrain_gpt.py", *words(flags | layout.flags | {"metrics-file": str(path)})]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-4000:]
    return logged(path, *WATCHED)


@pytest.mark.parametrize("mode", MODES)
def test_overlap_over_data_parallel_ranks_changes_no_bit(mode: str, tmp_path: Path) -> None:
    """Two ranks add two numbers, so that a reduce-scatter and an all-reduce cannot differ."""
    plain = rows(LARGER, Layout(dp=2), tmp_path / "plain.jsonl")
    assert len(plain) == 8
    assert rows(LARGER | MODES[mode], Layout(dp=2), tmp_path / "other.jsonl") == plain


@pytest.mark.parametrize("recompute", ["free", "full"])
def test_replay_with_tensor_parallel_overlap_changes_no_bit(recompute: str, tmp_path: Path) -> None:
    layout = Layout(tp=2, sp=True)
    plain = rows(LARGER, layout, tmp_path / "plain.jsonl")
    assert rows(LARGER | {"recompute-granularity": recompute}, layout, tmp_path / "other.jsonl") == plain


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "gpipe", "interleaved"])
def test_stages_on_two_devices_equal_their_repetition(schedule: str, tmp_path: Path) -> None:
    layout = Layout(pp=2, vp=2 if schedule == "interleaved" else 1)
    flags = LARGER | ({} if schedule == "interleaved" else {"pipeline-schedule": schedule})
    first = rows(flags, layout, tmp_path / "first.jsonl")
    assert rows(flags, layout, tmp_path / "second.jsonl") == first


def test_messages_do_not_add_up_over_a_step(tmp_path: Path) -> None:
    """A transfer's handle holds its tensor; four times as many micro-batches need no more memory."""

    def peaks(batch: int) -> list[int]:
        path = tmp_path / f"{batch}.jsonl"
        rows(LARGER | {"global-batch-size": batch, "train-iters": 3}, Layout(pp=2), path)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        (measured,) = [line["peak_activation_bytes"] for line in lines if line.get("peak_activation_bytes")]
        return measured

    message = 2 * 256 * 2 * 768  # bf16 [s, b, h]
    few, many = peaks(16), peaks(64)
    assert all(b <= a + 4 * message for a, b in zip(few, many, strict=True)), (few, many)
