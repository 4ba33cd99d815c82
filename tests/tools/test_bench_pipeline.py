"""The benchmark compares one model with itself, cut the same way on both sides.  Nothing here is timed."""

from __future__ import annotations

import pytest

from tests.pool import run_distributed
from tools.bench_pipeline import Job, on_rank, parse, report
from tools.bench_plain import Model

MODEL = Model(layers=3, hidden=32, heads=4, seq=24, vocab=96)
Found = dict[str, dict[str, tuple[list[float], int]]]


def _measure(rank: int, world_size: int, job: Job) -> Found:
    """Losses and live peak by policy and side; `on_rank` itself refuses different losses."""
    return {
        policy: {side: (got.losses, got.peak_bytes) for side, got in sides.items()}
        for policy, sides in on_rank(job).items()
    }


@pytest.mark.parametrize(
    ("stages", "tensor", "ours"),
    [
        (2, 1, {}),
        (2, 1, {"account-for-loss-in-pipeline-split": True}),
        pytest.param(2, 2, {}, marks=pytest.mark.full),
    ],
    ids=["pp2", "pp2-uneven", "tp2-pp2"],
)
def test_both_sides_train_one_model(stages: int, tensor: int, ours: dict[str, object]) -> None:
    job = Job(MODEL, stages=stages, tensor=tensor, micro_batches=3, rounds=1, ours=ours)
    for found in run_distributed(_measure, job.processes, job, timeout=100):
        first = found["none"]["ours"][0]
        assert len(first) == 3 and first[0] != first[-1]
        for sides in found.values():
            assert sides["ours"][0] == first  # recompute changes no bit
            assert all(abs(a - b) <= 1e-5 * b for a, b in zip(sides["torch"][0], first, strict=True))
        assert found["full"]["ours"][1] < found["none"]["ours"][1]


def test_words_and_table() -> None:
    words = ["--tensor", "2", "--rounds", "3", "--pipeline-schedule=zb-h1", "--json", "x"]
    job, path = parse([*words, "--equal-split", "--same-split"])
    assert (job.tensor, job.rounds, job.ours, job.same_split, path) == (2, 3, {"pipeline-schedule": "zb-h1"}, True, "x")
    assert parse(words)[0].ours == job.ours | {"account-for-loss-in-pipeline-split": True}
    assert job.flags("full")["recompute-granularity"] == "full" and job.flags("full")["sequence-parallel"] is True
    runs = {"wall": [2.0, 1.0], "cpu": [1.0, 1.0]}
    side = {"runs": runs, "losses": [1.0], "peak_bytes": 1 << 20, "idle_s": None}
    text = report(Job(MODEL, policies=("none",)), [{"none": {"ours": side | {"idle_s": 0.15}, "torch": side}}] * 2)
    assert "1.0 / 1.0" in text and "10% / 10%" in text
