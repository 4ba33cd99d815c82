"""The engine among PyTorch's own features: foreign hooks, torch's checkpoint, autocast, higher derivatives, torch.func.

`torch.utils.checkpoint` is the oracle: whatever it supports around or inside steps gives the same bits with them.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from megackpt.plan import ChunkPlan
from megackpt.recompute import KeptBytes, Tape, step
from tests.recompute.harness import (
    DROP_ALL,
    KEPT_OUTPUT,
    ONLY_OUTPUT,
    assert_equal,
    assert_same,
    drop,
    gradients,
    numbers,
    plan,
)
from tests.recompute.probes import Census

X, W = numbers(6, 8), numbers(8, 8, seed=2)
PLANS = {
    "kept": plan(),
    "all": DROP_ALL,
    "outputs": plan(ONLY_OUTPUT),
    "internals": plan(KEPT_OUTPUT),
    "norm-act": drop("norm", "act"),
    "outer": drop("outer"),
}


def block(x: Tensor, w: Tensor) -> Tensor:
    y = step("norm", lambda x: F.layer_norm(x, (8,)), x)
    z = step("up", F.linear, y, w)
    a = step("act", lambda z: F.gelu(F.dropout(z, 0.2)), z)
    return step("down", torch.matmul, a, w)


def nested(x: Tensor, w: Tensor) -> Tensor:
    return step("outer", block, x, w).sin()


def taped(body: Callable[[Tensor, Tensor], Tensor], chunk: ChunkPlan) -> Callable[[Tensor, Tensor], Tensor]:
    """As a function with a tape of its own, for others to wrap."""

    def run(x: Tensor, w: Tensor) -> Tensor:
        with Tape(chunk, account=KeptBytes()):
            return body(x, w)

    return run


# -- hooks of others -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANS)
def test_foreign_hooks_see_what_is_kept(name: str) -> None:
    """Hooks do not nest, so ours would hide others': every kept tensor and every kept input of a dropped step goes
    through them, parameters and what is rebuilt do not."""
    plain = gradients(nested, [X, W], None)
    packed: list[Tensor] = []
    unpacked: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        packed.append(tensor.detach().clone())  # as bytes somewhere else
        return len(packed) - 1

    def unpack(place: int) -> Tensor:
        unpacked.append(packed[place])
        return packed[place].clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        found = gradients(nested, [X, W], PLANS[name])
    assert_equal(found, plain)
    assert packed and unpacked
    kept = {tuple(t.shape) for t in packed}
    assert kept <= {(6, 8), (8, 8), (6, 1), (8,)}  # the leaves here are plain tensors, so weights are among them


def test_a_counting_hook_sees_every_kept_tensor() -> None:
    """As many as without us, where the plan keeps everything."""
    seen: list[int] = []
    for body in (nested, taped(nested, plan())):
        count = [0]

        def pack(tensor: Tensor, count: list[int] = count) -> Tensor:
            count[0] += 1
            return tensor

        x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            body(x, w)
        seen.append(count[0])
    assert seen[0] == seen[1] > 5


@pytest.mark.parametrize("name", PLANS)
def test_save_on_cpu_around(name: str) -> None:
    plain = gradients(nested, [X, W], None)
    with torch.autograd.graph.save_on_cpu():
        assert_equal(gradients(nested, [X, W], PLANS[name]), plain)


def test_hooks_inside_a_step() -> None:
    """What a step's own code hands to other hooks is theirs, in forward and in replay alike."""

    def inside(x: Tensor, w: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            y = (x @ w).sin()
        return y.exp() * y

    assert_same(lambda x, w: step("b", torch.tanh, step("a", inside, x, w)), [X, W], {"a": drop("a"), "all": DROP_ALL})


# -- torch.utils.checkpoint ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("name", PLANS)
def test_torch_checkpoint_around(name: str, reentrant: bool) -> None:
    run = taped(nested, PLANS[name])
    assert_same_as_plain(lambda x, w: checkpoint(run, x, w, use_reentrant=reentrant))


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("name", PLANS)
def test_torch_checkpoint_inside(name: str, reentrant: bool) -> None:
    def layer(x: Tensor, w: Tensor) -> Tensor:
        y = step("norm", lambda x: F.layer_norm(x, (8,)), x)
        inner = step("outer", lambda y, w: checkpoint(core, y, w, use_reentrant=reentrant), y, w)
        return step("act", F.gelu, inner)

    def core(y: Tensor, w: Tensor) -> Tensor:
        return torch.softmax(F.dropout(y @ w, 0.3), -1) @ w

    assert_same(layer, [X, W], PLANS[name])


def test_torch_checkpoint_inside_a_step_with_steps_inside_it() -> None:
    """Ours, torch's, ours: steps under a checkpoint in a dropped step."""

    def layer(x: Tensor, w: Tensor) -> Tensor:
        return step("outer", lambda x, w: checkpoint(block, x, w, use_reentrant=False), x, w).sin()

    for name, chunk in PLANS.items():
        try:
            assert_same(layer, [X, W], chunk)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def assert_same_as_plain(body: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert_equal(gradients(body, [X, W], None), gradients(nested, [X, W], None))


def test_checkpoint_around_steps_still_saves() -> None:
    """Without passing kept tensors on, everything inside stayed alive beside the checkpoint."""
    x, w = numbers(600, 8).requires_grad_(), torch.nn.Parameter(W)
    alive = []
    for run in (nested, taped(nested, plan()), taped(nested, drop("norm"))):
        with Census() as census:
            loss = checkpoint(run, x, w, use_reentrant=False).sum()
        alive.append(census.bytes)
        del loss
    assert alive[0] == alive[1] == alive[2]


# -- autocast --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(
    ("where", "cache"), list(itertools.product(("outside", "inside", "other-dtype", "thread"), (True, False)))
)
def test_autocast(name: str, where: str, cache: bool) -> None:
    """The replay runs under the forward's autocast, whoever calls backward and under what; RC-07: the cast weight is
    used outside the steps as well, so the forward's cast cache is warm and the replay's is not."""

    def run(chunk: ChunkPlan | None) -> list[Tensor]:
        x, w = X.clone().requires_grad_(), torch.nn.Parameter(W.clone())
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
            first = F.linear(x, w)
            body = nested if chunk is None else taped(nested, chunk)
            y = body(first.float(), w)
            loss = F.linear(y, w).float().sum() + first.float().sum()
            if where == "inside":
                loss.backward()
        if where == "outside":
            loss.backward()
        elif where == "other-dtype":
            with torch.autocast("cpu", dtype=torch.float16):
                loss.backward()
        elif where == "thread":
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        assert not torch.is_autocast_enabled("cpu")
        return [loss.detach(), x.grad, w.grad]  # type: ignore[list-item]

    assert_equal(run(PLANS[name]), run(None))


def test_a_step_that_turns_autocast_off_and_on() -> None:
    def mixed(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            y = x.float() @ w
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (y @ w).float().sin()

    assert_same(lambda x, w: step("a", mixed, x, w).exp(), [X, W], drop("a"))


# -- higher derivatives and other transforms -------------------------------------------------------------------------


def smooth(x: Tensor, w: Tensor) -> Tensor:
    y = step("norm", lambda x: F.layer_norm(x, (8,)), x)
    z = step("up", lambda y, w: F.linear(y, w).tanh(), y, w)
    return step("act", lambda z: z.exp() * z, z)


@pytest.mark.parametrize("name", PLANS)
def test_double_backward(name: str) -> None:
    """A gradient penalty: the gradient of the gradient's square."""

    def run(chunk: ChunkPlan | None) -> list[Tensor]:
        x, w = X.double().requires_grad_(), torch.nn.Parameter(W.double())
        y = smooth(x, w) if chunk is None else taped(smooth, chunk)(x, w)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (y.sum() + grad.square().sum()).backward()
        assert x.grad is not None and w.grad is not None
        return [grad.detach(), x.grad, w.grad]

    assert_equal(run(PLANS[name]), run(None))


def test_batched_gradients() -> None:
    """is_grads_batched runs one backward under vmap."""

    def run(chunk: ChunkPlan | None) -> Tensor:
        x = X.double().requires_grad_()
        w = torch.nn.Parameter(W.double())
        y = (smooth(x, w) if chunk is None else taped(smooth, chunk)(x, w)).sum(0)
        (rows,) = torch.autograd.grad(y, x, torch.eye(8, dtype=torch.float64), is_grads_batched=True)
        return rows

    assert torch.equal(run(DROP_ALL), run(None))


def test_torch_func_is_refused_with_a_sentence() -> None:
    x, w = X.clone(), W.clone()
    calls: list[Callable[[], Any]] = [
        lambda: torch.func.grad(lambda x: smooth(x, w).sum())(x),
        lambda: torch.func.vmap(lambda x: smooth(x, w))(x.unsqueeze(0)),
        lambda: torch.func.jvp(lambda x: smooth(x, w), (x,), (x,)),
    ]
    for call in calls:
        with Tape(DROP_ALL), pytest.raises(RuntimeError, match="norm: torch.func transforms"):
            call()
        call()  # fine without a tape
        with Tape(plan()):
            call()  # and where the plan drops nothing


def test_forward_mode_is_refused_with_a_sentence() -> None:
    x, w = X.clone().requires_grad_(), W.clone()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with Tape(DROP_ALL), pytest.raises(RuntimeError, match="norm: an input carries a forward-mode tangent"):
            smooth(dual, w)
        with Tape(DROP_ALL):  # a level alone, without a tangent, is nobody's problem
            smooth(x, w).sum().backward()


def test_anomaly_mode() -> None:
    with torch.autograd.detect_anomaly(check_nan=True):
        assert_same(nested, [X, W], DROP_ALL)


def test_tensor_hooks_fire_once() -> None:
    """Registered in a replay as well, but only the forward's graph runs."""
    fired: list[str] = []

    def hooked(x: Tensor) -> Tensor:
        y = x.exp()
        y.register_hook(lambda grad: fired.append("hook"))
        return y.sin()

    x = X.clone().requires_grad_()
    with Tape(drop("a")):
        loss = step("a", hooked, x).sum()
    loss.backward()
    assert fired == ["hook"]


def test_custom_function_in_a_step_saves_through_the_same_door() -> None:
    class Cube(torch.autograd.Function):
        runs = 0

        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            Cube.runs += 1
            square = x * x
            ctx.save_for_backward(x, square, w)
            return square * x * w

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            x, square, w = ctx.saved_tensors
            return grad * 3 * square * w, grad * square * x

    assert_same(lambda x, w: step("a", Cube.apply, x, w[:6]) + x, [X, W], {"all": drop("a"), "kept": plan()})
    assert Cube.runs == 4  # plain; forward and replay; kept
