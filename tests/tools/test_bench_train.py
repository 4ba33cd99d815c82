"""The benchmark compares one model with itself, and its three counts of memory agree.  Nothing here is timed."""
from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.pool import run_distributed
from tools.bench_common import in_turns, median_ratio, table
from tools.bench_plain import Model
from tools.bench_train import POLICIES, Job, main, measure

TINY = ["--layers", "3", "--hidden", "32", "--heads", "4", "--seq", "24", "--vocab", "96", "--micro-batch", "2",
        "--micro-batches", "3", "--rounds", "2"]  # fmt: skip
MODEL = Model(layers=3, hidden=32, heads=4, seq=24, vocab=96)
ROWS = 24 * 2
SBH = ROWS * 32 * 4  # bytes of one activation


def _measure(rank: int, world_size: int, job: Job) -> dict[str, dict[str, tuple[list[float], dict[str, int]]]]:
    measured = measure(job)
    return {
        policy: {side: (got.losses, got.bytes) for side, got in sides.items()} for policy, sides in measured.items()
    }


@pytest.mark.parametrize("fused", [True, False])
def test_both_sides_train_one_model(fused: bool) -> None:
    job = Job(replace(MODEL, fused=fused), micro_batch=2, micro_batches=3, rounds=3)
    (measured,) = run_distributed(_measure, 1, job)
    reference = measured["none"]["plain"][0]
    assert len(reference) == 4 and reference[-1] != reference[0]
    for sides in measured.values():
        for losses, _ in sides.values():
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(reference), rtol=1e-5, atol=0.0)
    ours = [measured[policy]["ours"][0] for policy in POLICIES]
    assert ours[0] == ours[1] == ours[2]  # recompute changes no bit


def test_the_counts_of_memory_agree() -> None:
    (measured,) = run_distributed(_measure, 1, Job(MODEL, micro_batch=2, micro_batches=3, rounds=1))
    small = 16 * ROWS  # the loss and what its masked mean saves, outside of all steps
    for policy, sides in measured.items():
        for side, (_, counted) in sides.items():
            assert abs(counted["alive"] - counted["hooks"]) <= small, (policy, side, counted)
        assert 0 <= sides["ours"][1]["hooks"] - sides["ours"][1]["engine"] <= small
    kept = {policy: sides["ours"][1]["engine"] for policy, sides in measured.items()}
    assert kept["full"] < kept["selective"] < kept["none"]
    # Full: input and attn.residual of each layer; the last output and its two statistics, the head's input, the
    # softmax; token ids twice.
    assert kept["full"] == 3 * 2 * SBH + (SBH + 2 * 4 * ROWS) + SBH + ROWS * 96 * 4 + 2 * 8 * ROWS


def test_turns_alternate_and_ratios_are_paired() -> None:
    order: list[str] = []
    runs = in_turns([lambda: order.append("a"), lambda: order.append("b")], 3, warm_up=1)
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"
    assert [len(r.wall) for r in runs] == [len(r.cpu) for r in runs] == [3, 3]
    assert median_ratio([2.0, 9.0, 4.0], [1.0, 1.0, 4.0]) == 2.0


def test_table_lines_up() -> None:
    text = table(["policy", "n"], [["none", "1"], ["selective", "10"]])
    assert {len(line) for line in text.splitlines()} == {len("| selective | 10 |")}


def _command(rank: int, world_size: int, arguments: list[str]) -> int:
    return main(arguments)


def test_command_with_dropout_writes_every_run(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    assert run_distributed(_command, 1, [*TINY, "--dropout", "0.1", "--unfused", "--json", str(out)]) == [0]
    data = json.loads(out.read_text())
    assert data["job"]["model"]["dropout"] == 0.1 and data["machine"]["threads"] == 1
    for sides in data["measured"].values():
        assert [len(sides[side]["runs"]["cpu"]) for side in ("ours", "plain")] == [2, 2]
