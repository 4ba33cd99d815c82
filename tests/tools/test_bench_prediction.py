"""All cases are planned with the flags that they are trained with.  Nothing is timed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from megackpt.plan.decision import Plan
from megackpt.train.step import Stepper
from tests.pool import run_distributed
from tools.bench_prediction import AT_ONCE, FIRST, LAYOUTS, MODELS, PLANS, TRAINED, Case, cases, main, on_rank


@pytest.fixture
def trained() -> Iterator[list[Case]]:
    """The cases that would have been run; each takes twice what was predicted with replay, thrice without."""
    seen: list[Case] = []

    def measured(case: Case) -> dict[str, list[float]]:
        seen.append(case)
        typical = {"none": 3 * case.predicted("none", "cpu"), "full": 2 * case.predicted("full", "cpu")}
        return {plan: [seconds, 0.5 * seconds, 9.0 * seconds] for plan, seconds in typical.items()}

    with mock.patch.object(Case, "measured", measured):
        yield seen


def test_every_case_is_planned_and_compared(
    trained: list[Case], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "all.json"
    assert main(["--machine", "cpu", "--json", str(path)]) == 0
    assert trained == cases() and len(trained) == len(MODELS) * len(LAYOUTS)
    data = json.loads(path.read_text())["cases"]
    assert [row["case"] for row in data][:4] == ["T0, pp 1", "T0, pp 2", "T0, pp 4", "T0, tp 2"]
    times, ratios = capsys.readouterr().out.split("\n\n")
    assert times.count("-67%") == times.count("-50%") == len(trained)
    for row in data:
        (line,) = [text for text in ratios.splitlines() if text.startswith(f"| {row['case']} ")]
        said = row["predicted_s"]["full"] / row["predicted_s"]["none"]
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        assert cells[1:] == [f"{said:.3f}", f"{said * 2 / 3:.3f}", f"{100 * said / 3:+.1f}"]


def test_only_some(trained: list[Case], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--machine", "cpu", "--only", "T0, pp 4"]) == 0
    assert [case.name for case in trained] == ["T0, pp 4"]
    assert capsys.readouterr().out.count("\n") == 4 + 1 + 3


def _plans(rank: int, world_size: int, words: dict[str, list[str]]) -> tuple[list[Plan], dict[str, list[float]]]:
    seen: list[Plan] = []
    train = Stepper.train

    def watched(stepper: Stepper, *arguments: object) -> object:
        seen.append(stepper.trainer.plan)
        return train(stepper, *arguments)  # type: ignore[arg-type]

    with mock.patch.object(Stepper, "train", watched):
        return seen, on_rank(words, world_size, 1)


def test_plans_take_turns() -> None:
    """What was planned is what is trained, a few steps at a time, the first turns and steps left out."""
    case = Case("T0", "pp 2")
    words = {plan: [*case.words(plan), *TRAINED.split()] for plan in PLANS}
    for seen, seconds in run_distributed(_plans, case.world, words):
        none, full = seen[0], seen[AT_ONCE]
        assert none.name == "none" and full.name.startswith("full")
        assert seen == [plan for plan in (none, full, full, none) for _ in range(AT_ONCE)]
        assert FIRST == 1 and {plan: len(times) for plan, times in seconds.items()} == dict.fromkeys(PLANS, AT_ONCE - 1)
