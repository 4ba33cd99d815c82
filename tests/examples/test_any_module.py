"""The example does what its text says: the same training to the bit, under the budget."""
from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(name: str) -> ModuleType:
    """An example as a module; the folder is not a package."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_the_same_training_under_a_budget(share: float) -> None:
    example = load("any_module")
    fitted, budget, plain, planned = example.compare(share, steps=3, batch=8)
    assert plain.losses == planned.losses
    assert all(torch.equal(value, planned.state[name]) for name, value in plain.state.items())
    assert planned.state["0.1.num_batches_tracked"] == 3
    assert planned.peak_bytes <= fitted.predicted.peak_bytes <= budget < plain.peak_bytes
    assert fitted.predicted.extra_forwards > (10 if share == 0 else 0)


def test_it_runs_and_learns(capsys: pytest.CaptureFixture[str]) -> None:
    assert load("any_module").main(["--steps", "8", "--budget-share", "0.2"]) == 0
    out = capsys.readouterr().out
    assert "plan:\ndrop 0" in out and "equal to the bit" in out
    row = next(line for line in out.splitlines() if line.startswith("planned")).split()
    assert float(row[4]) < 0.5 * float(row[3])
