"""Seconds after the last backward: exchange of gradients and weights, and the update."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megackpt.plan.accelerators import MACHINES
from megackpt.plan.evaluate import Evaluator
from megackpt.plan.evaluation import Evaluation
from megackpt.plan.numbers import Layout, ModelNumbers
from megackpt.plan.policies import Policy, plan_for

MACHINE = replace(MACHINES["h100-80gb"], latency_s=0.0)
MODEL = ModelNumbers.gpt(5, 1024, 8, 32000, 512)


def evaluated(**rest: Any) -> Evaluation:
    layout = Layout.even(5, n=3, micro_batch=2, t=2, **rest)
    return Evaluator(MODEL, layout, MACHINE)(plan_for(layout.pieces, Policy()))


def test_all_reduce_of_gradients() -> None:
    """A ring of d = 4 ranks inside a node passes 2 * 3/4 of 4 bytes a parameter; 18 bytes of state, 3 of them read
    and the rest read and written."""
    e = evaluated(d=4)
    (row,) = e.prediction.stages
    size = 4 * row.parameters
    assert e.end.reduce == pytest.approx(2 * 3 / 4 * size / MACHINE.tp_bytes_per_s, rel=1e-12)
    assert e.end.gather == 0 and e.reduction_seconds == e.end.reduce
    moved = row.parameters * (4 + 2 + 2 * 12)
    assert e.optimizer_seconds == pytest.approx(moved / (MACHINE.hbm_bytes_per_s * MACHINE.hbm_fraction), rel=1e-12)
    assert e.step_seconds == e.pipeline_seconds + e.reduction_seconds + e.optimizer_seconds
    assert evaluated().reduction_seconds == 0
    assert evaluated().mfu > e.mfu * 1.001 and e.hfu == e.mfu


def test_between_nodes_the_port_decides() -> None:
    e = evaluated(d=8)
    size = 4 * e.prediction.stages[0].parameters
    assert e.end.reduce == pytest.approx(2 * 7 / 8 * size / MACHINE.node_bytes_per_s, rel=1e-12)


def test_distributed_optimizer() -> None:
    """Half of the gradients' bytes out, the weights' back; 6 + 12/d bytes of state; the update is shared."""
    plain, e = evaluated(d=4), evaluated(d=4, sharded_optimizer=True)
    (row,) = e.prediction.stages
    assert e.end.reduce == pytest.approx(plain.end.reduce / 2, rel=1e-12)
    assert e.end.gather == pytest.approx(plain.end.reduce / 4, rel=1e-12)  # 2 bytes a parameter instead of 4, once
    assert e.reduction_seconds == pytest.approx(plain.reduction_seconds * 3 / 4, rel=1e-12)
    assert e.optimizer_seconds == pytest.approx(plain.optimizer_seconds / 4, rel=1e-6)
    assert row.state_bytes == pytest.approx((6 + 12 / 4) * row.parameters, abs=4)


def test_overlap_hides_all_but_a_bucket_or_what_is_longer() -> None:
    buckets = {"bucket_size": 5_000_000, "d": 4, "sharded_optimizer": True}
    plain = evaluated(**buckets)
    e = evaluated(**buckets, overlap_grad_reduce=True, overlap_param_gather=True)
    (row,) = e.prediction.stages
    count = -(-row.parameters // 5_000_000)
    assert count > 2 and plain.reduction_seconds == plain.end.reduce + plain.end.gather
    (stage,) = e.stages
    expected = max(e.end.reduce - stage.backward, e.end.reduce / count)
    expected += max(e.end.gather - stage.forward, e.end.gather / count)
    assert e.reduction_seconds == pytest.approx(expected, rel=1e-12)
    assert e.reduction_seconds < plain.reduction_seconds and e.end.reduce == plain.end.reduce
    half = evaluated(**buckets, overlap_grad_reduce=True)
    assert e.reduction_seconds < half.reduction_seconds < plain.reduction_seconds
