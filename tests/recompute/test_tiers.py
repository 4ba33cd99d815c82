"""Kept tensors that wait elsewhere: exact, freed at both ends, and never taken for another."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megackpt.plan import ChunkPlan, Decision, Group, SaveSet
from megackpt.recompute import KeptBytes, Tape, chain, step
from megackpt.recompute.tiers import HostTier, ShardTier, Ticket
from megackpt.tensor.collectives import gather_flat
from tests.pool import run_distributed
from tests.recompute.harness import assert_same, numbers, plan
from tests.recompute.probes import Census
from tests.tensor.probes import collectives, world_axis

X, W = numbers(6, 8), numbers(8, 8, seed=2)
OUTPUT = Decision("offload_host")
INTERNALS = Decision("keep", "offload_host")
BOTH = Decision("offload_host", "offload_host")
SLOW = 0.003


class Gated(HostTier):
    """Copies nothing before `gate` is set."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        super().__init__()

    def _work(self) -> None:
        self.gate.wait()
        super()._work()

    def close(self) -> None:
        self.gate.set()
        super().close()


def layer(x: Tensor, w: Tensor) -> Tensor:
    y = step("norm", lambda x: F.layer_norm(x, (8,)), x)
    q, k, v = step("qkv", lambda y, w: F.linear(y, w.repeat(3, 1)).chunk(3, -1), y, w)
    z = step("core", lambda q, k, v: torch.softmax(F.dropout(q @ k.t(), 0.2), -1) @ v, q, k, v)
    return step("act", lambda z, w: F.gelu(z @ w), z, w)


@pytest.mark.parametrize("delay", [0.0, SLOW])
@pytest.mark.parametrize("decision", [OUTPUT, INTERNALS, BOTH], ids=["output", "internals", "both"])
def test_host_tier_is_exact(decision: Decision, delay: float) -> None:
    """OF-01: a writer that is late changes nothing; sources live until they are copied."""
    with HostTier(delay) as tier:
        assert_same(layer, [X, W], plan(decision), tiers={"offload_host": tier})
        mixed = plan(decision, norm=Decision("replay", "replay"), core=Decision("replay", "offload_host"))
        assert_same(layer, [X, W], mixed, tiers={"offload_host": tier})


def test_device_memory_is_freed_by_the_copy_and_host_memory_by_the_backward() -> None:
    """Fails if the tier holds its source beyond the copy, or a copy beyond the backward."""
    x = numbers(600, 8).requires_grad_()
    with Gated() as tier:
        with Tape(plan(a=OUTPUT), tiers={"offload_host": tier}, account=KeptBytes()) as tape, Census() as census:
            y = step("a", lambda x: x + 1.0, x)
            result = step("b", torch.sin, y)
            loss = result.sum()
            del y, result
        assert census.bytes - loss.nbytes == x.nbytes  # still on the device when the forward ended
        assert tape.report() == tape.kept_now() == {"a": x.nbytes}
        tier.gate.set()
        until(lambda: tape.kept_now() == {"a": 0})
        until(lambda: census.bytes == loss.nbytes)  # the copy, made in another thread, is not in the census
        refs = [place() for place in tape._stored]
        assert len(refs) == 1 and refs[0] is not None
        ticket = refs[0].ticket
        del refs
        loss.backward()
        assert torch.equal(x.grad, (x.detach() + 1.0).cos())
        assert [place() for place in tape._stored] == [None]
        assert ticket.held_bytes() == 0


def until(true: Any) -> None:
    deadline = time.monotonic() + 5.0
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_views_and_slices_come_back_as_they_were() -> None:
    """OF-03: x, x.t() (square) and a slice of it, saved through one storage: own strides, one transfer."""
    puts: list[Tensor] = []

    class Counting(HostTier):
        def put(self, base: Tensor) -> Any:
            puts.append(base)
            return super().put(base)

    def body(w: Tensor) -> Tensor:
        y = step("a", lambda w: w + 1.0, w)
        return step("b", lambda y, t, s: (y @ t).sum() + (s * s).sum(), y, y.t(), y[1:4, ::2])

    with Counting() as tier:
        assert_same(body, [W], plan(a=OUTPUT), tiers={"offload_host": tier})
    assert len(puts) == 1 and puts[0].shape == (64,)


def test_internals_that_follow_each_other_at_one_address() -> None:
    """As soon as a storage is copied and dropped its memory serves the next one: an address is no identity."""

    def many(x: Tensor) -> Tensor:
        total = x
        for i in range(30):
            total = total + (x * (1.0 + i)).exp().tanh().square().sum() * 1e-3
        return total.sin()

    with HostTier() as tier:
        assert_same(lambda x: step("a", many, x), [X * 0.1], plan(a=INTERNALS), tiers={"offload_host": tier})


def test_an_internal_changed_between_two_saves() -> None:
    """Saved, changed in place, saved again: two values, so two copies; the first use is then refused as in autograd."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y = x + 1.0
            ctx.save_for_backward(y.clone(), y.mul_(2.0))
            return y + 0.0

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            a, b = ctx.saved_tensors
            return grad * (2.0 * a + b)

    with HostTier() as tier:
        assert_same(lambda x: step("a", Twice.apply, x) * x, [X], plan(a=INTERNALS), tiers={"offload_host": tier})


def test_what_is_settled_is_away() -> None:
    with HostTier(SLOW) as tier:
        tier.settle()
        tickets = [tier.put(torch.full((size,), 1.5)) for size in (3, 5, 7)]
        assert sum(ticket.held_bytes() for ticket in tickets[1:]) == 4 * (5 + 7)
        tier.settle()
        assert [ticket.held_bytes() for ticket in tickets] == [0, 0, 0]
        assert [ticket.get().numel() for ticket in tickets] == [3, 5, 7]


class AtOnce(HostTier):
    """Has copied before the step goes on."""

    def put(self, base: Tensor) -> Any:
        ticket = super().put(base)
        self.settle()
        return ticket


@pytest.mark.parametrize("cell", [torch.nn.GRUCell(8, 8), torch.nn.LSTMCell(8, 8)], ids=["gru", "lstm"])
def test_parts_of_a_storage_that_count_their_versions_themselves(cell: torch.nn.Module) -> None:
    """A recurrent cell cuts its gates out of one product and writes into them in turn, and saves each as it is done:
    all at the same version, of their own."""

    def body(x: Tensor) -> Tensor:
        out = step("a", cell, x)
        return out if isinstance(out, Tensor) else out[0] * out[1]

    with AtOnce() as tier:
        assert_same(body, [X], plan(a=INTERNALS), tiers={"offload_host": tier})


def test_views_of_an_internal_share_one_copy() -> None:
    puts: list[Tensor] = []

    class Counting(HostTier):
        def put(self, base: Tensor) -> Any:
            puts.append(base)
            return super().put(base)

    def fn(x: Tensor) -> Tensor:
        y = x + 1.0
        return (y @ y.t()).sum() + (y[1:4, ::2] * y[:3, ::2]).sum() + y.sin().sum()

    with Counting() as tier:
        assert_same(lambda x: step("a", fn, x), [X], plan(a=INTERNALS), tiers={"offload_host": tier})
    assert len(puts) == 1


def test_second_backward_fetches_again() -> None:
    x = X.clone().requires_grad_()
    with HostTier() as tier:
        with Tape(plan(BOTH), tiers={"offload_host": tier}):
            loss = layer(x, W).sum()
        grads = []
        for _ in range(2):
            with Census() as census:
                (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
                assert census.bytes == grad.nbytes  # what was fetched is gone again
            grads.append(grad)
        assert torch.equal(*grads)


def test_source_changed_while_it_was_moved() -> None:
    x = X.clone().requires_grad_()
    with Gated() as tier:
        with Tape(plan(a=OUTPUT), tiers={"offload_host": tier}):
            y = step("a", lambda x: x + 1.0, x)
            result = step("b", torch.sin, y)
        with torch.no_grad():
            y.mul_(2.0)
        tier.gate.set()
        with pytest.raises(RuntimeError, match="moving a kept tensor to host memory failed: .*modified in place"):
            result.sum().backward()


def test_error_of_the_writer_reaches_who_asks() -> None:
    x = X.clone().requires_grad_()
    with Gated() as tier:
        with Tape(plan(a=OUTPUT), tiers={"offload_host": tier}) as tape:
            result = step("b", torch.sin, step("a", lambda x: x + 1.0, x))
        stored = tape._stored[0]()
        assert stored is not None
        stored.ticket._source = None  # nothing to copy, in the place of a full memory
        tier.gate.set()
        with pytest.raises(RuntimeError, match="moving a kept tensor to host memory failed"):
            result.sum().backward()
    assert tier._thread not in threading.enumerate()


def test_a_plan_names_a_tier_that_the_run_has_not() -> None:
    with Tape(plan(a=OUTPUT)), pytest.raises(ValueError, match="says offload_host for a, but this run has no tier"):
        step("a", lambda x: x + 1.0, X.clone().requires_grad_())
    with pytest.raises(ValueError, match="internals='shard' is not one of keep, replay, offload_host, offload_disk"):
        Decision("keep", "shard")


def test_tickets_are_asked_ahead() -> None:
    asked: list[str] = []

    class Eager(HostTier):
        def put(self, base: Tensor) -> Any:
            return Told(super().put(base))

    class Told:
        def __init__(self, ticket: Ticket) -> None:
            self.ticket = ticket

        def ahead(self) -> None:
            asked.append("ahead")

        def get(self) -> Tensor:
            asked.append("get")
            return self.ticket.get()

        def held_bytes(self) -> int:
            return self.ticket.held_bytes()

    x = X.clone().requires_grad_()
    with Eager() as tier:
        with Tape(plan(a=OUTPUT), tiers={"offload_host": tier}) as tape:
            result = step("b", torch.sin, step("a", lambda x: x + 1.0, x))
        tape.ahead()
        result.sum().backward()
        tape.ahead()  # nothing is left to ask for
    assert asked == ["ahead", "get"]


def test_group_input_and_output_in_a_tier() -> None:
    """Groups whose outputs wait in host memory: all that stays on the device is the chain's own input."""
    weights = [torch.nn.Parameter(numbers(8, 8, seed=i) * 0.4) for i in range(6)]
    layers = [(i, lambda x, w=w: torch.tanh(F.linear(x, w)) + x) for i, w in enumerate(weights)]
    groups = tuple(Group(i, i + 1, output="offload_host") for i in (0, 2, 4))
    body = lambda x: step("end", torch.sin, chain(layers, x))  # noqa: E731
    with HostTier(SLOW) as tier:
        assert_same(body, [X], ChunkPlan(groups=groups), tiers={"offload_host": tier})
        with Tape(ChunkPlan(groups=groups), tiers={"offload_host": tier}, account=KeptBytes()) as tape:
            result = body(X.clone().requires_grad_())
        until(lambda: sum(tape.kept_now().values()) == X.nbytes)
        assert tape.kept_now()["layers 0 to 1"] == X.nbytes
        del result


# -- shards ----------------------------------------------------------------------------------------------------------


def _sharded(rank: int, world_size: int, rows: int) -> tuple[list[bool], dict[str, int], list[tuple[str, int]]]:
    """Equal tensors on all ranks; each keeps its part of the residual stream."""
    axis = world_axis(rank, world_size)
    tier = ShardTier(rank, world_size, partial(gather_flat, axis=axis))
    chunk = ChunkPlan({"": SaveSet({"res": Decision("shard"), "odd": Decision("shard")})})

    def body(x: Tensor, w: Tensor) -> Tensor:
        y = step("res", lambda x: x + 1.0, x)
        z = step("mid", lambda y, w: (y @ w).sin(), y, w)
        r = step("odd", lambda z: (z * 1.5)[1:, 1:], z)
        return step("end", lambda r: r * r, r)

    results, report, sent = [], {}, []
    for plan_used in (None, chunk):
        x, w = numbers(rows, 8).requires_grad_(), W.clone().requires_grad_()
        if plan_used is None:
            loss = body(x, w).sum()
        else:
            with Tape(plan_used, tiers={"shard": tier}, account=KeptBytes()) as tape:
                loss = body(x, w).sum()
            report = tape.report()
        with collectives() as seen:
            loss.backward()
        sent = list(seen)
        results.append((loss.detach(), x.grad, w.grad))
    equal = [torch.equal(a, b) for a, b in zip(*results, strict=True)]
    return equal, report, sent


@pytest.mark.parametrize(("world_size", "rows"), [(2, 6), (3, 7)])
def test_shard_tier(world_size: int, rows: int) -> None:
    """1/t of the bytes, rounded up where the tensor does not divide, one gather each when it is asked for."""
    whole = rows * 8
    share = -(-whole // world_size)
    for equal, report, sent in run_distributed(_sharded, world_size, rows, timeout=60):
        assert equal == [True, True, True]
        assert report["res"] == 4 * share and report["odd"] == 4 * share
        assert sent == [("all_gather_into_tensor", 4 * share * world_size)] * 2


def test_shard_of_nobody() -> None:
    with pytest.raises(ValueError, match="rank 2 of 2"):
        ShardTier(2, 2, lambda part: part)
