"""Order between streams, without a GPU: runs on streams of paper, watched by a detector of races."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

from megackpt.plan import ChunkPlan, Decision
from megackpt.plan.decision import REPLAY_ALL
from megackpt.recompute import Tape, lanes, step
from megackpt.recompute.tiers import HostTier
from tests.recompute.harness import plan
from tests.recompute.streams import PaperStream, PaperStreams, backward_on, numbers

X = numbers(6, 8)
HOST = Decision("offload_host", "offload_host")


def run(chunk: ChunkPlan, paper: PaperStreams, *, delay_s: float = 0.0) -> tuple[Tensor, list[str]]:
    """Three steps: the first and the last on the main stream, the one between on a side stream, which also reads the
    first one's output in its backward.  Returns the gradient, and where the first one's function ran."""
    side, ran = PaperStream(paper, "side"), []

    def first(x: Tensor) -> Tensor:
        ran.append(paper.current.name)
        return x.exp() + 1.0

    with mock.patch.object(lanes, "STREAMS", paper), HostTier(delay_s) as tier:
        x = X.clone().requires_grad_()
        with paper:
            with Tape(chunk, tiers={"offload_host": tier}):
                y = step("first", first, x)
                side.wait_event(paper.current.record_event())
                with paper.on(side):
                    z = step("middle", torch.sin, y)
                paper.hold(y, side)
                paper.main.wait_event(side.record_event())
                backward_on(paper, z, side)
                result = step("last", torch.square, z)
                paper.hold(z, paper.main)
            loss = result.sum()
            del y, z, result
            loss.backward()
            assert x.grad is not None
            gradient = x.grad.clone()
            del loss, x
            gc.collect()
    return gradient, ran


def without_streams() -> Tensor:
    x = X.clone().requires_grad_()
    torch.square(torch.sin(x.exp() + 1.0)).sum().backward()
    assert x.grad is not None
    return x.grad


PLANS = {
    "output": plan(first=Decision("replay", "keep")),
    "all": plan(first=REPLAY_ALL, middle=REPLAY_ALL, last=REPLAY_ALL),
    "host": plan(first=HOST, middle=HOST),
    "mixed": plan(first=Decision("replay", "offload_host"), middle=Decision("offload_host", "replay")),
}


@pytest.mark.parametrize("name", PLANS)
def test_what_is_rebuilt_on_one_stream_and_read_on_another(name: str) -> None:
    paper = PaperStreams()
    gradient, ran = run(PLANS[name], paper, delay_s=0.002)
    assert paper.faults == []
    assert torch.equal(gradient, without_streams())
    assert ran == ["main"] * (1 if name == "host" else 2)  # the replay too, asked for by a node on the side stream


def test_nobody_waits_on_a_single_stream() -> None:
    """Events are recorded, but no stream waits for itself, and no memory is held."""
    waits: list[object] = []
    paper = PaperStreams()
    record: Callable[..., None] = waits.append
    with (
        mock.patch.object(PaperStream, "wait_event", lambda self, event: record(event)),
        mock.patch.object(PaperStreams, "hold", lambda self, tensor, stream: record(stream)),
        mock.patch.object(lanes, "STREAMS", paper),
    ):
        x = X.clone().requires_grad_()
        with Tape(plan(first=REPLAY_ALL, middle=REPLAY_ALL)):
            loss = step("middle", torch.sin, step("first", torch.exp, x)).sum()
        loss.backward()
    assert waits == []


@pytest.mark.parametrize(
    ("broken", "fault"),
    [
        ((PaperStream, "wait_event", lambda self, event: None), "may not have written"),
        ((PaperStreams, "hold", lambda self, tensor, stream: None), "is freed while side may read it"),
        ((lanes.Lane, "join", lambda self, tensor: None), "may not have written"),
    ],
    ids=["no waiting", "no holding", "no joining"],
)
def test_the_detector_sees_what_is_left_out(broken: tuple[type, str, object], fault: str) -> None:
    paper = PaperStreams()
    with mock.patch.object(*broken):
        run(PLANS["output"], paper)
    assert any(fault in text for text in paper.faults), paper.faults


def test_the_copy_waits_for_what_was_queued_when_it_was_put() -> None:
    """The writer is late, the main stream goes on: the copy waits for the event of the put, not for later work."""
    paper = PaperStreams()
    waited: list[dict[str, int]] = []
    real = PaperStream.wait_event

    def wait(self: PaperStream, event: object) -> None:
        if self.name == "copies":
            waited.append(dict(event.clock))  # type: ignore[attr-defined]
        real(self, event)  # type: ignore[arg-type]

    class Late(HostTier):
        gate = threading.Event()

        def _work(self) -> None:
            self.gate.wait()
            super()._work()

    with mock.patch.object(PaperStream, "wait_event", wait), mock.patch.object(lanes, "STREAMS", paper), Late() as tier:
        with paper:
            x = X.clone()
            ticket = tier.put(x)
            then = dict(paper.main.clock)
            (x + 1.0).sin()
        assert paper.main.clock["main"] > then["main"]
        tier.gate.set()
        assert torch.equal(ticket.get(), X)
    assert waited == [then]
    assert paper.host["copies"] == 1  # the writer waited for the copy's end before it let the source go
    assert paper.faults == []
