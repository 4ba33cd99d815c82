"""Several chunks per stage: numbers, order, messages round the ring."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megackpt.mesh.deferred import DeferredSink
from megackpt.mesh.sink import AutogradSink
from megackpt.pipeline import Executor, StageResult, TensorSpec
from megackpt.plan.events import Event
from megackpt.plan.schedule import Action, forward_part, generator, interleaved, source
from tests.pipeline.chain import SPEC, Stage, batch, boundary_specs, by_hand, pipeline_mesh
from tests.pool import run_distributed

DEEP = 13  # layers: at least one in each of 4 stages of 3 chunks, and no even split


def counts(stages: int) -> list[int]:
    return sorted({n for n in (1, stages - 1, stages, stages + 1, 2 * stages + 1) if n >= 1})


def train_chain(rank: int, stages: int, chunks: int, runs: list[int]) -> list[dict[str, Any]]:
    mesh, results = pipeline_mesh(stages, chunks), []
    for micro_batches in runs:
        stage = Stage(rank, stages, micro_batches, chunks, DEEP)
        last: list[int] = []
        executor = Executor(
            mesh,
            stage,
            boundary_specs(rank, stages, (SPEC,), chunks),
            schedule=partial(interleaved, chunks=chunks),
            timeout_s=20,
            on_last_backward=last.append,
        )
        events: list[Event] = []
        before = executor.run(micro_batches, forward_only=True, events=events)
        evaluated = [event.action for event in events]
        assert not stage.gradients() and not last
        events.clear()
        trained = executor.run(micro_batches, events=events)
        results.append(
            {
                "before": before,
                "trained": trained,
                "gradients": stage.gradients(),
                "evaluated": evaluated,
                "order": [event.action for event in events],
                "messages": {event.action: (event.received_bytes, event.sent_bytes) for event in events},
                "last": last,
            }
        )
    return results


@pytest.mark.parametrize(
    ("stages", "chunks"),
    [(2, 2), (2, 3), (4, 2), *(pytest.param(*pair, marks=pytest.mark.full) for pair in ((3, 2), (3, 3), (4, 3)))],
)
def test_numbers_and_order_for_any_number_of_micro_batches(stages: int, chunks: int) -> None:
    """PP-02 for the interleaved schedule; 1e-12 to the uncut chain in fp64."""
    by_rank = run_distributed(train_chain, stages, chunks, counts(stages))
    for number, micro_batches in enumerate(counts(stages)):
        results = [runs[number] for runs in by_rank]
        losses, gradients = by_hand(micro_batches, DEEP)
        for kind in ("before", "trained"):
            assert [result[kind] for result in results[:-1]] == [[]] * (stages - 1)
            torch.testing.assert_close([r["loss"] for r in results[-1][kind]], losses, rtol=0, atol=1e-12)
        found = {name: gradient for result in results for name, gradient in result["gradients"].items()}
        torch.testing.assert_close(found, gradients, rtol=0, atol=1e-12)
        for rank, result in enumerate(results):
            expected = interleaved(stages, rank, micro_batches, chunks)
            assert result["order"] == expected and result["evaluated"] == forward_part(expected)
            assert result["last"] == sorted(range(chunks), reverse=True)
            for action, (received, _) in result["messages"].items():
                comes = source(action, rank, stages, chunks) is not None
                assert received == (SPEC.nbytes if comes else 0), action


def large_messages(rank: int, stages: int, chunks: int, micro_batches: int, repeats: int) -> list[float]:
    spec = TensorSpec((1100, 1024), torch.float32)  # 4.3 MiB
    weight = torch.ones((), requires_grad=True)

    def forward(chunk: int, micro_batch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...] | StageResult:
        x = received[0] if received else torch.full(spec.shape, float(micro_batch + 1))
        output = x * weight
        if (rank, chunk) != (stages - 1, chunks - 1):
            return (output,)
        return StageResult(output.mean() * (micro_batch + 1), {})  # each message is worth something else

    schedule = partial(interleaved, chunks=chunks)
    specs = boundary_specs(rank, stages, (spec,), chunks)
    executor = Executor(pipeline_mesh(stages, chunks), forward, specs, schedule=schedule, timeout_s=20)
    found = []
    for _ in range(repeats):
        weight.grad = None
        executor.run(micro_batches)
        assert weight.grad is not None
        found.append(weight.grad.item())
    return found


def test_crossing_messages_of_any_size_do_not_block_each_other() -> None:
    """PP-04: two stages of two chunks, more than 4 MiB a message, 30 runs; every direction has traffic both ways. A
    weight's gradient is the sum over its chunks of 1 + 4 + ... n^2: each micro-batch's mean times a factor of its own,
    so one message in the place of another would show."""
    for gradients in run_distributed(large_messages, 2, 2, 5, 30, timeout=100):
        assert gradients == pytest.approx([110.0] * 30, rel=1e-5)
    for gradients in run_distributed(large_messages, 3, 2, 4, 2):
        assert gradients == pytest.approx([60.0] * 2, rel=1e-5)


def odd_pieces(rank: int, stages: int, chunks: int, name: str, kind: str) -> list[Tensor | None]:
    """The second piece of the model passes its input by, hands it on untouched, or the first has nothing to train."""
    own = [chunk * stages + rank for chunk in range(chunks)]
    weights = [torch.ones(SPEC.shape, dtype=torch.float64, requires_grad=(kind, k) != ("frozen", 0)) for k in own]

    def forward(chunk: int, micro_batch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...] | StageResult:
        piece, weight = own[chunk], weights[chunk]
        x = received[0] if received else batch(micro_batch)
        if piece == 1 and kind == "bypassed":
            x = weight * 3.0
        elif piece != 1 or kind != "untouched":
            x = x * weight
        return StageResult(x.sum(), {}) if piece == stages * chunks - 1 else (x,)

    executor = Executor(
        pipeline_mesh(stages, chunks),
        forward,
        boundary_specs(rank, stages, (SPEC,), chunks),
        schedule=generator(name, chunks),
        deferred=DeferredSink(AutogradSink()),
        timeout_s=20,
    )
    executor.run(4)
    return [weight.grad for weight in weights]


@pytest.mark.parametrize("kind", ["bypassed", "untouched", "frozen"])
@pytest.mark.parametrize(("stages", "chunks", "name"), [(2, 2, "interleaved"), (3, 1, "zb-h1")])
def test_a_piece_without_gradient_sends_zeros(stages: int, chunks: int, name: str, kind: str) -> None:
    """PP-07 for the new schedules. With all weights 1, a weight's gradient is the sum of what its piece got."""
    total = sum(batch(m) for m in range(4))
    by_rank = run_distributed(odd_pieces, stages, chunks, name, kind)
    found = [by_rank[k % stages][k // stages] for k in range(stages * chunks)]
    if kind == "bypassed":
        assert torch.equal(found[0], torch.zeros_like(found[0]))  # a gradient of zeros came, and was used
        torch.testing.assert_close(found[1:], [torch.full_like(total, 12.0)] * (len(found) - 1), rtol=0, atol=1e-12)
        return
    without = 1 if kind == "untouched" else 0
    assert found.pop(without) is None
    torch.testing.assert_close(found, [total] * len(found), rtol=0, atol=1e-12)


def test_an_action_takes_its_message_from_the_last_stage_round_the_ring() -> None:
    assert source(Action("F", 3, 1), 0, 4, 2) == (3, Action("F", 3, 0))
    assert source(Action("B", 3, 0), 3, 4, 2) == (0, Action("B", 3, 1))
