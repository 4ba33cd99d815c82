"""What autograd computes arrives in the flat buffer, once, in the right place and in the wide format."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megackpt.mesh.sink import AutogradSink, GradientSink
from megackpt.optim import GradientBuffer
from megackpt.tensor.linear import linear
from tests.optim.helpers import buffer_of, draw, record


class Toy(torch.nn.Module):
    """Tied embedding (lookup and head), a gated linear, a norm weight; one parameter is never used."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.word = Parameter(draw(11, 6, seed=1, dtype=dtype))
        self.norm = Parameter(draw(6, seed=2, dtype=dtype))
        self.up = Parameter(draw(2, 3, 6, seed=3, dtype=dtype))
        self.unused = Parameter(draw(5, seed=4, dtype=dtype))

    def forward(self, ids: Tensor, sink: GradientSink) -> Tensor:
        x = F.embedding(ids, self.word) * self.norm
        gate, value = linear(x, self.up, None, sink).chunk(2, -1)
        mixed = torch.cat([gate * value, x[:, :3]], -1)
        return linear(mixed, self.word, None, sink).square().mean()


def pairs_of(toy: Toy) -> list[tuple[Parameter, Any]]:
    partial = {"norm": True, "unused": True}
    return [(p, record(n, p, partial_under_sp=partial.get(n, False))) for n, p in toy.named_parameters()]


def accumulate(toy: Toy, sink: GradientSink, micro_batches: int) -> None:
    for seed in range(micro_batches):
        ids = torch.randint(11, (7,), generator=torch.Generator().manual_seed(seed))
        toy(ids, sink).backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_equal_autograd_also_for_tied_and_unused_parameters(dtype: torch.dtype) -> None:
    plain, ours = Toy(dtype), Toy(dtype)
    accumulate(plain, AutogradSink(), 3)
    buffer = GradientBuffer()
    buffer.attach(pairs_of(ours))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t):
        accumulate(ours, buffer, 3)  # the sink still knows the parameter
    got = buffer.gradients()
    tolerance = 1e-6 if dtype == torch.float32 else 1e-14
    for name, parameter in plain.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(got[name], expected, rtol=tolerance, atol=0)
    assert not got["unused"].any()
    assert all(p.grad is None for p in ours.parameters())
    buffer.zero_()
    assert not any(g.any() for g in got.values())


def test_layout_is_the_order_of_a_backward_and_partial_gradients_are_last() -> None:
    buffer = GradientBuffer()
    buffer.attach(pairs_of(Toy(torch.float32)))
    assert [entry.record.name for entry in buffer.entries] == ["up", "word", "unused", "norm"]
    assert [entry.bucket for entry in buffer.entries] == [0, 0, 1, 1]
    assert [bucket.numel() for bucket in buffer.buckets] == [48 + 80, 16 + 16]  # 36, 66, 5 and 6, filled up to 16
    assert buffer.flat.shape == (160,) and buffer.partial(True).shape == (32,)
    buffer.flat.copy_(torch.arange(160.0))
    got = buffer.gradients()
    assert got["up"][1, 2, 5] == 35 and got["word"][0, 0] == 48 and got["unused"][0] == buffer.partial(True)[0] == 128
    assert got["norm"][-1] == buffer.partial(True)[21] == 149


@pytest.mark.parametrize(("partial", "size"), [(False, 0), (True, 16)])
def test_partial_slice_when_no_or_every_parameter_is_partial(partial: bool, size: int) -> None:
    buffer = buffer_of({"a": torch.zeros(3)}, a={"partial_under_sp": partial})
    assert (buffer.partial(True).numel(), buffer.partial(False).numel()) == (size, 0)


def test_what_is_partial_without_sequence_parallelism_stands_last() -> None:
    names = {name: torch.zeros(3) for name in "abc"}
    buffer = buffer_of(names, b={"partial": True}, c={"partial_under_sp": True})
    assert [entry.record.name for entry in buffer.entries] == ["a", "c", "b"]
    assert (buffer.partial(True).numel(), buffer.partial(False).numel()) == (32, 16)


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float32, ["t.default", "addmm_.default"]),  # no temporary of the weight's size
        (torch.bfloat16, ["t.default", "new_empty.default", "mm.out", "add_.Tensor"]),
    ],
)
def test_operations_of_a_weight_gradient(dtype: torch.dtype, expected: list[str]) -> None:
    buffer = buffer_of({"w": draw(4, 6, seed=0, dtype=dtype)})
    grad, x = draw(8, 4, seed=1, dtype=dtype), draw(8, 6, seed=2, dtype=dtype)
    with torch.no_grad(), Operations() as operations:
        assert buffer.weight_gradient(buffer.entries[0].parameter, grad, x) is None
    views = ("slice.Tensor", "view.default")
    assert [name for name in operations.names if name not in views] == expected
    torch.testing.assert_close(buffer.gradients()["w"], (grad.t() @ x).float())


@pytest.mark.parametrize("through", ["hook", "sink"])
def test_sum_of_64_small_bf16_gradients_is_an_fp32_sum(through: str) -> None:  # MP-06
    """A bf16 sum stops growing at 256 times its term: it cannot hold 1 + 63 * 1e-3."""
    buffer = buffer_of({"w": torch.zeros(2, 3, dtype=torch.bfloat16)})
    weight = buffer.entries[0].parameter
    terms = [1.0] + [1e-3] * 63
    for term in terms:
        factor = torch.full((1, 3), term, dtype=torch.bfloat16)
        if through == "sink":
            buffer.weight_gradient(weight, torch.ones(1, 2, dtype=torch.bfloat16), factor)
        else:
            (weight * factor).sum().backward()
    exact = sum(torch.tensor(terms, dtype=torch.bfloat16).double().tolist())
    assert buffer.flat.dtype == torch.float32
    torch.testing.assert_close(
        buffer.gradients()["w"].double(), torch.full((2, 3), exact, dtype=torch.float64), rtol=1e-6, atol=0
    )


def test_before_attach_after_detach_and_for_foreign_weights_autograd_gets_the_gradient() -> None:
    buffer, weight = GradientBuffer(), Parameter(torch.ones(2, 3))
    grad, x = torch.ones(4, 2), torch.ones(4, 3)
    assert torch.equal(buffer.weight_gradient(weight, grad, x), torch.full((2, 3), 4.0))
    buffer.attach([(weight, record("w", weight))])
    assert buffer.weight_gradient(weight, grad, x) is None
    assert buffer.weight_gradient(Parameter(torch.ones(2, 3)), grad, x) is not None
    buffer.detach()
    weight.sum().backward()
    assert torch.equal(weight.grad, torch.ones(2, 3))
    assert torch.equal(buffer.gradients()["w"], torch.full((2, 3), 4.0))


def test_frozen_parameters_are_left_out() -> None:
    frozen = Parameter(torch.ones(2), requires_grad=False)
    buffer = GradientBuffer()
    buffer.attach([(frozen, record("frozen", frozen))])
    assert buffer.entries == () and buffer.flat.numel() == 0


def test_refusals_name_the_parameter() -> None:
    a, b = Parameter(torch.ones(2)), Parameter(torch.ones(2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"parameter b is torch.float64 on cpu, but a is torch.float32"):
        GradientBuffer().attach([(a, record("a", a)), (b, record("b", b))])
    for again in (record("a", a), record("other", a)):
        with pytest.raises(ValueError, match=f"parameter {again.name} is given twice"):
            GradientBuffer().attach([(a, record("a", a)), (a, again)])
    buffer = buffer_of({"a": torch.ones(2)})
    with pytest.raises(ValueError, match="already holds the gradients of 1 parameters"):
        buffer.attach([(a, record("a", a))])
