"""``--recompute-adapt``: a wrong prediction is noticed, the plan follows the measured peak, and the bits stay."""

from __future__ import annotations

import contextlib
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megackpt.mesh.layout import MeshShape
from megackpt.observe.auto import Task, task_of
from megackpt.plan import Plan
from megackpt.plan.accelerators import GIB
from megackpt.plan.policies import Policy, plan_for
from megackpt.plan.predict import predict
from megackpt.train import auto
from megackpt.train.adapt import Adapter, Peaks
from megackpt.train.auto import predicted
from megackpt.train.loop import train
from tests.layouts import SMALL_GPT, Flags, Layout, built, logged
from tests.pool import run_distributed
from tests.train.test_auto import DROPOUT, task

FLAGS: Flags = SMALL_GPT | DROPOUT | {"num-layers": 5, "global-batch-size": 8, "train-iters": 9}
LAYOUT = Layout(pp=2)


def middle(flags: Flags, layout: Layout) -> float:
    """A budget in GiB, half way between what the leanest plan needs and keeping everything."""
    made = task(flags, layout)
    everything = plan_for(made.layout.pieces, Policy())
    most = predict(made.model, made.layout, everything, made.machine, watched=True).peak_bytes
    return (made.least_bytes() + most) / 2 / GIB


def _trained(rank: int, world_size: int, flags: Flags, layout: Layout, factor: float | None) -> str:
    """The whole run; with a ``factor`` its predictions are taken times that until something better is learnt."""

    def wrong(*arguments: Any) -> Task:
        made = task_of(*arguments)
        return replace(made, scales=(factor,) * made.layout.p) if factor else made

    auto.task_of = wrong  # type: ignore[attr-defined]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as text:
            train(built(flags, layout))
    finally:
        auto.task_of = task_of  # type: ignore[attr-defined]
    return text.getvalue()


@pytest.mark.parametrize(("factor", "word"), [(0.6, "leaner: the budget was broken"), (1.6, "faster: bytes were left")])
def test_a_planted_error_is_found_and_mended(tmp_path: Path, factor: float, word: str) -> None:
    """Too low a prediction breaks the budget, too high a one leaves bytes: both change the plan once, after the second
    step, on all ranks, in run folder and checkpoint; losses and norms are those of a run that keeps all."""
    gib = middle(FLAGS, LAYOUT)
    plain = FLAGS | {"metrics-file": str(tmp_path / "plain.jsonl")}
    run_distributed(_trained, 2, plain, LAYOUT, None)
    adapted = FLAGS | {
        "recompute-granularity": "auto", "memory-budget-gib": gib, "recompute-adapt": True, "memory-track-interval": 1,
        "run-dir": str(tmp_path / "run"), "save": str(tmp_path / "ckpt"),
    }  # fmt: skip
    (_, text) = run_distributed(_trained, 2, adapted, LAYOUT, factor)
    metrics = tmp_path / "run" / "metrics.jsonl"
    keys = ("lm_loss", "grad_norm")
    assert logged(metrics, *keys) == logged(tmp_path / "plain.jsonl", *keys)

    changes = re.findall(r"megackpt: the plan changes after iteration (\d+), (.*) \(", text)
    assert changes == [("2", word)]
    made = task(FLAGS | {"memory-budget-gib": gib}, LAYOUT)
    made = replace(made, budget_bytes=int(gib * GIB))
    first = replace(made, scales=(factor,) * 2).choose().choice.plan
    plan = Plan.from_json(json.loads((tmp_path / "run" / "plan.json").read_text()))
    assert plan == made.choose().choice.plan != first
    (saved,) = (tmp_path / "ckpt").glob("iter_*/run.json")
    assert json.loads(saved.read_text())["extra"]["plan"] == plan.to_json()

    fixed = [row.total_bytes - row.activation_bytes - made.machine.margin_bytes for row in predicted(made, plan).stages]
    peaks = [
        [f + peak for f, peak in zip(fixed, row[0], strict=True)] for row in logged(metrics, "peak_activation_bytes")
    ]
    assert (max(peaks[1]) > made.budget_bytes) == (factor < 1)
    assert all(max(row) <= made.budget_bytes for row in peaks[2:])
    said = [line for line in text.splitlines() if "megackpt: peak of activations in iteration" in line]
    assert [line.split(":")[1].split()[-1] for line in said] == ["2", "3"]
    assert all(float(part) < 3 for line in said for part in re.findall(r"predicted \([+-](.*?)%\)", line))


def test_looks_are_bounded_and_a_broken_budget_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = middle(FLAGS, LAYOUT)
    made = replace(task(FLAGS, LAYOUT), budget_bytes=int(gib * GIB))
    plan = made.choose().choice.plan
    adapter = Adapter(made, plan, 1)
    for module in ("megackpt.train.adapt.from_first", "megackpt.train.adapt.agree"):
        monkeypatch.setattr(module, lambda work, *_: work() if callable(work) else None)

    def peaks(scale: float) -> Peaks:
        own = predicted(made, adapter.plan).stages
        return Peaks(
            tuple(int(row.activation_bytes * scale) for row in own), tuple(row.activation_bytes for row in own)
        )

    assert next(i for i in range(1, 40) if adapter.looks(i)) == 2
    assert "leaner" in str(adapter.look(2, peaks(1.3))) and adapter.plan != plan
    lean = adapter.plan
    assert not adapter.looks(5) and adapter.looks(6)
    assert adapter.look(6, peaks(0.8)) is None and adapter.plan == lean  # 1.3 was seen once
    assert not adapter.looks(13) and adapter.looks(14)
    assert "leaner" in str(adapter.look(14, peaks(3.0)))
    least = replace(made, scales=adapter.scales)
    assert adapter.plan == least.choose(least.least_bytes()).choice.plan or least.least_bytes() <= made.budget_bytes


def test_peaks_of_a_stage_are_those_of_its_fullest_rank() -> None:
    made = replace(task(FLAGS, LAYOUT), budget_bytes=GIB)
    rows = predicted(made, made.choose().choice.plan)
    peaks = Peaks.of([5, 7, 11, 3], MeshShape(tp=2, cp=1, dp=1, pp=2), rows)
    assert peaks.measured == (7, 11) and peaks.predicted == tuple(row.activation_bytes for row in rows.stages)
    text = str(Peaks((1100, 2048), (1000, 2048)))
    assert text == (
        "stage 0 1.07 KiB measured, 0.977 KiB predicted (+10.0%), stage 1 2 KiB measured, 2 KiB predicted (+0.0%)"
    )
