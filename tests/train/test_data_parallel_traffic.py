"""What data parallelism sends, counted and ordered from outside: one collective per bucket and step, as early as can be
and waited for as late as can be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megackpt.plan.buffers import ALIGNMENT
from megackpt.train.step import Stepper
from tests.layouts import SMALL_GPT, Flags, Layout, built, steps
from tests.pool import run_distributed
from tests.train.test_distributed_optimizer import (
    CHUNKS,
    FORMATS,
    OVERLAP,
    SHARDED,
    TINY,
    ZERO_BUBBLE,
    _train,
    of_micro_batches,
)

COLLECTIVES = (
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter",
    "reduce_scatter_tensor", "all_gather_single", "reduce_scatter_single", "all_to_all", "all_to_all_single",
)  # fmt: skip


class Counted:
    """Collectives of one group as torch sees them: name and elements of the larger side."""

    def __init__(self, group: Any) -> None:
        self.group, self.seen, self.real = group, list[tuple[str, int]](), dict[str, Any]()

    def __enter__(self) -> list[tuple[str, int]]:
        self.real = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}
        for name, function in self.real.items():
            setattr(dist, name, self._wrapped(name, function))
        return self.seen

    def __exit__(self, *_: object) -> None:
        for name, function in self.real.items():
            setattr(dist, name, function)

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("group") is self.group:
                self.seen.append((name, max(a.numel() for a in args if isinstance(a, Tensor))))
            return real(*args, **kwargs)

        return call


def _counted(
    rank: int, world_size: int, runs: list[Flags], layout: Layout
) -> list[tuple[list[tuple[str, int]], list[int]]]:
    """The second step's collectives among data-parallel ranks, and the sizes of the buckets."""
    found = []
    for flags in runs:
        trainer = built(flags, layout)
        stepper = Stepper(trainer)
        steps(trainer, 1, stepper=stepper)
        with Counted(trainer.mesh.dp.group) as seen:
            steps(trainer, 1, stepper=stepper, consumed=trainer.config.batch.global_batch_size)
            trainer.optimizer.settle()
        found.append((seen, [bucket.numel() for bucket in trainer.buffer.buckets]))
    return found


REPLAY: list[Flags] = [
    {},
    {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1},
    {"recompute-granularity": "selective"},
]
SCHEDULES: dict[str, Flags] = {"1f1b": {"num-layers": 5}, "interleaved": CHUNKS, "zero-bubble": ZERO_BUBBLE}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_one_collective_per_bucket_and_step(overlap: bool, schedule: Flags) -> None:  # LS-12
    """Whatever accumulation, schedule, plan and format: one all-reduce, or one reduce-scatter and one all-gather."""
    runs, sharded = [], []
    for n, plan, dtype in zip((1, 4, 7), REPLAY, FORMATS.values(), strict=True):
        for mode in ({}, SHARDED):
            more = {name: True for name in OVERLAP if overlap and (mode or name == "overlap-grad-reduce")}
            runs.append(SMALL_GPT | schedule | of_micro_batches(n, 2) | plan | dtype | mode | more | TINY)
            sharded.append(bool(mode))
    for found in run_distributed(_counted, 4, runs, Layout(pp=2, dp=2), timeout=120):
        for (seen, buckets), is_sharded in zip(found, sharded, strict=True):
            assert len(buckets) > 3 and all(size % (2 * ALIGNMENT) == 0 for size in buckets)
            reduced = [size for name, size in seen if name in ("all_reduce", "reduce_scatter_tensor")]
            assert reduced == buckets
            kinds = {name for name, _ in seen}
            if is_sharded:
                assert kinds == {"reduce_scatter_tensor", "all_gather_into_tensor"}
                gathered = [size for name, size in seen if name == "all_gather_into_tensor"]
                assert gathered == buckets[::-1]  # the first layers are needed first
            else:
                assert kinds == {"all_reduce"}


def _order(rank: int, world_size: int, flags: Flags, layout: Layout) -> tuple[list[str], int]:
    """What happens in the second step: products into the buffer, reductions, gathers, waits for them, forwards."""
    trainer = built(flags, layout)
    stepper = Stepper(trainer)
    steps(trainer, 1, stepper=stepper)
    log: list[str] = []
    buffer = trainer.buffer
    real_arrival = buffer.on_arrival

    def arrival(number: int) -> None:
        log.append(f"gradient {buffer.entries[number].bucket}")
        assert real_arrival is not None
        real_arrival(number)

    buffer.on_arrival = arrival

    def wrap(name: str) -> Any:
        real = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("group") is trainer.mesh.dp.group:
                log.append(name)
            return real(*args, **kwargs)

        return call

    names = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor")
    real = {name: getattr(dist, name) for name in names}
    for name in names:
        setattr(dist, name, wrap(name))
    try:
        steps(trainer, 1, stepper=stepper, consumed=trainer.config.batch.global_batch_size)
    finally:
        for name, function in real.items():
            setattr(dist, name, function)
    return log, buffer.layout.first_partial


@pytest.mark.parametrize(
    ("mode", "layout", "schedule"),
    [
        (SHARDED, Layout(dp=2), {}),
        ({}, Layout(pp=2, dp=2), {}),
        (SHARDED, Layout(pp=2, dp=2), CHUNKS),
        (SHARDED, Layout(pp=2, dp=2), ZERO_BUBBLE),
    ],
    ids=["sharded", "plain-1f1b", "sharded-interleaved", "sharded-zero-bubble"],
)
def test_a_bucket_is_reduced_right_after_its_last_gradient(mode: Flags, layout: Layout, schedule: Flags) -> None:
    """Of the last micro-batch: the reduction of a bucket stands right behind the last gradient of it and of all buckets
    before it, and only the partial gradients' bucket waits for the end."""
    flags = SMALL_GPT | of_micro_batches(3, 2) | {"overlap-grad-reduce": True} | TINY | mode | schedule
    kind = "reduce_scatter_tensor" if mode else "all_reduce"
    for log, first_partial in run_distributed(_order, layout.world_size, flags, layout):
        places = [place for place, what in enumerate(log) if what == kind]
        assert len(places) > first_partial >= 2
        last = {what: place for place, what in enumerate(log) if what.startswith("gradient")}
        ready = 0
        for bucket in range(first_partial):
            ready = max(ready, last[f"gradient {bucket}"])
            between = log[ready + 1 : places[bucket]]
            assert all(what == kind for what in between), (bucket, between)
        assert places[first_partial] > max(last.values())


class Held:
    """Takes the place of `dist.all_gather_into_tensor`: nothing arrives before somebody waits."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self.real, self.waits = real, 0

    def __call__(self, output: Tensor, part: Tensor, group: Any = None, async_op: bool = False) -> Any:
        own = part.clone()
        if not async_op:
            return self.real(output, own, group=group)
        output.fill_(torch.nan)
        held = self

        class Work:
            def wait(self) -> None:
                held.waits += 1
                held.real(output, own, group=group)

        return Work()


def _gathered_late(rank: int, world_size: int, flags: Flags, layout: Layout) -> tuple[list[float], int, int]:
    real = dist.all_gather_into_tensor
    held = Held(real)
    dist.all_gather_into_tensor = held  # type: ignore[assignment]
    try:
        trainer = built(flags, layout)
        trace = steps(trainer, 3)
    finally:
        dist.all_gather_into_tensor = real
    return trace.losses, held.waits, len(trainer.buffer.buckets)


def test_a_forward_waits_for_the_parameters_it_uses() -> None:
    """With gathers that deliver nothing until somebody waits, losses are the same; those of the last step nobody
    waits for, as no forward follows."""
    flags = SMALL_GPT | of_micro_batches(2, 2) | SHARDED | TINY
    plain = run_distributed(_train, 2, [flags], Layout(dp=2), 3)
    late = run_distributed(_gathered_late, 2, flags | OVERLAP, Layout(dp=2))
    for (run,), (losses, waits, buckets) in zip(plain, late, strict=True):
        assert losses == run.losses
        assert waits == 2 * buckets
