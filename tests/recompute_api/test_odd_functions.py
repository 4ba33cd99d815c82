"""Functions that nobody planned for: values, gradients, buffers and random states are those without recompute."""

from __future__ import annotations

import functools
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megackpt.plan import ChunkPlan, Decision, SaveSet
from megackpt.recompute import RngLedger, Stream, Tape, checkpoint, step
from megackpt.recompute.context import LIVE, state
from tests.recompute_api.odd import WAYS, Call, Found, Use, after, assert_equal, run, values
from tests.recompute_api.oracle import plainly

USES: list[Use] = []


def use(fn: Use) -> Use:
    USES.append(fn)
    return fn


# -- random numbers --------------------------------------------------------------------------------------------------


@use
def generator_as_argument(call: Call) -> Found:
    x, generator = values(4, 5), torch.Generator().manual_seed(3)
    y = call(lambda x, g: (x * torch.rand(4, 5, generator=g)).exp(), x, generator)
    torch.rand(3, generator=generator)
    return [*after(y.sum(), x), generator.get_state()]


@use
def generator_by_keyword_in_a_dict(call: Call) -> Found:
    x, generator = values(4, 5), torch.Generator().manual_seed(3)
    y = call(lambda x, *, o: (x * torch.rand(4, 5, generator=o["g"])).exp(), x, o={"g": generator})
    return [*after(y.sum(), x), generator.get_state()]


@use
def stream_as_argument(call: Call) -> Found:
    x, stream = values(4, 5), Stream("of the caller", 3)
    y = call(lambda x, s: (x * torch.rand(4, 5, generator=s.draw())).exp(), x, stream)
    stream.draw()
    return [*after(y.sum(), x), torch.tensor(stream.position)]


@use
def drawn_and_put_back(call: Call) -> Found:
    x = values(40)

    def forked(x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            return F.dropout(x, 0.5).exp()

    y = call(forked, x)
    torch.rand(3)
    return after(y.sum(), x)


@use
def seeded_inside(call: Call) -> Found:
    x = values(40)

    def seeded(x: Tensor) -> Tensor:
        torch.manual_seed(5)
        return F.dropout(x, 0.5).exp()

    return [*after(call(seeded, x).sum(), x), torch.rand(2)]


@use
def drawn_in_backward(call: Call) -> Found:
    x = values(8)

    def noisy(x: Tensor) -> Tensor:
        y = x.sin()
        y.register_hook(lambda g: g * torch.rand_like(g))
        return F.dropout(y, 0.4).exp()

    return after(call(noisy, call(noisy, x)).sum(), x)


@use
def graphs_that_end_in_another_order(call: Call) -> Found:
    x = values(40)
    first = call(lambda x: F.dropout(x, 0.5).exp(), x)
    second = call(lambda x: F.dropout(x, 0.5).sin().exp(), x)
    return after(second.sum(), x) + after(first.sum(), x)


# -- how the function is written -------------------------------------------------------------------------------------


@use
def a_partial_with_a_tensor(call: Call) -> Found:
    x, w = values(4), values(4, seed=2)
    return after(call(functools.partial(lambda w, x, power: (x * w).sin() ** power, w, power=3), x).sum(), x, w)


@use
def a_module_that_keeps_what_it_made(call: Call) -> Found:
    class Keeps(nn.Linear):
        hidden: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.hidden = super().forward(x).tanh()
            return self.hidden.sin()

    torch.manual_seed(1)
    module, x = Keeps(4, 4), values(3, 4)
    y = call(module, x)
    return after(y.sum() + module.hidden.pow(2).sum(), x, *module.parameters())


@use
def whoever_catches_everything(call: Call) -> Found:
    """The end of a replay is an exception, and this function has other plans for it."""
    x = values(4)

    def stubborn(x: Tensor) -> Tensor:
        y = x.sin()
        try:
            y = y.exp() * 2
        finally:
            return y.cos() + 1  # noqa: B012

    return after(call(stubborn, x).sum(), x)


@use
def script(call: Call) -> Found:
    """The interpreter of TorchScript makes an exception of its own of everything that passes through it."""
    scripted = torch.jit.script(_Scripted())  # type: ignore[no-untyped-call]
    x = values(4)
    for _ in range(3):  # until its executor has settled on a graph
        scripted(x).sum().backward()
    return after(call(lambda x: scripted(x) + 1, x).sum(), x)


class _Scripted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x.sin() * x).exp() + 1


@use
def threads_inside(call: Call) -> Found:
    x, w = values(4), values(4, seed=2)

    def parallel(x: Tensor, w: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            (a,) = pool.map(lambda q: (q.sin() * q).exp(), [x])
        return (a * w).sin()

    return after(call(parallel, x, w).sum(), x, w)


@use
def a_list_that_it_empties(call: Call) -> Found:
    x = values(4)
    return after(call(lambda both: (both.pop().sin() * both[0]).exp(), [x, x * 2]).sum(), x)


@use
def an_object_that_nobody_can_look_into(call: Call) -> Found:
    x = values(4)
    box = call(lambda b: types.SimpleNamespace(t=b.t.sin().exp()), types.SimpleNamespace(t=x))
    return after((box.t * box.t).sum(), x)


@use
def transforms_inside(call: Call) -> Found:
    x = values(4, 3)
    return after(call(lambda x: torch.func.vmap(lambda row: row.sin() * row.sum())(x).exp(), x).sum(), x)


@use
def no_grad_inside(call: Call) -> Found:
    x = values(4)

    def scaled(x: Tensor) -> Tensor:
        with torch.no_grad():
            largest = x.exp().max()
        return (x / largest).exp()

    return after(call(scaled, x).sum(), x)


@use
def a_backward_inside_a_backward(call: Call) -> Found:
    x, z = values(4), values(4, seed=4)

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            with torch.enable_grad():
                w = z.detach().requires_grad_()
                call(lambda w: F.dropout(w, 0.5).sin().exp(), w).sum().backward()
            assert w.grad is not None
            return grad * w.grad

    return after(call(lambda x: Inner.apply(x.sin()).exp(), x).sum(), x)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("of", USES, ids=lambda fn: fn.__name__)
def test_it_is_as_without_recompute(of: Use, way: str) -> None:
    assert_equal(run(of, WAYS[way]), run(of, plainly))


@pytest.mark.parametrize("way", WAYS)
def test_where_hooks_are_forbidden_it_fails_and_leaves_nothing(way: str) -> None:
    x = values(4)
    with (
        pytest.raises(RuntimeError, match="none here"),
        torch.autograd.graph.disable_saved_tensors_hooks("none here"),
    ):
        WAYS[way](torch.sin, x)
    now = state.now
    assert (now.tape, now.frame, now.inner) == (None, None, LIVE)


def test_a_step_may_write_into_what_it_saved_if_autograd_saved_it_before() -> None:
    """The saved value is rebuilt as it was; plain autograd refuses.  One that is written to and then saved, and then
    written to again at the very end, is refused by both."""
    x = values(4)
    y = checkpoint(lambda x: x.exp().mul_(2), x)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], 2 * x.detach().exp())

    def late(x: Tensor) -> Tensor:
        y = x.sin().mul_(2)
        z = y.sin()
        y.add_(1)
        return z.sin()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        checkpoint(late, x).sum().backward()


def test_streams_that_the_ledger_knows_may_be_given_too() -> None:
    """Then both put it back."""
    ledger = RngLedger(defaults=False)
    stream = ledger.register(Stream("s", 3))
    x = values(6)

    def noisy(x: Tensor, s: Stream) -> Tensor:
        return (x * torch.rand(6, generator=s.draw())).exp()

    with Tape(ChunkPlan({"": SaveSet({}, Decision("keep", "replay"))}), ledger):
        y = step("a", noisy, x, stream)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    noise = torch.rand(6, generator=stream.at(0))
    assert torch.equal(gradient, (noise * (x * noise).exp()).detach()) and stream.position == 1
