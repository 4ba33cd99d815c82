"""``megackpt plan`` with more freedom: another split, slots, host memory, and the trainer's own choice."""

from __future__ import annotations

import pytest

from megackpt.cli.main import main
from megackpt.config.errors import UsageError
from megackpt.plan.accelerators import GIB
from megackpt.plan.advice import size_words
from tests.cli.test_plan import RUN, report, said, words

HEAVY_HEAD = RUN.replace("--vocab-size 32000", "--vocab-size 128000").replace("--num-layers 8", "--num-layers 12")


def test_another_split_where_it_is_asked_for() -> None:
    """PP-09: the recommended plan has fewer layers beside a heavy head, said as the flags that give them."""
    even, free = report("", HEAVY_HEAD), report("--plan-split auto", HEAVY_HEAD)
    assert even.best is not None and free.best is not None
    assert [even.best.layout.layers_of(stage) for stage in range(2)] == [6, 6]
    first, last = (free.best.layout.layers_of(stage) for stage in range(2))
    assert first > last and free.best.step_seconds < even.best.step_seconds * 0.95
    assert f"--decoder-first-pipeline-num-layers {first}." in said(free)
    assert "Won: a step shorter by 'per stage, other layers per stage' " in said(free)
    assert free.to_json()["best"]["split_flags"] == f"--decoder-first-pipeline-num-layers {first}"
    assert even.to_json()["best"]["split_flags"] is None


def test_slots_are_offered_and_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    base = RUN.replace("parallel-size 2", "parallel-size 4").replace("--vocab-size 32000", "--vocab-size 2000")
    tight = "--memory-budget-gib 3.1 --plan-ahead off"
    on, off = report(tight, base), report(f"{tight} --plan-slots off", base)
    assert on.best is not None and off.best is not None
    assert on.best.name == "per stage, slots" and off.best.name == "per stage"
    assert on.best.step_seconds < off.best.step_seconds
    assert {"per stage", "per stage, slots"} <= {e.name for e in on.ladder}
    assert "Won: a step shorter by 'per stage'" in said(on) and "'per stage, slots'" in said(on)
    slots = [stage["slots"] for stage in on.to_json()["best"]["stages"]]
    assert slots[0] > 1 == slots[-1]
    assert main(["plan", *words(tight, base)]) == 1
    out = capsys.readouterr().out
    assert "ms/mb  slots" in out and "stage 0: slot 0: " in out and "| slots 1 on: " in out


def test_replay_ahead_is_offered_and_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    base = RUN.replace("parallel-size 2", "parallel-size 4").replace("--vocab-size 32000", "--vocab-size 2000")
    tight = "--memory-budget-gib 3.1 --plan-slots off"
    on, off = report(tight, base), report(f"{tight} --plan-ahead off", base)
    assert on.best is not None and off.best is not None
    assert on.best.name == "per stage, ahead" and off.best.name == "per stage"
    assert on.best.step_seconds < off.best.step_seconds and on.best.peak_bytes <= 3.1 * GIB
    assert "'per stage, ahead' " in said(on) and "ahead" not in said(off)
    chunks = [stage[0][0] for stage in on.to_json()["best"]["plan"]["stages"]]
    assert any(chunk.get("ahead") for chunk in chunks) and "ahead" not in chunks[-1]
    assert main(["plan", *words(tight, base)]) == 1
    assert " ahead of the gradient" in capsys.readouterr().out


def test_host_memory_only_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    base = RUN.replace("parallel-size 2", "parallel-size 4").replace("--vocab-size 32000", "--vocab-size 2000")
    tight = "--memory-budget-gib 3.1 --plan-slots off --plan-ahead off"
    away = report(f"{tight} --plan-offload", base)
    assert away.best is not None and away.best.name == "per stage, host memory"
    rows = away.to_json()["best"]["stages"]
    assert all(row["total_bytes"] <= 3.1 * GIB for row in rows) and rows[0]["host_bytes"] > 0
    in_flight = rows[0]["peak"]["in_flight"]
    assert rows[0]["terms"]["lanes"] == min(2, in_flight) * rows[0]["host_bytes"] // in_flight
    assert "wait in host memory" in said(away) and "offload_host" not in report(tight, base).best.plan.dumps()  # type: ignore[union-attr]
    assert main(["plan", *words(f"{tight} --plan-offload", base)]) == 1
    assert "host GiB" in capsys.readouterr().out


def test_the_trainers_own_choice_can_be_planned() -> None:
    made = report("--recompute-granularity auto --memory-budget-gib 4.3")
    assert made.given.name == "per stage, ahead" and made.fits and made.budget_bytes == round(4.3 * GIB)
    with pytest.raises(UsageError, match="--memory-budget-gib 4 is impossible"):
        report("--recompute-granularity auto --memory-budget-gib 4.0")


def test_small_sizes_are_said_in_mib() -> None:
    assert [size_words(size) for size in (0, 3 * 2**19, GIB // 16, 5 * GIB // 2)] == [
        "0.0 GiB",
        "1.50 MiB",
        "0.1 GiB",
        "2.5 GiB",
    ]
    with pytest.raises(UsageError, match="--memory-budget-gib of less than a byte is impossible"):
        report("--recompute-granularity auto --memory-budget-gib 1e-10")
