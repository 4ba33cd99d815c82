"""The sharded optimizer and its overlaps: bit for bit the unsharded run, in the bytes that the plan says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megackpt.observe.numbers import layout_numbers, model_numbers, split_of
from megackpt.pipeline.stages import pieces
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
CHUNKS: Flags = {"num-layers": 5, "num-virtual-stages-per-pipeline-rank": 2}
ZERO_BUBBLE: Flags = {"num-layers": 5, "pipeline-schedule": "zb-h1"}


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


def test_ranks_that_own_nothing_of_a_bucket() -> None:
    """A bucket for every parameter, and most parameters smaller than what one rank's share is filled up to."""
    flags = SMALL_GPT | of_micro_batches(1, 4) | {"hidden-size": 8, "num-attention-heads": 1, "ffn-hidden-size": 12}
    flags |= {"ddp-bucket-size": 1, "bf16": True, "check-replicas-interval": 1}
    for plain, sharded in run_distributed(_train, 4, [flags, flags | SHARDED | OVERLAP], Layout(dp=4), 3):
        sharded.check_equal(plain)
        for kind, tensors in plain.state.items():
            for name, value in tensors.items():
                assert torch.equal(value, sharded.state[kind][name]), (kind, name)


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
