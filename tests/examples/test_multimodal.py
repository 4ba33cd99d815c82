"""Two branches of different shapes, a join, one plan: the same training to the bit, under the budget."""
from __future__ import annotations

import pytest
import torch

from tests.examples.test_any_module import load


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_the_same_training_under_a_budget(share: float) -> None:
    example = load("multimodal")
    c = example.compare(share, steps=2, batch=4)
    assert c.plain.losses == c.planned.losses
    assert all(torch.equal(value, c.planned.state[name]) for name, value in c.plain.state.items())
    assert c.planned.peak_bytes <= c.predicted_bytes <= c.budget < c.plain.peak_bytes
    assert [node.reads for node in c.graph.nodes if node.name == "fusion 0"] == [("vision 4", "text 6")]
    assert len(c.plan.segments) == 3  # two branches and what follows their join


def test_it_runs_and_shows_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert load("multimodal").main(["--steps", "2", "--budget-share", "0.3"]) == 0
    out = capsys.readouterr().out
    assert "vision 0 to vision 4:\n" in out and "text 0 to text 6:\n" in out and "fusion 0 to fusion 3:\n" in out
    assert "  drop vision 0" in out and "losses and weights are equal to the bit" in out
