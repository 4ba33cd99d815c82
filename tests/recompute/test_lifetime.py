"""When what was kept or rebuilt goes away: nothing leaks, with the garbage collector off, whatever goes wrong."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megackpt.plan import ChunkPlan, Decision, Group
from megackpt.recompute import KeptBytes, ReplayError, RngLedger, Stream, Tape, chain, dropout, is_replaying, step
from megackpt.recompute.context import state
from megackpt.recompute.tiers import HostTier
from tests.recompute.harness import DROP_ALL, KEPT_OUTPUT, ONLY_OUTPUT, Calls, drop, numbers, plan
from tests.recompute.probes import Census, alive

pytestmark = pytest.mark.usefixtures("no_collector")

X, W = numbers(6, 8), numbers(8, 8, seed=2)


def body(x: Tensor, w: Tensor) -> Tensor:
    y = step("norm", lambda x: F.layer_norm(x, (8,)), x)
    z = step("up", F.linear, y, w)
    a = step("act", lambda z: F.gelu(F.dropout(z, 0.1)), z)
    q, k = step("pair", lambda a: (a.sin(), a.exp()), a)
    return step("down", lambda q, k, w: (q * k) @ w, q, k, w)


PLANS = {
    "kept": plan(),
    "all": DROP_ALL,
    "outputs": plan(ONLY_OUTPUT),
    "internals": plan(KEPT_OUTPUT),
    "some": drop("norm", "act"),
}


def forward(chunk: ChunkPlan, **tape: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, w = X.clone().requires_grad_(), torch.nn.Parameter(W.clone())
    with Tape(chunk, account=KeptBytes(), **tape):
        loss = body(x, w).sum()
    return loss, x, w


@pytest.mark.parametrize("name", PLANS)
def test_nothing_lives_after_a_backward_though_the_loss_is_held(name: str) -> None:
    loss, x, _ = forward(PLANS[name])
    assert alive()
    loss.backward()
    assert x.grad is not None and alive() == {}


@pytest.mark.parametrize("name", PLANS)
def test_nothing_lives_after_a_dropped_graph(name: str) -> None:
    loss, _, _ = forward(PLANS[name])
    value = loss.detach()
    del loss
    assert alive() == {} and value.isfinite()


def test_nothing_lives_after_a_failed_forward() -> None:
    x = X.clone().requires_grad_()

    def broken(_: Tensor) -> Tensor:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), Tape(DROP_ALL):
        step("broken", broken, step("a", torch.exp, x))
    assert state.now.tape is None and state.now.frame is None and alive() == {}


def test_an_output_held_after_the_forward_holds_no_step() -> None:
    """A detached output that a user keeps (for a log) must not keep its step and the step's inputs."""
    x = X.clone().requires_grad_()
    with Tape(DROP_ALL), Census() as census:
        y = step("a", lambda x: x + 1.0, step("big", lambda x: x.repeat(100, 1)[:6] * 2.0, x))
        logged = y.detach()
        del y
    assert logged.shape == X.shape and alive() == {"Tag": 1}  # a few words on the storage, cut loose
    assert census.bytes == X.nbytes


@pytest.mark.parametrize("chunk", PLANS.values(), ids=PLANS)
def test_partial_gradient(chunk: ChunkPlan) -> None:
    """autograd.grad of one input, graph retained: what was rebuilt is gone, and the rest still works."""
    torch.manual_seed(3)
    loss, x, w = forward(chunk)
    with Census() as census:
        (first,) = torch.autograd.grad(loss, w, retain_graph=True)
        assert census.bytes == first.nbytes
    (second,) = torch.autograd.grad(loss, x)
    torch.manual_seed(3)
    plain, px, pw = forward(plan())
    expected = torch.autograd.grad(plain, (pw, px))
    assert torch.equal(first, expected[0]) and torch.equal(second, expected[1])
    del loss, plain
    assert alive() == {}


def test_second_backward_replays_again_and_holds_nothing_in_between() -> None:
    calls = Calls()
    x = X.clone().requires_grad_()
    with Tape(DROP_ALL):
        y = step("a", calls("a", lambda x: F.dropout(x, 0.5).exp()), x)
        result = step("b", calls("b", lambda y: y.sin() * y), y)
        loss = result.sum()
        del y, result
    grads = []
    for times in (1, 2, 3):
        x.grad = None
        with Census() as census:
            loss.backward(retain_graph=times < 3)
            assert census.bytes == x.grad.nbytes
        grads.append(x.grad)
        assert calls.count == {"a": 1 + times, "b": 1 + times}
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])
    assert alive() == {}
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize(("clear", "runs"), [(True, 3), (False, 2)])
def test_backward_in_two_calls(clear: bool, runs: int) -> None:
    """Input gradients first, weight gradients later: with the clearing at the end of a backward the step replays for
    each, without it once."""
    calls = Calls()
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    with Tape(drop("a"), clear_after_backward=clear):
        y = step("a", calls("a", lambda x: x.sin().exp()), x)
        loss = step("b", torch.matmul, y, w).sum()
        del y
    torch.autograd.grad(loss, w, retain_graph=True)
    torch.autograd.grad(loss, x)
    assert calls.count == {"a": runs}
    del loss
    assert alive() == {}


class Ambient:
    """Everything around a replay that it must put back."""

    def __init__(self, ledger: RngLedger) -> None:
        self.values = self.read(ledger)

    @staticmethod
    def read(ledger: RngLedger) -> list[Any]:
        return [
            torch.is_grad_enabled(),
            torch._C._autograd._top_saved_tensors_default_hooks(True),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
            (state.now.tape, state.now.frame, state.now.masks, state.now.inner),
            ledger.state_dict(),
            torch.get_rng_state().tolist(),
        ]

    def unchanged(self, ledger: RngLedger) -> bool:
        return self.values == self.read(ledger)


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("depth", [1, 2])
def test_exception_inside_a_replay(failure: type[BaseException], depth: int) -> None:
    """The error names the step; grad mode, hooks, autocast, random streams and the replay context are as before; the
    next backward of the same graph works, clearing included."""
    ledger = RngLedger()
    stream = ledger.register(Stream("s", 5))
    fails = [False]

    def shaky(x: Tensor) -> Tensor:
        y = dropout(F.dropout(x, 0.2), 0.3, stream)
        torch.set_grad_enabled(True)
        if fails[0] and is_replaying():
            raise failure("disk on fire")
        return y.exp()

    x = X.clone().requires_grad_()
    with Tape(DROP_ALL, ledger), torch.autocast("cpu", dtype=torch.bfloat16):
        inner = shaky if depth == 1 else lambda x: step("inner", shaky, x) * 1.0
        y = step("outer", inner, x)
        loss = step("after", torch.sin, y).sum()
        del y
    fails[0] = True
    before = Ambient(ledger)
    with pytest.raises((ReplayError, failure)) as caught:
        loss.backward(retain_graph=True)
    if failure is ValueError:
        assert str(caught.value) == "replay of outer failed: ValueError: disk on fire"
        assert isinstance(caught.value.__cause__, ValueError)
    else:
        assert caught.type is KeyboardInterrupt  # a user's interrupt is nobody's replay error
    assert before.unchanged(ledger)
    fails[0] = False
    del caught
    with Census() as census:
        loss.backward(retain_graph=True)
        assert census.bytes == x.grad.nbytes
    assert before.unchanged(ledger)
    del loss
    assert alive() == {}


def test_nothing_lives_after_a_failed_backward() -> None:
    """An error in a node that runs after replays: what was rebuilt is dropped with the graph, and the clearing of the
    next backward still runs."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ValueError("node")

    x, w = X.clone().requires_grad_(), torch.nn.Parameter(W.clone())
    with Tape(DROP_ALL):
        loss = body(Fails.apply(x), w).sum()
    with pytest.raises(ValueError, match="node"):
        loss.backward()
    del loss
    assert alive() == {}
    loss, x, w = forward(DROP_ALL)
    loss.backward(retain_graph=True)
    with Census() as census:
        loss.backward(retain_graph=True)
        assert census.bytes == 0  # gradients were accumulated in place


def test_no_growth_over_hundreds_of_steps() -> None:
    """Micro-batches that interleave, groups, tiers; the collector stays off: objects and storages do not grow."""
    weights = [torch.nn.Parameter(numbers(8, 8, seed=i) * 0.4) for i in range(4)]
    layers = [(i, lambda x, w=w: step("l", lambda x: torch.tanh(F.linear(x, w)), x)) for i, w in enumerate(weights)]
    chunks = [
        ChunkPlan(DROP_ALL.save_sets, (Group(0, 1), Group(2, 3, (Group(2, 2),)))),
        plan(Decision("replay", "offload_host", "replay")),
        DROP_ALL,
    ]
    with HostTier() as tier, Census() as census:
        waiting: list[Tensor] = []
        sizes, objects = [], []
        for number in range(300):
            with Tape(chunks[number % 3], tiers={"offload_host": tier}):
                y = chain(layers, X.clone().requires_grad_())
                waiting.append(step("end", lambda y: y * y, y).sum())
                del y
            if number >= 2:
                waiting.pop(0).backward()
            if number >= 30 and number % 30 == 0:
                settle(census)
                sizes.append(census.bytes)
                objects.append(len(gc.get_objects()))
        assert max(sizes) == min(sizes)
        assert max(objects) - objects[0] <= 20, objects
        waiting.clear()


def settle(census: Census) -> None:
    """Let the tier's writer finish what it was given."""
    last = -1
    for _ in range(200):
        if census.bytes == last:
            return
        last = census.bytes
        time.sleep(0.005)


def test_parameters_and_inputs_are_not_held_by_a_finished_tape() -> None:
    """A model that is deleted is gone: neither tape nor thread state refers to it."""
    model = torch.nn.Linear(8, 8)
    ref = weakref.ref(model)
    x = X.clone().requires_grad_()
    with Tape(DROP_ALL) as tape:
        loss = step("a", lambda m, x: m(x).exp(), model, x).sum()
    loss.backward()
    del loss, model
    assert ref() is None and tape is not None


def test_backward_in_other_threads() -> None:
    """Three backwards at once, each in a thread of its own, started in a fourth: equal, and nothing stays."""
    expected = forward(plan())
    expected[0].backward()
    pairs = []
    torch.manual_seed(0)
    for _ in range(3):
        x, w = X.clone().requires_grad_(), torch.nn.Parameter(W.clone())
        with Tape(DROP_ALL):
            y = step("norm", lambda x: F.layer_norm(x, (8,)), x)
            z = step("up", F.linear, y, w)
            loss = step("act", F.gelu, z).sum()
            del y, z
        pairs.append((loss, x, w))
    threads = [threading.Thread(target=loss.backward) for loss, _, _ in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    x, w = X.clone().requires_grad_(), torch.nn.Parameter(W.clone())
    F.gelu(F.linear(F.layer_norm(x, (8,)), w)).sum().backward()
    assert all(torch.equal(p.grad, x.grad) and torch.equal(q.grad, w.grad) for _, p, q in pairs)
    del pairs, loss, threads, thread
    assert alive() == {}
