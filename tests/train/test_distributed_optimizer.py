"""The sharded optimizer and its overlaps: bit for bit the unsharded run, one collective per bucket and step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megackpt.observe.numbers import layout_numbers, model_numbers, split_of
from megackpt.pipeline.stages import pieces
from megackpt.plan.buffers import ALIGNMENT
from megackpt.plan.parameters import stage_state
from megackpt.train.build import Trainer
from megackpt.train.step import Stepper
from tests.layouts import SMALL_GPT, SMALL_LLAMA, Flags, Layout, built, relative, steps
from tests.pool import run_distributed

SHARDED: Flags = {"use-distributed-optimizer": True}
OVERLAP: Flags = {"overlap-grad-reduce": True, "overlap-param-gather": True}
FORMATS: dict[str, Flags] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True, "initial-loss-scale": 4096.0},  # one with which no step is left out
}
TINY: Flags = {"ddp-bucket-size": 20000}
"""Elements: several buckets in the small models."""


@dataclass
class Run:
    """What a rank saw of a few steps: losses, norms, its weights afterwards, and its optimizer's state."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    state: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def check_equal(self, other: Run) -> None:
        assert all(map(math.isfinite, self.norms))
        assert self.losses == other.losses
        assert self.norms == other.norms
        assert self.weights.keys() == other.weights.keys()
        for name, weight in self.weights.items():
            assert torch.equal(weight, other.weights[name]), name


def whole_state(trainer: Trainer) -> dict[str, dict[str, Tensor]]:
    """Optimizer state of this rank's parameters, whole over data-parallel ranks."""
    found: dict[str, dict[str, Tensor]] = {}
    parts = [(kind, name, trainer.optimizer.flat_range(name), t.detach().clone())
             for kind, tensors in trainer.optimizer.state_tensors().items() for name, t in tensors.items()]  # fmt: skip
    everyone: list[Any] = [parts]
    if trainer.mesh.dp.size > 1:
        everyone = [None] * trainer.mesh.dp.size
        dist.all_gather_object(everyone, parts, group=trainer.mesh.dp.group)
    shapes = {record.name: parameter.shape for parameter, record in trainer.parameters}
    for rank_parts in everyone:
        for kind, name, span, value in rank_parts:
            whole = found.setdefault(kind, {}).setdefault(name, torch.full(shapes[name], torch.nan, dtype=value.dtype))
            whole.view(-1)[slice(*(span or (0, whole.numel())))] = value.reshape(-1)
    return found


def _train(rank: int, world_size: int, runs: list[Flags], layout: Layout, count: int) -> list[Run]:
    found = []
    for flags in runs:
        trainer = built(flags, layout)
        trace = steps(trainer, count)
        trainer.optimizer.settle()
        weights = {record.name: p.detach().clone() for p, record in trainer.parameters}
        found.append(Run(trace.losses, trace.norms, weights, whole_state(trainer)))
    return found


def of_micro_batches(n: int, dp: int) -> Flags:
    return {"micro-batch-size": 1, "global-batch-size": n * dp}


MODES = [SHARDED, {"overlap-grad-reduce": True}, SHARDED | OVERLAP]


def compare(flags: Flags, layout: Layout, modes: list[Flags] = MODES, count: int = 3) -> None:
    """All modes equal the plain one bit for bit, on every rank."""
    runs = [flags | TINY, *(flags | TINY | mode for mode in modes)]
    for plain, *others in run_distributed(_train, layout.world_size, runs, layout, count, timeout=360):
        for other in others:
            other.check_equal(plain)
            for kind, tensors in plain.state.items():
                for name, value in tensors.items():
                    assert torch.equal(value, other.state[kind][name]), (kind, name)


DEFAULT = [
    (SMALL_GPT, Layout(dp=2), 3, "fp32"),
    (SMALL_LLAMA, Layout(dp=4), 1, "fp32"),
    (SMALL_GPT, Layout(tp=2, dp=2, sp=True), 1, "fp32"),
    (SMALL_GPT, Layout(pp=2, dp=2), 8, "fp32"),
    (SMALL_GPT, Layout(dp=2), 3, "bf16"),
    (SMALL_LLAMA, Layout(dp=4), 1, "fp16"),
]
REST = [
    (flags, layout, n, dtype)
    for flags in (SMALL_GPT, SMALL_LLAMA)
    for layout in (Layout(dp=2), Layout(dp=4), Layout(tp=2, dp=2), Layout(tp=2, dp=2, sp=True), Layout(pp=2, dp=2),
                   Layout(tp=2, pp=2, dp=2, sp=True), Layout(pp=2, dp=4))
    for n in (1, 3, 8)
    for dtype in ("fp32", "bf16", "fp16")
    if (flags, layout, n, dtype) not in DEFAULT and (dtype == "fp32" or n < 8)
]  # fmt: skip


def name_of(case: tuple[Flags, Layout, int, str]) -> str:
    flags, layout, n, dtype = case
    return f"{'llama' if flags is SMALL_LLAMA else 'gpt'}-{layout}-n{n}-{dtype}"


@pytest.mark.parametrize("case", DEFAULT, ids=name_of)
def test_sharded_and_overlapped_runs_equal_the_plain_one_bitwise(case: tuple[Flags, Layout, int, str]) -> None:
    flags, layout, n, dtype = case
    compare(flags | of_micro_batches(n, layout.dp) | FORMATS[dtype] | {"clip-grad": 0.5}, layout)


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", REST, ids=name_of)
def test_rest_of_the_modes(case: tuple[Flags, Layout, int, str]) -> None:
    flags, layout, n, dtype = case
    compare(flags | of_micro_batches(n, layout.dp) | FORMATS[dtype] | {"clip-grad": 0.5}, layout)


def test_other_bucket_sizes_differ_by_rounding_and_runs_repeat() -> None:
    """With four addends the order of a ring's sum depends on the place in a bucket."""
    flags = SMALL_GPT | of_micro_batches(1, 4) | SHARDED | OVERLAP | {"lr": 3e-4}
    runs = [flags | {"ddp-bucket-size": size} for size in (1, 20000, 20000, 40_000_000)]
    for one, other, again, single in run_distributed(_train, 4, runs, Layout(dp=4), 3, timeout=120):
        again.check_equal(other)
        for run in (one, single):
            assert max(map(relative, run.losses, other.losses)) <= 1e-6
            assert max(map(relative, run.norms, other.norms)) <= 3e-6


# -- collectives, counted from outside -------------------------------------------------------------------------------

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
CHUNKS: Flags = {"num-layers": 5, "num-virtual-stages-per-pipeline-rank": 2}
ZERO_BUBBLE: Flags = {"num-layers": 5, "pipeline-schedule": "zb-h1"}


SCHEDULES: dict[str, Flags] = {"1f1b": {"num-layers": 5}, "interleaved": CHUNKS, "zero-bubble": ZERO_BUBBLE}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_one_collective_per_bucket_and_step(overlap: bool, schedule: Flags) -> None:  # LS-12
    """Whatever accumulation, schedule and plan: one all-reduce, or one reduce-scatter and one all-gather."""
    runs, sharded = [], []
    for n, plan in zip((1, 3, 8), REPLAY, strict=True):
        for mode in ({}, SHARDED):
            more = {name: True for name in OVERLAP if overlap and (mode or name == "overlap-grad-reduce")}
            runs.append(SMALL_GPT | schedule | of_micro_batches(n, 2) | plan | mode | more | TINY)
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


# -- parameters that are not used alike ------------------------------------------------------------------------------


def _unused(rank: int, world_size: int, runs: list[Flags], layout: Layout, unused: Mapping[int, bool]) -> list[Run]:
    """Steps in some of which the position embedding is not used; frozen norms throughout."""
    found = []
    for flags in runs:
        trainer = built(flags, layout)
        (chunk,) = trainer.chunks
        assert chunk.embedding is not None
        position = chunk.embedding.position
        losses, norms = [], []
        stepper, batch = Stepper(trainer), trainer.config.batch.global_batch_size
        for step in range(3):
            chunk.embedding.position = None if unused.get(step, False) else position  # type: ignore[assignment]
            trace = steps(trainer, 1, stepper=stepper, consumed=step * batch)
            losses, norms = losses + trace.losses, norms + trace.norms
        trainer.optimizer.settle()
        found.append(Run(losses, norms, {record.name: p.detach().clone() for p, record in trainer.parameters}))
    return found


def test_a_bucket_with_unused_parameters_completes_once() -> None:
    flags = SMALL_GPT | of_micro_batches(2, 2) | {"ddp-bucket-size": 1}
    runs = [flags, flags | SHARDED | OVERLAP]
    for unused in ({0: True, 1: True, 2: True}, {0: False, 1: True, 2: True}):
        for plain, other in run_distributed(_unused, 2, runs, Layout(dp=2), unused):
            other.check_equal(plain)


# -- bytes -----------------------------------------------------------------------------------------------------------


def _allocated(rank: int, world_size: int, flags: Flags, layout: Layout) -> tuple[dict[str, int], dict[str, int]]:
    trainer = built(flags, layout)
    pieces = [[p.layers for p in stage] for stage in _pieces(trainer)]
    numbers = layout_numbers(trainer.config, pieces, "cpu")
    predicted = stage_state(model_numbers(trainer.config, trainer.vocab), numbers, trainer.mesh.pp.index)
    storages = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p, _ in trainer.parameters}
    state = trainer.optimizer.state_tensors()
    sizes = {
        "weights": sum(storages.values()),
        "gradients": trainer.buffer.flat.untyped_storage().nbytes(),
        "masters": sum(t.numel() * t.itemsize for t in state.get("master", {}).values()),
        "moments": sum(t.numel() * t.itemsize for kind, ts in state.items() if kind != "master" for t in ts.values()),
    }
    return sizes, vars(predicted)


def _pieces(trainer: Trainer) -> list[Any]:
    return pieces(split_of(trainer.config))


BYTES = [
    (SMALL_GPT | {"bf16": True}, Layout(dp=2)),
    (SMALL_GPT | of_micro_batches(1, 4) | {"bf16": True} | SHARDED, Layout(dp=4)),
    (SMALL_GPT | {"fp16": True} | SHARDED | TINY, Layout(pp=2, dp=2)),
    (SMALL_LLAMA | SHARDED | TINY, Layout(tp=2, dp=2, sp=True)),
    (SMALL_LLAMA | {"bf16": True, "grad-reduce-in-bf16": True} | SHARDED | TINY, Layout(dp=2)),
    (SMALL_GPT | CHUNKS | {"bf16": True} | SHARDED | TINY, Layout(pp=2, dp=2)),
]


@pytest.mark.parametrize(("flags", "layout"), BYTES, ids=range(len(BYTES)))
def test_predicted_state_is_what_is_allocated(flags: Flags, layout: Layout) -> None:
    found = run_distributed(_allocated, layout.world_size, flags, layout)
    stages = layout.pp
    per_stage = layout.world_size // stages
    for stage in range(stages):
        ranks = found[stage * per_stage : (stage + 1) * per_stage]
        predicted = ranks[0][1]
        for sizes, _ in ranks:
            assert {kind: sizes[kind] for kind in ("weights", "gradients")} == {
                kind: predicted[kind] for kind in ("weights", "gradients")
            }
        most = max(range(len(ranks)), key=lambda rank: ranks[rank][0]["moments"])
        assert ranks[most][0] == predicted  # the rank that has most of the optimizer's state
