"""Asking ahead: a gather that a replay will need is launched early, waited for when it is wanted, and done once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megackpt.mesh.process_mesh import Axis
from megackpt.plan import REPLAY, ChunkPlan, Decision, SaveSet
from megackpt.recompute import Tape, step
from megackpt.tensor.collectives import GatherSequence
from tests.pool import run_distributed


@contextmanager
def _logged(log: list[str]) -> Iterator[None]:
    """Every all-gather that is called, and every wait, in order."""
    original = dist.all_gather_into_tensor

    class Waited:
        def __init__(self, work: dist.Work) -> None:
            self.work = work

        def wait(self) -> None:
            log.append("wait")
            self.work.wait()

    def logging(out, x, group=None, async_op=False):  # type: ignore[no-untyped-def]
        log.append("launch" if async_op else "gather")
        work = original(out, x, group=group, async_op=async_op)
        return Waited(work) if async_op else work

    dist.all_gather_into_tensor = logging
    try:
        yield
    finally:
        dist.all_gather_into_tensor = original


def _train(rank: int, world_size: int, ahead: bool) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    axis = Axis(world_size, rank, tuple(range(world_size)), dist.group.WORLD)
    torch.manual_seed(rank)
    x = torch.randn(3, 5, requires_grad=True)
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 35).view(7, 5))
    plan = ChunkPlan({"": SaveSet({"gather": Decision(output=REPLAY)})})
    log: list[str] = []
    with _logged(log):
        with Tape(plan) as tape:
            gathered = step("gather", GatherSequence(axis), x)
            loss = step("product", torch.nn.functional.linear, gathered, weight).square().sum()
        del gathered
        if ahead:
            tape.ahead()
            tape.ahead()
            log.append("asked")
        loss.backward()
    assert x.grad is not None and weight.grad is not None
    return x.grad, weight.grad, log


def test_a_gather_asked_ahead_is_launched_once_and_waited_for_in_backward() -> None:
    late = run_distributed(_train, 2, False)
    early = run_distributed(_train, 2, True)
    for (x, weight, log), (same_x, same_weight, other) in zip(late, early, strict=True):
        assert torch.equal(x, same_x) and torch.equal(weight, same_weight)
        assert log == ["gather", "gather"]
        assert other == ["gather", "launch", "asked", "wait"]
