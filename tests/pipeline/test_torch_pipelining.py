"""Order, micro-batches in flight and gradients against torch.distributed.pipelining, both sides really run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from megackpt.mesh.deferred import DeferredSink
from megackpt.mesh.sink import AutogradSink
from megackpt.pipeline import Executor
from megackpt.plan.events import Event
from megackpt.plan.schedule import Action, generator
from tests.pipeline.chain import SPEC, Stage, batch, boundary_specs, pipeline_mesh
from tests.pool import run_distributed

DEEP = 13
TORCH = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "interleaved": ScheduleInterleaved1F1B,
    "zb-h1": ScheduleInterleavedZeroBubble,
}


class Chunk(nn.Module):
    """One piece as torch's stage module."""

    def __init__(self, whole: Stage, chunk: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): whole.layers[str(i)] for i in whole.pieces[chunk].layers})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers.values():
            x = x + torch.tanh(block(x))
        return x


class LoggedStage(PipelineStage):
    """Says what it computes, as our actions."""

    log: list[Action]
    chunk: int

    def forward_one_chunk(self, index: int, *args: Any, **kwargs: Any) -> Any:
        self.log.append(Action("F", index, self.chunk))
        return super().forward_one_chunk(index, *args, **kwargs)

    def backward_one_chunk(self, index: int, *args: Any, **kwargs: Any) -> Any:
        self.log.append(Action("B", index, self.chunk))
        return super().backward_one_chunk(index, *args, **kwargs)

    def backward_weight_one_chunk(self, index: int, *args: Any, **kwargs: Any) -> Any:
        self.log.append(Action("W", index, self.chunk))
        return super().backward_weight_one_chunk(index, *args, **kwargs)


Side = tuple[list[Action], dict[str, Tensor]]


def ours(rank: int, stages: int, name: str, chunks: int, micro_batches: int) -> Side:
    sink = DeferredSink(AutogradSink())
    stage = Stage(rank, stages, micro_batches, chunks, DEEP, sink)
    executor = Executor(
        pipeline_mesh(stages, chunks),
        stage,
        boundary_specs(rank, stages, (SPEC,), chunks),
        schedule=generator(name, chunks),
        deferred=sink,
        timeout_s=20,
    )
    events: list[Event] = []
    executor.run(micro_batches, events=events)
    return [event.action for event in events], stage.gradients()


def theirs(rank: int, stages: int, name: str, chunks: int, micro_batches: int) -> Side:
    whole = Stage(rank, stages, micro_batches, chunks, DEEP)
    log: list[Action] = []
    made = []
    example = batch(0)
    for chunk in range(chunks):
        tensor = example.clone().requires_grad_(rank + chunk > 0)
        stage = LoggedStage(
            Chunk(whole, chunk), chunk * stages + rank, stages * chunks, torch.device("cpu"),
            input_args=(tensor,), output_args=(example.clone().requires_grad_(),),
        )  # fmt: skip
        stage.log, stage.chunk = log, chunk
        made.append(stage)
    multi = name in ("interleaved", "zb-h1")
    schedule = TORCH[name](
        made if multi else made[0], micro_batches, loss_fn=lambda output, _: output.square().mean()
    )  # type: ignore[arg-type, abstract]
    inputs = torch.cat([batch(m) for m in range(micro_batches)])
    target = torch.zeros(micro_batches)
    last = rank == stages - 1
    schedule.step(*([inputs] if rank == 0 else []), **({"target": target} if last else {}))
    return log, whole.gradients()


def both(rank: int, stages: int, cases: list[tuple[str, int, int]]) -> list[tuple[Side, Side]]:
    return [(ours(rank, stages, *case), theirs(rank, stages, *case)) for case in cases]


def most_held(actions: list[Action]) -> int:
    held = most = 0
    ends = "W" if any(action.kind == "W" for action in actions) else "B"
    for action in actions:
        held += (action.kind == "F") - (action.kind == ends)
        most = max(most, held)
    return most


def all_that_torch_runs(p: int) -> list[tuple[str, int, int]]:
    """Of the grid: 1F1B from p micro-batches on, the others with multiples of p."""
    cases = [("1f1b", 1, n) for n in (p, p + 1, 2 * p + 1)]
    for n in (p, 2 * p, 3 * p):
        cases += [("zb-h1", 1, n), ("interleaved", 2, n), ("interleaved", 3, n)]
    return cases


@pytest.mark.parametrize(
    ("stages", "cases"),
    [
        (2, [("1f1b", 1, 5), ("gpipe", 1, 3), ("interleaved", 2, 4), ("interleaved", 3, 6), ("zb-h1", 1, 6)]),
        (4, [("1f1b", 1, 9), ("interleaved", 2, 8), ("zb-h1", 1, 8)]),
        *(pytest.param(p, all_that_torch_runs(p), marks=pytest.mark.full) for p in (2, 3, 4)),
    ],
    ids=["2", "4", "all-2", "all-3", "all-4"],
)
def test_order_in_flight_and_gradients(stages: int, cases: list[tuple[str, int, int]]) -> None:
    """The same micro-batches in the same order on every rank; gradients within 1e-12 in fp64."""
    results = run_distributed(both, stages, cases, timeout=60)
    for number, (name, _, _) in enumerate(cases):
        for rank, of_rank in enumerate(results):
            (actions, gradients), (expected, reference) = of_rank[number]
            kinds = ("F", "B")
            assert [a for a in actions if a.kind in kinds] == [a for a in expected if a.kind in kinds], (name, rank)
            assert most_held(actions) <= most_held(expected), (name, rank)
            if name != "zb-h1":
                assert actions == expected and most_held(actions) == most_held(expected)
            else:
                assert sorted(actions) == sorted(expected)
            torch.testing.assert_close(gradients, reference, rtol=0, atol=1e-12)
