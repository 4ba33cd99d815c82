"""examples/deep_chain.py: its counts are those of the formula, to the layer and to the byte."""
from __future__ import annotations

import importlib.util
import re
import sys
from types import ModuleType

import pytest

from tests.pool import ROOT


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("deep_chain", ROOT / "examples/deep_chain.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["deep_chain"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_a_thousand_layers(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--layers", "1000", "--slots", "10", "--rows", "4", "--width", "4"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    one = 4 * 4 * 4
    assert [line[:3] for line in lines] == [["all", "1,000", "1,000"], ["10", "4,636", "4,636"]]
    # everything: two activations per layer, less the output, plus two of the last backward and the weight's gradient;
    # ten slots: ten inputs and the working state, three in the backward of the taped layer, the weight's gradient
    assert [line[4:6] for line in lines] == [[f"{2001 * one:,}"] * 2, [f"{14 * one:,}"] * 2]
    assert [line[-1] for line in lines] == ["equal", "equal"]


def test_the_default_slots_are_logarithmic(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--layers", "64", "--rows", "3", "--width", "5"]) == 0
    rows = re.findall(r"^ +(\w+) +([\d,]+)", capsys.readouterr().out, re.M)
    assert rows == [("all", "64"), ("3", "322"), ("6", "220"), ("12", "178")]  # 64 + t(64, s)


def test_a_wrong_count_is_an_error(
    example: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "extra_advances", lambda length, slots: 1)
    assert example.main(["--layers", "8", "--slots", "2"]) == 1
    assert "a count differs" in capsys.readouterr().err


def test_refusals(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        example.main(["--layers", "0"])
    assert "at least 1" in capsys.readouterr().err
