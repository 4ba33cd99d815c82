"""Replay ahead: while a gradient is on its way, what it needs first is rebuilt: bits, order, bytes, time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megackpt.config.errors import UsageError
from megackpt.config.run import RunConfig
from megackpt.observe.numbers import split_of
from megackpt.plan.accelerators import MACHINES
from megackpt.plan.decision import ChunkPlan, Group, Plan
from megackpt.plan.evaluate import Evaluator
from megackpt.plan.numbers import Layout as PlanLayout
from megackpt.plan.numbers import ModelNumbers
from megackpt.plan.policies import Policy, plan_for
from megackpt.plan.schedule import one_f_one_b
from megackpt.plan.slots import in_flight_of
from megackpt.train.loop import loader
from megackpt.train.step import Stepper
from tests.layouts import COMMON, GPT, SMALL_GPT, Flags, Layout, built
from tests.plan.live_run import run_cases
from tests.pool import run_distributed

FULL: Flags = {"recompute-granularity": "full"}
COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")


class _Waited:
    """A receive that says when somebody waits for it."""

    def __init__(self, work: dist.Work, log: list[str]) -> None:
        self.work, self.log = work, log

    def wait(self, *limit: Any) -> None:
        self.log.append("message")
        self.work.wait(*limit)


@contextmanager
def _logged(log: list[str]) -> Iterator[None]:
    """Every collective that is called, and every wait for a message, in order."""
    originals = {name: getattr(dist, name) for name in (*COLLECTIVES, "irecv")}

    def logging(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            log.append(name)
            return originals[name](*args, **kwargs)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, logging(name))
    dist.irecv = lambda *args, **kwargs: _Waited(originals["irecv"](*args, **kwargs), log)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _step(rank: int, world_size: int, cases: list[Flags], layout: Layout) -> list[tuple[dict[str, Tensor], float, Any]]:
    results = []
    for flags in cases:
        trainer = built(flags, layout)
        log: list[str] = []
        with closing(loader(trainer, trainer.datasets.train, 0)) as batches, _logged(log):
            total, _ = Stepper(trainer).accumulate(batches)
        gradients = {name: g.clone() for name, g in trainer.buffer.gradients().items()}
        results.append((gradients, total, (trainer.mesh.tp.index, trainer.mesh.pp.index, log)))
    return results


def _stored(folder: Path, flags: Flags, layout: Layout, **ahead: int) -> Flags:
    """Flags that make a run of policy full take a stored plan that goes ahead on its first stage."""
    pieces = split_of(RunConfig.from_flags(flags | layout.flags, layout.world_size))
    plan = plan_for(pieces, Policy("full"))
    (first, *others) = plan.stages
    path = folder / "plan.json"
    path.write_text(replace(plan, stages=((replace(first[0], **ahead),), *others)).dumps())
    return {"recompute-plan": str(path), "recompute-granularity": "none"}


def test_bits_and_the_order_of_collectives(tmp_path: Path) -> None:
    """tp 2 with sequence parallel, pp 2, dropout: one order on both ranks of a stage, and the first stage's gathers of
    the layers ahead come before it waits for the gradient."""
    flags = GPT | FULL | {"hidden-dropout": 0.1, "attention-dropout": 0.1, "global-batch-size": 6}
    layout = Layout(tp=2, sp=True, pp=2)
    aheads = (0, 1, 2)
    cases = [flags | {"recompute-ahead-layers": k} for k in aheads]
    cases.append(flags | _stored(tmp_path, flags, layout, ahead=2, ahead_within=1))
    found = run_distributed(_step, 4, cases, layout, timeout=60)
    for of_rank in found:
        (gradients, loss, _), *others = of_rank
        for other, same_loss, _ in others:
            assert same_loss == loss
            assert all(torch.equal(other[name], gradient) for name, gradient in gradients.items())
    for number, ahead in enumerate(aheads):
        logs = {(tp, pp): log for tp, pp, log in (of_rank[number][2] for of_rank in found)}
        assert logs[0, 0] == logs[1, 0] and logs[0, 1] == logs[1, 1]
        backwards = _before_messages(logs[0, 0])
        assert len(backwards) == 3  # one per gradient
        # before the first gradient: the forwards of two micro-batches, one reduction of the embedding and two layers
        # of two gathers and two reductions each, then two gathers per layer rebuilt
        assert backwards[0][-2 * ahead :] == ["all_gather_into_tensor"] * 2 * ahead or not ahead
        assert len(backwards[0]) == 2 * (1 + 2 * 4) + 2 * ahead
        assert sorted(logs[0, 0]) == sorted(found[0][0][2][2])  # nothing twice
    late = {(tp, pp): log for tp, pp, log in (of_rank[3][2] for of_rank in found)}
    assert late[0, 0] == late[1, 0] and late[0, 1] == late[1, 1]
    never, always = _before_messages(found[0][0][2][2]), _before_messages(found[0][2][2][2])
    # two forwards are in flight at every backward but the last one of the step
    assert _before_messages(late[0, 0]) == [*never[:-1], [*never[-1], *["all_gather_into_tensor"] * 4]] != always


def _before_messages(log: list[str]) -> list[list[str]]:
    """What was called before each message, since the one before."""
    parts: list[list[str]] = [[]]
    for name in log:
        if name == "message":
            parts.append([])
        else:
            parts[-1].append(name)
    return parts[:-1]


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [
        (Layout(pp=2), {"recompute-granularity": "free"}),
        (Layout(pp=2), FULL | {"recompute-num-layers": 2}),
        (Layout(pp=2), {"recompute-granularity": "selective", "recompute-modules": ["mlp"]}),
        (Layout(pp=2, vp=2), FULL),
    ],
    ids=str,
)
def test_bits_of_other_plans(layout: Layout, recompute: Flags) -> None:
    flags = SMALL_GPT | recompute | {"num-layers": 6, "hidden-dropout": 0.1, "global-batch-size": 6}
    cases = [flags | {"recompute-ahead-layers": k} for k in (0, 1, 3)]
    for (gradients, loss, _), *others in run_distributed(_step, 2, cases, layout):
        for other, same_loss, _ in others:
            assert same_loss == loss
            assert all(torch.equal(other[name], gradient) for name, gradient in gradients.items())


def test_bytes_are_predicted(tmp_path: Path) -> None:
    """Live peak within 0.1 %: what is rebuilt ahead is alive at once."""
    wide = COMMON | {
        "num-layers": 6,
        "max-position-embeddings": 64,
        "hidden-size": 256,
        "ffn-hidden-size": 896,
        "seq-length": 64,
        "global-batch-size": 10,
    }
    cases = [wide | FULL | {"recompute-ahead-layers": k} for k in (0, 1, 3)]
    cases.append(wide | FULL | {"recompute-ahead-layers": 3, "pipeline-schedule": "zb-h1"})
    cases.append(wide | _stored(tmp_path, wide, Layout(pp=2), ahead=3, ahead_within=1))
    block = {"recompute-method": "block", "recompute-num-layers": 2}  # the last layer of a stage keeps everything
    cases += [wide | FULL | block | {"recompute-ahead-layers": k} for k in (0, 1, 2)]
    first, last = run_distributed(run_cases, 2, cases, Layout(pp=2), timeout=60)
    for seen, predicted in (*first, *last):
        assert seen.kept == predicted.kept_peak_bytes
        assert abs(seen.peak - predicted.activation_bytes) <= 0.001 * seen.peak
    peaks = [seen.peak for seen, _ in first]
    assert peaks[0] < peaks[1] < peaks[2]
    assert peaks[5] == peaks[6] <= peaks[7]
    assert peaks[0] <= peaks[4] < peaks[2]  # all of it, but while one micro-batch is in flight
    assert len({seen.peak for seen, _ in last[:3]}) == 1  # nobody waits for a gradient there


def test_the_last_units_of_a_chunk() -> None:
    singles = ChunkPlan(ahead=2)
    assert singles.units_ahead(range(3, 7)) == [range(6, 7), range(5, 6)]
    assert singles.units_ahead(range(3, 4)) == [range(3, 4)]
    grouped = ChunkPlan(groups=(Group(3, 4), Group(5, 6)), ahead=2)
    assert grouped.units_ahead(range(3, 7)) == [range(5, 7)]
    plan = Plan(((singles,), (ChunkPlan(),)))
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.digest() != Plan(((ChunkPlan(),), (ChunkPlan(),))).digest()
    few = ChunkPlan(ahead=1, ahead_within=2)
    assert [few.goes_ahead(held) for held in (1, 2, 3)] == [True, True, False] and singles.goes_ahead(99)
    assert not ChunkPlan(ahead_within=2).goes_ahead(1)
    plan = Plan(((few,), (ChunkPlan(),)))
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(ValueError, match="ahead_within=-1 is not a number of forwards in flight"):
        ChunkPlan(ahead_within=-1)
    assert list(in_flight_of(one_f_one_b(3, 0, 4)).values()) == [3, 3, 2, 1]


def test_the_simulator_prices_what_is_done_while_waiting() -> None:
    """More layers ahead never take longer; with all of them the stage before the last waits that much less."""
    model = ModelNumbers.gpt(16, 2048, 16, 32000, 2048)
    layout = PlanLayout.even(16, 4, n=4)
    evaluator = Evaluator(model, layout, MACHINES["h100-80gb"])
    found = [evaluator(plan_for(layout.pieces, Policy("full", ahead=k))) for k in range(6)]
    seconds = [e.pipeline_seconds for e in found]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[1] > seconds[4] == seconds[5]
    for e in found:
        assert e.timeline.step_seconds == pytest.approx(e.pipeline_seconds)
        assert e.replayed_flops == found[0].replayed_flops
        assert e.stages == found[0].stages
    # Four layers a stage: from its first backward on, every stage but the last would have waited; each of the three
    # saves its whole replay on the way of the first gradient.
    assert seconds[0] - seconds[4] == pytest.approx(3 * found[0].stages[0].replay, rel=0.02)
    assert found[4].peak_bytes > found[0].peak_bytes


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "--recompute-ahead-layers 2 contradicts --recompute-granularity none"),
        (FULL | {"recompute-ahead-layers": -1}, "--recompute-ahead-layers must be at least 0; got -1."),
    ],
)
def test_refusals(flags: Flags, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RunConfig.from_flags(GPT | {"recompute-ahead-layers": 2} | flags)
