"""A batch that grows: which samples a step has, how long the run is, and that a resume does not disturb it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megackpt.config.run import RunConfig
from tests.layouts import SMALL_GPT, Flags, Layout, logged, relative, train_all
from tests.pool import run_distributed

RAMP: Flags = {name: value for name, value in SMALL_GPT.items() if name != "train-iters"} | {
    "micro-batch-size": 1,
    "global-batch-size": 8,
    "rampup-batch-size": [2, 2, 18],
    "train-samples": 53,
    "lr-decay-style": "linear",
    "lr-warmup-samples": 10,
    "params-dtype": "fp64",
    "eval-iters": 1,
    "eval-interval": 4,
}
# 2 until 6 samples are consumed, 4 until 12, 6 until 18, then 8; a tail of 3 is left out
SIZES = [2, 2, 2, 4, 4, 6, 8, 8, 8, 8]
WATCHED = ("iteration", "global_batch_size", "consumed_samples", "learning_rate", "lm_loss", "grad_norm")


def test_length_of_a_run_by_hand() -> None:
    config = RunConfig.from_flags(RAMP)
    assert config.batch.sizes == (2, 4, 6, 8)
    consumed, sizes = 0, []
    while len(sizes) < config.total_iterations:
        sizes.append(config.batch.size_at(consumed))
        consumed += sizes[-1]
    assert (sizes, consumed) == (SIZES, 52)
    assert config.last_sample(0, 0) == 52
    assert (config.last_iteration(4, 10), config.last_sample(4, 10)) == (10, 52)
    flat = RunConfig.from_flags(RAMP | {"rampup-batch-size": [8, 2, 18]})
    assert flat.batch.sizes == (8,) and flat.last_sample(0, 0) == 48
    at_once = RunConfig.from_flags(RAMP | {"rampup-batch-size": [2, 2, 0]})
    assert at_once.batch.size_at(0) == 8


SHARDED: Flags = {
    "use-distributed-optimizer": True,
    "overlap-grad-reduce": True,
    "overlap-param-gather": True,
    "ddp-bucket-size": 9000,
}


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        pytest.param(Layout(dp=2), SHARDED, id="dp2-sharded"),
        pytest.param(Layout(pp=2), {}, id="pp2"),
        pytest.param(Layout(dp=2), {}, id="dp2", marks=pytest.mark.full),
        pytest.param(Layout(pp=2, vp=2), {"num-layers": 4}, id="pp2-vp2", marks=pytest.mark.full),
        pytest.param(Layout(pp=2), {"pipeline-schedule": "zb-h1"}, id="zero-bubble", marks=pytest.mark.full),
    ],
)
def test_steps_and_resume_in_the_ramp(layout: Layout, more: Flags, tmp_path: Path) -> None:
    ramp = RAMP | more
    alone_flags = RAMP | {name: value for name, value in more.items() if name == "num-layers"}
    whole, alone = tmp_path / "whole.jsonl", tmp_path / "alone.jsonl"
    run_distributed(train_all, 2, ramp | {"metrics-file": str(whole)}, layout)
    run_distributed(train_all, 1, alone_flags | {"metrics-file": str(alone)}, Layout())
    rows, expected = logged(whole, *WATCHED), logged(alone, *WATCHED)
    consumed = [sum(SIZES[: i + 1]) for i in range(len(SIZES))]
    rates = [1e-3 * min(c / 10, (53 - c) / 43) for c in (0, *consumed[:-1])]
    assert [row[:3] for row in rows] == list(zip(range(1, 11), SIZES, consumed, strict=True))
    assert [row[3] for row in rows] == pytest.approx(rates, rel=1e-12)
    for row, other in zip(rows, expected, strict=True):
        assert row[:4] == other[:4] and max(map(relative, row[4:], other[4:])) <= 1e-12

    saved, parts = str(tmp_path / "saved"), tmp_path / "parts.jsonl"
    again = ramp | {"metrics-file": str(parts), "save": saved, "load": saved}
    for exits in (3, 5, 100):  # the second process starts at the first step of 4, the third in the middle of a size
        run_distributed(train_all, 2, again | {"exit-interval": exits}, layout)
    assert logged(parts, *WATCHED) == rows
    lines = [json.loads(line) for line in whole.read_text().splitlines()]
    assert {line["evaluated_samples"] for line in lines if "valid_loss" in line} == {8}, "evaluations are full"


def test_a_ramp_of_one_size_is_no_ramp(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("flat.jsonl", "none.jsonl")]
    flat = RAMP | {"rampup-batch-size": [8, 8, 30], "train-samples": 24}
    none = {name: value for name, value in flat.items() if name != "rampup-batch-size"}
    for flags, path in zip((flat, none), paths, strict=True):
        run_distributed(train_all, 1, flags | {"metrics-file": str(path)}, Layout())
    assert logged(paths[0], *WATCHED) == logged(paths[1], *WATCHED) != []
