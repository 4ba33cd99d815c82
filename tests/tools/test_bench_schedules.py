"""The schedules are compared at equal work, by the event record of real steps.  Nothing here is timed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megackpt.plan.events import Event, Record, StepRecord
from megackpt.plan.schedule import schedule_lists
from megackpt.plan.simulate import Cost, simulate
from tests.pool import run_distributed
from tools.bench_plain import Model
from tools.bench_schedules import Job, check_same, measured, on_rank, parse, report

MODEL = Model(layers=4, hidden=24, heads=2, seq=14, vocab=66)
CHUNKS = {"1f1b": 1, "interleaved": 2, "zb-h1": 1}


def _on_rank(rank: int, world_size: int, job: Job, n: int, folder: str) -> dict[str, dict[str, Any]]:
    return on_rank(job, n, folder)


def test_equal_work_in_the_order_of_each_schedule(tmp_path: Path) -> None:
    """Every recorded step has the actions of its schedule in order; with F = B = W their idle time is the known one."""
    n, job = 4, Job(MODEL, rounds=1)
    found = run_distributed(_on_rank, 2, job, n, str(tmp_path))
    check_same(found)
    assert all(len(set(of_rank["1f1b"]["losses"])) == 3 for of_rank in found)  # it trains
    table = {}
    for name, chunks in CHUNKS.items():
        record = Record.read(tmp_path / name)
        lists = schedule_lists(name, 2, n, chunks)
        assert sorted(record.steps) == [0, 1, 2]
        for step in record.steps.values():
            assert [[e.action for e in step.events if e.rank == rank] for rank in range(2)] == lists
        whole = {"F": 1 / chunks, "B": 1.0 if name == "zb-h1" else 2 / chunks, "W": 1.0}
        timeline = simulate(lists, lambda _, action, cost=whole: Cost(cost[action.kind]))  # type: ignore[misc]
        table[name] = (timeline.idle_seconds, timeline.step_seconds)
        got = measured(record, found[0][name]["flops"])
        assert len(got.seconds) == 1 and all(0 <= share < 1 for share in (*got.median_idle, *got.simulated))
    assert table == {"1f1b": ((3, 3), 15), "interleaved": ((1.5, 1.5), 13.5), "zb-h1": ((1, 1), 13)}


def test_different_work_is_no_comparison() -> None:
    same = {"losses": [2.5], "flops": 7}
    check_same([{"1f1b": same, "zb-h1": same}])
    for other in ({"losses": [2.5], "flops": 8}, {"losses": [2.6], "flops": 7}):
        with pytest.raises(RuntimeError, match="zb-h1 does not do what 1f1b does"):
            check_same([{"1f1b": same, "zb-h1": same}, {"1f1b": same, "zb-h1": other}])


def test_idle_time_and_table() -> None:
    """Rank 0 works 2 and 3 of 10 seconds, rank 1 starts later and waits 1 of its 4."""
    rows = [(0, "F", 0.0, 2.0, 0.0), (0, "B", 5.0, 10.0, 2.0), (1, "F", 2.0, 4.0, 0.0), (1, "B", 4.0, 6.0, 1.0)]
    events = [Event(rank, rank, kind, 0, 0, start, end, wait) for rank, kind, start, end, wait in rows]
    step = StepRecord(events)
    assert (step.idle_seconds(0), step.idle_seconds(1)) == (5.0, 7.0)
    got = measured(Record({"stages": 2}, {0: StepRecord(), 1: StepRecord(), 2: step}), 3_000_000_000)
    assert got.simulated == [3 / 8, 5 / 8]  # 2, then 2 and 1 on the other rank, then 3
    text = report({4: {"1f1b": got}})
    assert "| 50.0% / 70.0% |" in text and "10000 |        1.000" in text and "3.00" in text
    job, path = parse(["--micro-batches", "2", "5", "--layers", "8", "--json", "x"])
    assert (job.micro_batches, job.model.layers, job.model.vocab, path) == ((2, 5), 8, 512, "x")
    assert job.pipeline("zb-h1", 5).flags("none")["global-batch-size"] == 10
