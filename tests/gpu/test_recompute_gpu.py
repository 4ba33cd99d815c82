"""The replay engine on a GPU: what differs there from a CPU, and may therefore break there alone.

Random numbers come from Philox generators whose state is a seed and an offset; backward, and so every replay, runs on
a thread of autograd's own, on the stream of the forward.  Every comparison is to the bit.
"""

from __future__ import annotations

import gc
import threading
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megackpt.plan import ChunkPlan, Decision
from megackpt.plan.decision import REPLAY_ALL
from megackpt.recompute import KeptBytes, ReplayError, RngLedger, Stream, Tape, dropout, is_replaying, step
from tests.gpu.harness import DEVICE, assert_equal, generator, late, leaves_of, numbers, position
from tests.recompute.harness import DROP_ALL, KEPT_OUTPUT, decisions_for, plan

pytestmark = pytest.mark.gpu


# -- random numbers --------------------------------------------------------------------------------------------------


def noisy(x: Tensor, w: Tensor) -> Tensor:
    """Three steps that draw from the default generator, and one that does not."""
    y = step("a", lambda x: F.dropout(x.sin(), 0.3), x)
    z = step("b", lambda y, w: F.dropout(F.gelu(y @ w), 0.2), y, w)
    z = step("c", torch.tanh, z)
    return step("d", lambda z: z * torch.rand_like(z), z)


@pytest.mark.parametrize("name", decisions_for("a", "b", "c", "d"))
def test_default_generator_is_where_it_would_be(name: str) -> None:
    chunk = decisions_for("a", "b", "c", "d")[name]
    x, w = numbers(33, 64), numbers(64, 64, seed=2)

    def elsewhere() -> None:
        torch.rand(5, device=DEVICE)  # someone else draws between forward and backward

    plain = leaves_of(noisy, [x, w], None, between=elsewhere)
    assert_equal(leaves_of(noisy, [x, w], chunk, between=elsewhere), plain)


def test_seed_and_offset_are_restored_after_the_replay() -> None:
    """Backward after the generator was seeded anew: the replay goes back to the old seed, and leaves the new one."""
    x, w = numbers(33, 64), numbers(64, 64, seed=2)
    after: list[tuple[int, int]] = []

    def reseeded() -> None:
        torch.cuda.manual_seed(99)
        torch.rand(3, device=DEVICE)
        after.append(position())

    plain = leaves_of(noisy, [x, w], None)[:-1]
    fresh = [leaf.clone().requires_grad_() for leaf in (x, w)]
    torch.manual_seed(7)
    with Tape(DROP_ALL, RngLedger()):
        loss = noisy(*fresh).pow(2).sum()
    reseeded()
    loss.backward()
    assert_equal([loss.detach(), *(leaf.grad for leaf in fresh if leaf.grad is not None)], plain)
    assert after == [position()] and after[0][0] == 99 and after[0][1] > 0


def test_a_snapshot_is_two_integers_and_taken_by_steps_that_draw() -> None:
    torch.cuda.manual_seed(5)
    ledger = RngLedger()
    before = ledger.snapshot()
    assert before[-1] == (5, 0)
    drawn = torch.rand(1000, device=DEVICE)
    assert ledger.snapshot()[-1] == position() != (5, 0)
    ledger.restore(before)
    assert torch.equal(torch.rand(1000, device=DEVICE), drawn)
    x = numbers(8, 8).requires_grad_()
    with Tape(DROP_ALL, ledger, account=KeptBytes()) as tape:
        y = step("draws", lambda x: F.dropout(x, 0.5), x)
        step("draws not", torch.tanh, y)
        records = [ref() for ref in tape._records]
    states = {record.where: record.call.rng for record in records if record is not None}
    assert states["draws not"] is None and states["draws"] is not None
    assert states["draws"][-1] == (5, before_offset(drawn))


def before_offset(drawn: Tensor) -> int:
    """Offset of a generator that has drawn once like that."""
    fresh = torch.Generator(DEVICE).manual_seed(5)
    torch.rand(drawn.shape, device=DEVICE, generator=fresh)
    return fresh.get_offset()


@pytest.mark.parametrize("masks", ["keep", "replay"])
def test_own_streams_leave_the_default_generator_alone(masks: str) -> None:
    """A mask drawn again is the mask, on a stream that others have moved on."""
    x = numbers(40, 33)

    def run(chunk: ChunkPlan | None) -> tuple[list[Tensor], int]:
        ledger = RngLedger(defaults=False)
        stream = ledger.register(Stream("s", 3, DEVICE))

        def body(x: Tensor) -> Tensor:
            y = step("a", lambda x: dropout(x.sin(), 0.4, stream), x)
            return step("b", lambda y: dropout(y.exp(), 0.4, stream), y)

        torch.manual_seed(7)
        before = generator().get_state()
        fresh = x.clone().requires_grad_()
        with nullcontext() if chunk is None else Tape(chunk, ledger):
            loss = body(fresh).sum()
        stream.draw()
        loss.backward()
        assert torch.equal(generator().get_state(), before)
        assert fresh.grad is not None
        return [loss.detach(), fresh.grad], stream.position

    plain, at = run(None)
    found, then = run(plan(Decision("replay", "replay", masks)))
    assert_equal(found, plain)
    assert at == then == 3


# -- streams and threads ---------------------------------------------------------------------------------------------


def test_micro_batches_on_two_side_streams() -> None:
    """F0 F1 B0 B1, each on a stream of its own that starts late; autograd takes a backward, and so its replays, to
    the stream of its forward.  Fails if a replay runs on a stream that does not wait for what it reads."""
    x, w = numbers(256, 256), numbers(256, 256, seed=2) / 16
    plain = leaves_of(late, [x, w], None)[:-1]
    flights: list[tuple[Tensor, list[Tensor], torch.cuda.Stream]] = []
    for _ in range(2):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        fresh = [leaf.clone().requires_grad_() for leaf in (x, w)]
        torch.cuda.synchronize()
        torch.manual_seed(7)
        with torch.cuda.stream(stream), Tape(plan(REPLAY_ALL, d=KEPT_OUTPUT), RngLedger()):
            torch.cuda._sleep(20_000_000)
            loss = late(*fresh).float().pow(2).sum()
        flights.append((loss, fresh, stream))
    for loss, _, stream in flights:
        torch.cuda.current_stream().wait_stream(stream)
        loss.backward()
    torch.cuda.synchronize()
    for loss, fresh, _ in flights:
        assert_equal([loss.detach(), *(leaf.grad for leaf in fresh if leaf.grad is not None)], plain)


def test_replay_runs_on_autograds_thread_and_on_the_forwards_stream() -> None:
    seen: list[tuple[int, bool, torch.cuda.Stream]] = []

    def watched(x: Tensor) -> Tensor:
        if is_replaying():
            seen.append((threading.get_ident(), torch.is_grad_enabled(), torch.cuda.current_stream()))
        return x.sin().sin()

    x = numbers(64, 64).requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), Tape(DROP_ALL):
        loss = step("a", watched, x).sum()
    torch.cuda.current_stream().wait_stream(stream)
    loss.backward()
    [(thread, grad, where)] = seen
    assert thread != threading.get_ident() and grad and where == stream
    assert not is_replaying()


def test_a_replay_that_fails_on_that_thread() -> None:
    """The error names the step on the caller's thread; generator and engine are as before; nothing stays allocated."""
    x = numbers(64, 64)
    broken = [True]

    def body(x: Tensor) -> Tensor:
        if is_replaying() and broken[0]:
            torch.rand(3, device=DEVICE)
            raise ValueError("no")
        return F.dropout(x.sin(), 0.5).sin()

    def failing() -> None:
        fresh = x.clone().requires_grad_()
        with Tape(DROP_ALL):
            loss = step("the step", body, fresh).sum()
        before = position()
        with pytest.raises(ReplayError, match="the step.*ValueError: no"):
            loss.backward()
        assert position() == before

    failing()
    gc.collect()
    held = torch.cuda.memory_allocated()
    failing()
    gc.collect()
    assert torch.cuda.memory_allocated() == held
    broken[0] = False
    plain = leaves_of(lambda x: step("the step", body, x), [x], None)
    assert_equal(leaves_of(lambda x: step("the step", body, x), [x], DROP_ALL), plain)


def test_a_second_backward_and_what_stays_allocated() -> None:
    """Rebuilt tensors go at the end of each backward, on the thread that rebuilt them: the second finds none."""
    x, w = numbers(512, 512), numbers(512, 512, seed=2)
    fresh = [leaf.clone().requires_grad_() for leaf in (x, w)]
    torch.manual_seed(7)
    with Tape(plan(REPLAY_ALL, d=KEPT_OUTPUT), RngLedger()):
        loss = late(*fresh).pow(2).sum()
    held, gradients = [], []
    for _ in range(3):
        gradients.append(torch.autograd.grad(loss, fresh, retain_graph=True))
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated() - sum(g.nbytes for pair in gradients for g in pair))
    assert held[0] == held[1] == held[2]
    assert all(torch.equal(a, b) for later in gradients[1:] for a, b in zip(gradients[0], later, strict=True))


def test_a_graph_over_both_devices() -> None:
    """Replays on the calling thread for the CPU's part and on autograd's for the GPU's, in one backward."""
    threads: dict[str, int] = {}

    def noted(x: Tensor) -> Tensor:
        if is_replaying():
            threads[x.device.type] = threading.get_ident()
        return F.dropout(x.sin(), 0.2).sin()

    def body(x: Tensor) -> Tensor:
        y = step("host", noted, x)
        z = step("device", noted, y.to(DEVICE))
        return step("host again", noted, z.cpu()).to(DEVICE)

    x = numbers(32, 32).cpu()
    assert_equal(leaves_of(body, [x], DROP_ALL, ledger=RngLedger()), leaves_of(body, [x], None))
    assert threads["cpu"] == threading.get_ident() != threads["cuda"]
