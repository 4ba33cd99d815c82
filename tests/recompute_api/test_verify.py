"""Verify mode: four planted faults, four right causes; without a fault it changes nothing."""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megackpt.plan import ChunkPlan, Decision, SaveSet
from megackpt.plan.decision import REPLAY_ALL
from megackpt.recompute import ReplayError, RngLedger, Stream, Tape, VerifyError, at, checkpoint, dropout, step
from megackpt.recompute.trace import digest
from megackpt.recompute.verify import DTYPE, KERNEL, RNG, STATE

OUTPUTS = SaveSet({"last": Decision("keep", "replay")}, REPLAY_ALL)
PLAN = ChunkPlan({"layers.3": OUTPUTS, "": OUTPUTS})


def graph(fn: Callable[[Tensor], Tensor], ledger: RngLedger | None = None) -> tuple[Tensor, Tensor]:
    """A layer of two dropped steps, the second of them ``fn``; returns its input and the loss."""
    x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    with Tape(PLAN, ledger, verify=True):
        layer = at("layers.3")
        h = layer("norm", lambda a: F.layer_norm(a, (8,)), x)
        loss = layer("last", lambda a: fn(a).pow(3).sum(), layer("attn.core", fn, h))
    return x, loss


def failure(loss: Tensor) -> VerifyError:
    with pytest.raises(VerifyError) as caught:
        loss.backward()
    assert isinstance(caught.value, ReplayError)
    return caught.value


def test_an_unregistered_generator() -> None:
    generator = torch.Generator().manual_seed(1)
    _, loss = graph(lambda a: a * torch.rand(a.shape, generator=generator))
    error = failure(loss)
    assert error.cause == RNG and error.where == "layers.3 attn.core"
    assert error.tensor.startswith("saved tensor 0 (shape (4, 8), torch.float32, result of aten.rand")
    assert "aten.rand" in str(error) and "a generator given to it" in str(error)


def test_a_default_generator_that_is_left_out() -> None:
    _, loss = graph(lambda a: F.dropout(a, 0.5), RngLedger(defaults=False))
    error = failure(loss)
    assert error.cause == RNG and "torch's default generator" in str(error)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.linspace(0, 1, 8))
        self.register_buffer("factor", torch.linspace(1, 2, 8))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.bias).sin() * self.factor


@pytest.mark.parametrize("fault", ["parameter bias", "buffer factor", "captured tensor shift", "argument 0", "value"])
def test_state_changed_in_between(fault: str) -> None:
    """Through ``.data``: nothing but the digest can see it."""
    module, shift, power = Scale(), torch.ones(8), [2.0]
    held: list[Tensor] = []

    def fn(a: Tensor) -> Tensor:
        return module((a + shift).cos() * power[0])

    def first(a: Tensor) -> Tensor:
        held.append(a)
        return a

    x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    with Tape(PLAN, verify=True):
        loss = at("layers.3")("attn.core", fn, first(x * 1)).sum()
    if fault == "value":
        power[0] = 3.0
    else:
        tensors = {
            "parameter bias": module.bias, "buffer factor": module.factor, "captured tensor shift": shift,
            "argument 0": held[0],
        }  # fmt: skip
        tensors[fault].data.add_(0.5)
    error = failure(loss)
    assert error.cause == STATE and error.where == "layers.3 attn.core"
    assert ("3.0" in str(error) and "2.0" in str(error)) if fault == "value" else fault in str(error)


def test_other_operations_are_a_changed_state() -> None:
    wide = [True]
    _, loss = graph(lambda a: (a.sin() if wide[0] else a.cos()) * 2)
    wide[0] = False
    error = failure(loss)
    assert error.cause == STATE and "aten.cos.default ran where aten.sin.default had run" in str(error)


def test_autocast_or_dtype() -> None:
    low = [True]
    weight = nn.Parameter(torch.linspace(-1, 1, 64).view(8, 8))

    def fn(a: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=low[0]):
            return F.linear(a, weight).float().sin()

    _, loss = graph(fn)
    low[0] = False
    error = failure(loss)
    assert error.cause == DTYPE and "torch.float32" in str(error) and "torch.bfloat16" in str(error)


def test_a_default_type_that_changed() -> None:
    _, loss = graph(lambda a: a.sin() * torch.ones(()) * 2)
    torch.set_default_dtype(torch.float64)
    error = failure(loss)
    assert error.cause == DTYPE and "default dtype torch.float32 then, torch.float64 now" in str(error)


@torch.library.custom_op("megackpt_test::restless", mutates_args=())
def restless(x: Tensor) -> Tensor:
    """A kernel that gives other bits each time, and draws from no generator of torch."""
    restless.calls += 1  # type: ignore[attr-defined]
    return x * (1 + 1e-6 * restless.calls)  # type: ignore[attr-defined]


restless.calls = 0  # type: ignore[attr-defined]
restless.register_autograd(lambda ctx, grad: grad)


def test_a_kernel_that_is_not_deterministic() -> None:
    _, loss = graph(lambda a: restless(a).sin())
    error = failure(loss)
    assert error.cause == KERNEL
    assert "megackpt_test.restless" in str(error) and "two replays in a row differ as well" in str(error)


def test_a_shape_that_changed_is_explained() -> None:
    keep = torch.tensor([1, 1, 0, 1])
    x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    with Tape(PLAN, verify=True):
        loss = step("last", lambda a: a[keep.nonzero().flatten()].exp().sin().sum(), x)
    keep.data[0] = 0
    error = failure(loss)
    assert error.cause == STATE and "captured tensor keep" in str(error)
    assert "(shape (3,), torch.int64; the replay's is shape (2,), torch.int64)" in str(error)


def test_an_exception_in_the_replay_is_explained() -> None:
    size = [8]
    _, loss = graph(lambda a: (a + torch.ones(size[0])).sin())
    size[0] = 7
    error = failure(loss)
    assert error.cause == STATE and "RuntimeError" in str(error) and "aten.ones" in str(error)


def test_inside_checkpoint() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.linspace(-1, 1, 8).requires_grad_()
    with Tape(ChunkPlan(), verify=True):
        loss = checkpoint(lambda a: (a * torch.rand(8, generator=generator)).sin().sum(), x)
    error = failure(loss)
    assert error.cause == RNG and error.where.startswith("checkpoint(")


@pytest.mark.parametrize("autocast", [False, True])
def test_a_sound_run_is_left_alone(autocast: bool) -> None:
    """Same loss, gradients and random states; dropout of both kinds, BatchNorm, nesting, autocast's weight cache."""
    torch.manual_seed(3)
    linear, norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def run(plan: ChunkPlan, verify: bool) -> list[Tensor]:
        torch.manual_seed(1)
        norm.reset_running_stats()
        ledger = RngLedger()
        stream = ledger.register(Stream("tensor", 2))

        def fn(a: Tensor) -> Tensor:
            return dropout(F.dropout(linear(norm(checkpoint(linear, a).sin())), 0.3), 0.3, stream)

        x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), Tape(plan, ledger, verify=verify):
            loss = step("last", lambda a: fn(a).float().pow(2).sum(), step("first", fn, x))
        gradients = torch.autograd.grad(loss, [x, *linear.parameters(), *norm.parameters()])
        return [loss, *gradients, torch.get_rng_state(), torch.tensor(stream.position), norm.running_mean]

    plain, verified = run(ChunkPlan(), False), run(PLAN, True)
    assert all(torch.equal(a, b) for a, b in zip(plain, verified, strict=True))


def test_a_single_element_of_any_stride() -> None:
    """It counts as contiguous, and has a digest as any other: the labels of a loss that is computed token by token."""
    ids = torch.arange(12).view(3, 4).t()[1:2]  # [1, 3], stride (1, 4)
    x = torch.linspace(-1, 1, 8).requires_grad_()
    with Tape(PLAN, verify=True):
        loss = step("last", lambda a, i: (a[i] * a.sum()).exp().sum(), x, ids[:, 1:2].t())
    loss.backward()
    assert digest(ids) == digest(ids.contiguous()) and digest(ids[:, 1:2]) == digest(torch.tensor([5]))
