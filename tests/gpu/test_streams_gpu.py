"""Streams on a GPU: what is rebuilt on one and read on another, and copies to host memory beside the computation.

`torch.cuda._sleep` keeps a stream busy, so that whatever is not ordered by an event happens too early.  The logic is
proven without a GPU in `tests/recompute/test_lanes.py`; here the device itself is asked.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megackpt.plan import ChunkPlan, Decision
from megackpt.plan.decision import REPLAY_ALL
from megackpt.recompute import Tape, step
from megackpt.recompute.tiers import HostTier
from tests.gpu.harness import DEVICE, assert_equal, late, leaves_of, numbers
from tests.recompute.harness import plan

pytestmark = pytest.mark.gpu
HOST = Decision("offload_host", "offload_host")
BUSY = 20_000_000  # cycles: some ten milliseconds


def busy_square(x: Tensor) -> Tensor:
    """Its value is there late, in forward and in replay."""
    torch.cuda._sleep(BUSY)
    return x.square() + 1.0


def side_by_side(chunk: ChunkPlan | None, tier: HostTier | None = None) -> list[Tensor]:
    """`first` on the default stream; `middle`, which saves the output of it, on another."""
    x = numbers(512, 512).requires_grad_()
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    with Tape(chunk or ChunkPlan(), tiers={} if tier is None else {"offload_host": tier}):
        y = step("first", busy_square, x)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            z = step("middle", torch.sin, y)
        y.record_stream(side)
        main.wait_stream(side)
        result = step("last", torch.square, z)
        z.record_stream(main)
    loss = result.sum()
    del y, z, result
    loss.backward()
    assert x.grad is not None
    return [loss.detach(), x.grad]


PLANS = {
    "output": plan(first=Decision("replay", "keep")),
    "all": plan(first=REPLAY_ALL, middle=REPLAY_ALL, last=REPLAY_ALL),
    "host": plan(first=HOST, middle=HOST),
    "mixed": plan(first=Decision("replay", "offload_host"), middle=Decision("offload_host", "replay")),
}


@pytest.mark.parametrize("delay_s", [0.0, 0.003])
@pytest.mark.parametrize("name", PLANS)
def test_two_streams_give_the_same_bits(name: str, delay_s: float) -> None:
    plain = side_by_side(None)
    with HostTier(delay_s) as tier:
        for _ in range(5):
            assert_equal(side_by_side(PLANS[name], tier), plain, name)


@pytest.mark.parametrize("delay_s", [0.0, 0.003])
def test_host_tier_is_exact(delay_s: float) -> None:
    """OF-01, OF-04: the copy is late, memory is tight in between, nothing changes."""
    x, w = numbers(256, 256), numbers(256, 256, seed=2)

    def between() -> None:
        for seed in range(20):  # what was freed too early is written over
            numbers(256, 256, seed=seed).mul_(3.0)

    plain = leaves_of(late, [x, w], None, between=between)
    with HostTier(delay_s) as tier:
        for _ in range(5):
            found = leaves_of(late, [x, w], plan(HOST), between=between, tiers={"offload_host": tier})
            assert_equal(found, plain)


def test_the_copy_is_pinned_and_what_the_stream_had_made_of_it() -> None:
    with HostTier() as tier:
        side = torch.cuda.Stream()
        base = numbers(1 << 20)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(BUSY)
            made = base * 2.0
            ticket = tier.put(made)
            del made
            back = ticket.get()
        torch.cuda.synchronize()
        copy = ticket._copy
        assert copy is not None and copy.is_pinned() and ticket.held_bytes() == 0
        assert torch.equal(back, base * 2.0) and torch.equal(copy.to(DEVICE), back)


def test_device_memory_is_free_between_forward_and_backward() -> None:
    x = numbers(1 << 20).requires_grad_()
    with HostTier() as tier:
        before = torch.cuda.memory_allocated()
        with Tape(plan(a=Decision("offload_host"), b=REPLAY_ALL), tiers={"offload_host": tier}) as tape:
            loss = step("b", torch.sin, step("a", lambda x: x + 1.0, x)).sum()
        for place in tape._stored:
            if (stored := place()) is not None:
                stored.ticket.get()  # waits for the writer
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() - before < x.nbytes // 2
        loss.backward()
    assert x.grad is not None and torch.equal(x.grad, (x.detach() + 1.0).cos())
