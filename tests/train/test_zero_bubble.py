"""The zero-bubble schedule: the same bits as 1F1B, every step replayed once, bytes as predicted, less idle time."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megackpt.plan.events import Event
from megackpt.plan.schedule import schedule_lists
from megackpt.plan.simulate import Cost, simulate
from megackpt.train.loop import loader
from megackpt.train.step import Stepper
from tests.layouts import (
    COMMON,
    FAMILIES,
    GPT,
    TOLERANCES,
    Distance,
    Flags,
    Layout,
    Trace,
    built,
    distance,
    steps,
)
from tests.plan.live_run import run_cases
from tests.pool import run_distributed
from tests.train.conftest import ReferenceRun

FULL: Flags = {"recompute-granularity": "full"}
ZERO: Flags = {"pipeline-schedule": "zb-h1"}
DROPS: Flags = {"hidden-dropout": 0.1, "attention-dropout": 0.1}
PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.addmm_.default}


class Products(TorchDispatchMode):
    """Matrix products by the shape of their result."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in PRODUCTS:
            self.counted[func.overloadpacket.__name__, tuple(result.shape)] += 1
        return result


def _one_step(
    rank: int, world_size: int, flags: Flags, layout: Layout
) -> tuple[dict[str, Tensor], float, Counter[Any], list[Event]]:
    """Gradients of this rank, the loss, products, and the events of a step."""
    trainer = built(flags, layout)
    stepper = Stepper(trainer)
    events: list[Event] = []
    run = stepper.executor.run
    stepper.executor.run = lambda n, **options: run(n, **(options | {"events": events}))  # type: ignore[method-assign]
    with closing(loader(trainer, trainer.datasets.train, 0)) as batches, Products() as products:
        total, _ = stepper.accumulate(batches)
    return {name: g.clone() for name, g in trainer.buffer.gradients().items()}, total, products.counted, events


@pytest.mark.parametrize(
    ("layout", "family", "recompute"),
    [
        (Layout(pp=2), "gpt", {}),
        (Layout(pp=2), "llama", FULL),
        (Layout(tp=2, sp=True, pp=2), "gpt", FULL),
        (Layout(pp=4), "gpt", FULL | {"recompute-num-layers": 2}),
    ],
    ids=str,
)
def test_bits_products_and_replays_are_those_of_1f1b(layout: Layout, family: str, recompute: Flags) -> None:
    """With dropout, and five micro-batches on more stages; the order within each weight is the same, so every bit is.
    Products are counted from outside: a step replayed twice would show."""
    flags = FAMILIES[family] | DROPS | recompute | {"micro-batch-size": 1, "global-batch-size": 5}
    before = run_distributed(_one_step, layout.world_size, flags, layout, timeout=60)
    after = run_distributed(_one_step, layout.world_size, flags | ZERO, layout, timeout=60)
    lists = schedule_lists("zb-h1", layout.pp, 5)
    for rank, (expected, found) in enumerate(zip(before, after, strict=True)):
        assert found[1] == expected[1]
        assert found[0].keys() == expected[0].keys()
        assert all(torch.equal(found[0][name], gradient) for name, gradient in expected[0].items())
        assert found[2] == expected[2]
        assert [event.action for event in found[3]] == lists[rank // layout.tp]


def _beside(rank: int, world_size: int, flags: Flags, layout: Layout, path: Path) -> Distance:
    return distance(steps(built(flags, layout), 2, gradients_of=2), Trace.read(path))


@pytest.mark.parametrize("micro_batches", [1, pytest.param(3, marks=pytest.mark.full), 5])
def test_it_trains_what_one_process_trains(micro_batches: int, reference_run: ReferenceRun) -> None:
    """fp64, 1e-12, embeddings tied over two of three stages; fewer micro-batches than stages, and more (PP-02)."""
    layout, size = Layout(pp=3), {"micro-batch-size": 1, "global-batch-size": micro_batches}
    path = reference_run("gpt", "fp64", micro_batches)
    flags = GPT | size | ZERO | FULL | {"params-dtype": "fp64"}
    found = run_distributed(_beside, layout.world_size, flags, layout, path, timeout=60)
    for of_rank in found:
        of_rank.check(**TOLERANCES["fp64"])
    assert {name for of_rank in found for name in of_rank.names} == set(Trace.read(path).grads[0])


WIDE = COMMON | {
    "num-layers": 6,
    "max-position-embeddings": 64,
    "hidden-size": 256,
    "ffn-hidden-size": 896,
    "seq-length": 64,
    "global-batch-size": 10,
}


@pytest.mark.parametrize(
    "layout", [Layout(pp=3), pytest.param(Layout(tp=2, sp=True, pp=2), marks=pytest.mark.full)], ids=str
)
def test_what_waits_is_predicted(layout: Layout) -> None:
    """Live peak within 0.1 %: rebuilt inputs and gradients live until their weight gradient is done, stage i's for i
    micro-batches."""
    cases = [WIDE | ZERO | recompute for recompute in ({}, FULL, FULL | {"recompute-num-layers": 3})]
    for rank, of_rank in enumerate(run_distributed(run_cases, layout.world_size, cases, layout, timeout=60)):
        for seen, predicted in of_rank:
            assert seen.kept == predicted.kept_peak_bytes
            assert abs(seen.peak - predicted.activation_bytes) <= 0.001 * seen.peak
            waits = predicted.terms["weight_gradients"]
            assert (waits > 0) == (rank // layout.tp > 0)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 5), (4, 4), (4, 9), (8, 16)])
def test_less_idle_at_equal_work(stages: int, micro_batches: int) -> None:
    """On the simulator's clock, with F = B = W: the idle time of a stage falls to a third of 1F1B's."""

    def idle(name: str, seconds: dict[str, float]) -> tuple[float, float]:
        lists = schedule_lists(name, stages, micro_batches)
        timeline = simulate(lists, lambda _, action: Cost(seconds[action.kind]))
        return sum(timeline.idle_seconds), sum(stage.busy_seconds for stage in timeline.stages)

    split, whole = idle("zb-h1", {"F": 1.0, "B": 1.0, "W": 1.0}), idle("1f1b", {"F": 1.0, "B": 2.0})
    assert split[1] == whole[1] == 3 * stages * micro_batches  # equal work
    assert whole[0] == 3 * (stages - 1) * stages
    assert split[0] == whole[0] / 3


def test_a_real_timeline_is_shorter_where_work_is_simulated() -> None:
    """The executor's own order of events, priced by one clock: what was run has ZB-H1's idle share, below 1F1B's."""
    flags = GPT | {"micro-batch-size": 1, "global-batch-size": 5}
    shares = []
    for extra, seconds in ((ZERO, {"F": 1.0, "B": 1.0, "W": 1.0}), ({}, {"F": 1.0, "B": 2.0})):
        ran = run_distributed(_one_step, 2, flags | extra, Layout(pp=2))
        lists = [[event.action for event in events] for _, _, _, events in ran]
        timeline = simulate(lists, lambda _, action, s=seconds: Cost(s[action.kind]))  # type: ignore[misc]
        shares.append(timeline.bubble_share)
    assert shares == [pytest.approx(1 / 15), pytest.approx(3 / 15)]
