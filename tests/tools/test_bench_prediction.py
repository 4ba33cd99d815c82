"""All cases are planned with the flags that they would be trained with.  Nothing is trained here, nothing timed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from tools import bench_prediction
from tools.bench_prediction import LAYOUTS, MODELS, Case, cases, main


@pytest.fixture
def trained() -> Iterator[list[Case]]:
    """The cases that would have been run; each takes twice what was predicted with replay, thrice without."""
    seen: list[Case] = []

    def measured(case: Case) -> list[float]:
        seen.append(case)
        seconds = (2 if case.full else 3) * case.predicted("cpu")
        return [seconds, 0.5 * seconds, 9.0 * seconds]

    with mock.patch.object(Case, "measured", measured):
        yield seen


def test_every_case_is_planned_and_compared(
    trained: list[Case], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "all.json"
    assert main(["--machine", "cpu", "--json", str(path)]) == 0
    assert trained == cases() and len(trained) == len(MODELS) * len(LAYOUTS) * 2
    data = json.loads(path.read_text())["cases"]
    assert [row["case"] for row in data][:4] == ["T0, pp 1", "T0, pp 1, full", "T0, pp 2", "T0, pp 2, full"]
    times, ratios = capsys.readouterr().out.split("\n\n")
    assert times.count("-67%") == times.count("-50%") == len(trained) // 2
    by_name = {row["case"]: row["predicted_s"] for row in data}
    for none in (case for case in trained if not case.full):
        (line,) = [row for row in ratios.splitlines() if row.startswith(f"| {none.name} ")]
        said = by_name[none.name + ", full"] / by_name[none.name]
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        assert cells[1:] == [f"{said:.3f}", f"{said * 2 / 3:.3f}", f"{100 * said / 3:+.1f}"]


def test_only_some(trained: list[Case], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--machine", "cpu", "--only", "T0, pp 4"]) == 0
    assert [case.name for case in trained] == ["T0, pp 4", "T0, pp 4, full"]
    assert capsys.readouterr().out.count("\n") == 4 + 1 + 3


def test_a_case_runs_what_it_planned() -> None:
    """The measured command has the flags of the plan, on as many ranks."""
    case = Case("Llama", "pp 2", True)
    run = mock.Mock(side_effect=RuntimeError)
    with mock.patch.object(bench_prediction.subprocess, "run", run), pytest.raises(RuntimeError):
        case.measured()
    command = run.call_args.args[0]
    assert command[command.index("--nproc-per-node") + 1] == "2" and case.world == 2
    at = command.index(case.words[0])
    assert command[at : at + len(case.words)] == case.words
