"""The executor against the same chain by hand: numbers, order, memory."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from megackpt.mesh.deferred import DeferredSink
from megackpt.mesh.sink import AutogradSink
from megackpt.pipeline import Executor, NoTape, StageResult, TensorSpec
from megackpt.plan.events import Event
from megackpt.plan.schedule import Action, gpipe, one_f_one_b, zero_bubble
from tests.pipeline.chain import LAYERS, SPEC, Stage, batch, boundary_specs, by_hand, pipeline_mesh
from tests.pool import run_distributed


def counts(stages: int) -> list[int]:
    return sorted({n for n in (1, stages - 1, stages, stages + 1, 2 * stages + 1) if n >= 1})


# -- numbers ---------------------------------------------------------------------------------------------------------


def train_chain(rank: int, stages: int, runs: list[tuple[int, Any, bool]]) -> list[dict[str, Any]]:
    mesh, results = pipeline_mesh(stages), []
    for micro_batches, schedule, overlap in runs:
        deferred = DeferredSink(AutogradSink())
        stage = Stage(rank, stages, micro_batches, sink=deferred)
        executor = Executor(
            mesh,
            stage,
            boundary_specs(rank, stages, (SPEC,)),
            schedule=schedule,
            timeout_s=20,
            overlap=overlap,
            deferred=deferred,
        )
        before = executor.run(micro_batches, forward_only=True)
        assert not stage.gradients()
        trained = executor.run(micro_batches)
        assert deferred.waiting_bytes() == 0
        results.append({"evaluated": before, "trained": trained, "gradients": stage.gradients()})
    return results


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_losses_and_gradients_are_those_of_the_uncut_chain(stages: int) -> None:
    """PP-02: fewer micro-batches than stages, as many, more."""
    runs = [(n, schedule, True) for n in counts(stages) for schedule in (one_f_one_b, gpipe, zero_bubble)]
    runs += [(2 * stages + 1, schedule, False) for schedule in (one_f_one_b, zero_bubble)]
    by_rank = run_distributed(train_chain, stages, runs)
    for (micro_batches, _, _), *results in zip(runs, *by_rank, strict=True):
        losses, gradients = by_hand(micro_batches)
        for kind in ("evaluated", "trained"):
            assert [result[kind] for result in results[:-1]] == [[]] * (stages - 1)
            reports = results[-1][kind]
            torch.testing.assert_close([r["loss"] for r in reports], losses, rtol=0, atol=1e-12)
            assert not any(report["loss"].requires_grad for report in reports)
        found = {name: gradient for result in results for name, gradient in result["gradients"].items()}
        assert len(found) == 2 * LAYERS
        torch.testing.assert_close(found, gradients, rtol=0, atol=1e-12)


# -- order and events ------------------------------------------------------------------------------------------------


class LoggedTape(NoTape):
    log: list[str]

    def __enter__(self) -> NoTape:
        self.log.append(f"enter {self.micro_batch}")
        return self

    def __exit__(self, *failure: object) -> None:
        self.log.append(f"exit {self.micro_batch}")

    def close(self) -> None:
        self.log.append(f"close {self.micro_batch}")

    def saved_bytes(self) -> int:
        return 1000


def log_actions(rank: int, stages: int, micro_batches: int) -> tuple[list[Event], list[Event], list[str]]:
    log: list[str] = []

    def open_tape(chunk: int, micro_batch: int) -> LoggedTape:
        tape = LoggedTape(chunk, micro_batch)
        tape.log = log
        return tape

    stage = Stage(rank, stages, micro_batches)
    for parameter in stage.parameters():
        parameter.register_hook(lambda _: log.append("gradient") if log[-1] != "gradient" else None)
    executor = Executor(
        pipeline_mesh(stages), stage, boundary_specs(rank, stages, (SPEC,)), open_tape=open_tape, timeout_s=20
    )
    trained: list[Event] = []
    evaluated: list[Event] = []
    executor.run(micro_batches, events=trained)
    executor.run(micro_batches, forward_only=True, events=evaluated)
    return trained, evaluated, log


def test_events_and_tapes_follow_the_schedule() -> None:
    results = run_distributed(log_actions, 2, 3)
    for rank, (trained, evaluated, _) in enumerate(results):
        assert [event.action for event in trained] == one_f_one_b(2, rank, 3)
        assert [event.action for event in evaluated] == [Action("F", m) for m in range(3)]
        assert all((event.rank, event.stage) == (rank, rank) for event in trained)
        assert all(a.end_s <= b.start_s for a, b in zip(trained, trained[1:], strict=False))
        assert all(0 <= event.wait_s <= event.end_s - event.start_s + 1e-3 for event in trained)
    size = SPEC.nbytes
    first, last = results[0][0], results[1][0]
    assert [(e.received_bytes, e.sent_bytes) for e in first] == [
        (0, size) if e.kind == "F" else (size, 0) for e in first
    ]
    assert [(e.received_bytes, e.sent_bytes) for e in last] == [(size, 0) if e.kind == "F" else (0, size) for e in last]
    assert [event.saved_bytes for event in first] == [1000, 2000, 1000, 2000, 1000, 0]  # F0 F1 B0 F2 B1 B2
    assert results[0][2] == [
        *("enter 0", "exit 0", "enter 1", "exit 1", "gradient", "close 0"),
        *("enter 2", "exit 2", "gradient", "close 1", "gradient", "close 2"),
    ]


# -- memory ----------------------------------------------------------------------------------------------------------


def watch_storages(rank: int, stages: int, micro_batches: int, overlap: bool) -> dict[str, Any]:
    """What is alive of sent outputs and received inputs whenever a stage computes, and after the run."""
    gc.disable()  # what only the collector would free counts as held
    watched: dict[str, list[Any]] = {"sent": [], "received": [], "graph": []}
    seen: dict[str, list[int]] = {"sent at F": [], "sent at B": [], "received at F": []}

    def alive(kind: str) -> int:
        return sum(reference() is not None for reference in watched[kind])

    def watch(kind: str, tensor: Tensor) -> None:
        watched[kind].append(weakref.ref(tensor.untyped_storage()))

    weight = torch.full((), 0.5, dtype=torch.float64, requires_grad=True)
    weight.register_hook(lambda _: seen["sent at B"].append(alive("sent")))

    def forward(chunk: int, micro_batch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...] | StageResult:
        seen["sent at F"].append(alive("sent"))
        seen["received at F"].append(alive("received"))
        x = received[0] if received else batch(micro_batch)
        if received:
            watch("received", x)
        hidden = x * 2.0  # saves nothing: the received tensor is of no more use
        output = torch.tanh(hidden * weight) + hidden
        watch("graph", hidden)
        if rank == stages - 1:
            return StageResult(output.mean(), {"loss": output.mean()})
        watch("sent", output)
        return (output,)

    specs = boundary_specs(rank, stages, (SPEC,))
    executor = Executor(pipeline_mesh(stages), forward, specs, timeout_s=20, overlap=overlap)
    reports = executor.run(micro_batches)
    held = {kind: alive(kind) for kind in watched}
    total = {kind: len(references) for kind, references in watched.items()}
    executor.run(micro_batches, forward_only=True)
    again = {kind: alive(kind) for kind in watched}
    gc.enable()
    return {"seen": seen, "held": held, "total": total, "again": again, "reports": len(reports)}


@pytest.mark.parametrize("overlap", [True, False])
def test_sent_outputs_are_freed_and_nothing_is_held_after_a_run(overlap: bool) -> None:
    """With overlap an output may be on its way while the next action computes, never longer."""
    micro_batches = 5
    for rank, result in enumerate(run_distributed(watch_storages, 3, micro_batches, overlap)):
        assert result["held"] == result["again"] == {"sent": 0, "received": 0, "graph": 0}
        assert result["total"]["graph"] == micro_batches
        assert result["total"]["sent"] == (micro_batches if rank < 2 else 0)
        trained = one_f_one_b(3, rank, micro_batches)
        before = [Action("B", 0), *trained[:-1]]
        leaving = [int(overlap and rank < 2 and action.kind == "F") for action in before]
        evaluated = [0] + [int(overlap and rank < 2)] * (micro_batches - 1)
        by_kind = {k: [n for n, a in zip(leaving, trained, strict=True) if a.kind == k] for k in ("F", "B")}
        assert result["seen"]["sent at F"] == by_kind["F"] + evaluated
        assert result["seen"]["sent at B"] == by_kind["B"]
        assert result["seen"]["received at F"] == [0] * 2 * micro_batches
        assert result["reports"] == (micro_batches if rank == 2 else 0)


# -- overlap ---------------------------------------------------------------------------------------------------------


# -- boundaries ------------------------------------------------------------------------------------------------------

MIXED = (
    TensorSpec((2, 3), torch.float64),
    TensorSpec((2, 3), torch.bool, requires_grad=False),
    TensorSpec((2, 3), torch.int64, requires_grad=False),
    TensorSpec((), torch.float64),
    TensorSpec((0, 3), torch.float64),
    TensorSpec((3, 2), torch.float32, requires_grad=False),
)


def mixed_block(index: int, state: tuple[Tensor, ...], weight: Tensor) -> tuple[Tensor, ...]:
    hidden, mask, ids, gate, empty, scale = state
    product = torch.where(mask, hidden * weight, hidden) + ids * gate + scale.t()
    return product.t().contiguous().t(), ~mask, ids + 1, gate * weight, empty, scale  # a strided output


def mixed_input(micro_batch: int) -> tuple[Tensor, ...]:
    hidden = torch.arange(6.0, dtype=torch.float64).view(2, 3) + micro_batch
    scale = torch.full((3, 2), 0.25)
    return hidden, hidden % 2 == 0, hidden.long(), hidden.sum() / 10, hidden[:0], scale


def mixed_weight(index: int) -> Tensor:
    return torch.tensor(0.5 + index, dtype=torch.float64, requires_grad=True)


def mixed_boundary(rank: int, stages: int, micro_batches: int) -> tuple[Tensor, list[dict[str, Tensor]]]:
    weight = mixed_weight(rank)

    def forward(chunk: int, micro_batch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...] | StageResult:
        if received:
            assert [t.requires_grad for t in received] == [
                spec.requires_grad and torch.is_grad_enabled() for spec in MIXED
            ]
        outputs = mixed_block(rank, received or mixed_input(micro_batch), weight)
        if rank < stages - 1:
            return outputs
        return StageResult(outputs[0].sum() + outputs[3], {"hidden": outputs[0], "ids": outputs[2], "mask": outputs[1]})

    executor = Executor(pipeline_mesh(stages), forward, boundary_specs(rank, stages, MIXED), timeout_s=20)
    executor.run(micro_batches, forward_only=True)
    reports = executor.run(micro_batches)
    assert weight.grad is not None
    return weight.grad, reports


@pytest.mark.parametrize("stages", [1, 3])
def test_masks_and_ids_cross_a_boundary_and_only_gradients_come_back(stages: int) -> None:
    results = run_distributed(mixed_boundary, stages, 4)
    weights = [mixed_weight(index) for index in range(stages)]
    for m in range(4):
        state = mixed_input(m)
        for index, weight in enumerate(weights):
            state = mixed_block(index, state, weight)
        (state[0].sum() + state[3]).backward()
        report = results[-1][1][m]
        torch.testing.assert_close(report["hidden"], state[0].detach(), rtol=0, atol=1e-12)
        assert torch.equal(report["ids"], state[2]) and torch.equal(report["mask"], state[1])
    found, expected = [gradient for gradient, _ in results], [weight.grad for weight in weights]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def odd_stages(rank: int, stages: int, kind: str) -> Tensor | None:
    """Stage 1 passes its input by, hands it on untouched, or stage 0 has nothing to train."""
    weight = torch.ones(SPEC.shape, dtype=torch.float64, requires_grad=not (kind == "frozen" and rank == 0))

    def forward(chunk: int, micro_batch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...] | StageResult:
        x = received[0] if received else batch(micro_batch)
        if rank == 1 and kind == "bypassed":
            x = weight * 3.0
        elif rank != 1 or kind != "untouched":
            x = x * weight
        return StageResult(x.sum(), {}) if rank == stages - 1 else (x,)

    executor = Executor(pipeline_mesh(stages), forward, boundary_specs(rank, stages, (SPEC,)), timeout_s=20)
    executor.run(4)
    return weight.grad


@pytest.mark.parametrize("kind", ["bypassed", "untouched", "frozen"])
def test_a_stage_without_gradient_sends_zeros(kind: str) -> None:
    """PP-07. With all weights 1, a weight's gradient is the sum of what its stage got."""
    total = sum(batch(m) for m in range(4))
    first, middle, last = run_distributed(odd_stages, 3, kind)
    if kind == "bypassed":
        assert torch.equal(first, torch.zeros_like(first))  # a gradient of zeros came, and was used
        torch.testing.assert_close(middle, torch.full_like(first, 12.0), rtol=0, atol=1e-12)
        torch.testing.assert_close(last, torch.full_like(first, 12.0), rtol=0, atol=1e-12)
    elif kind == "untouched":
        assert middle is None
        torch.testing.assert_close([first, last], [total, total], rtol=0, atol=1e-12)
    else:
        assert first is None
        torch.testing.assert_close([middle, last], [total, total], rtol=0, atol=1e-12)
