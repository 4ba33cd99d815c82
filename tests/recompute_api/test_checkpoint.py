"""`checkpoint` keeps the calling convention and the guarantees of torch's non-reentrant one, which is the oracle:
arguments and results of every kind."""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from megackpt.recompute import checkpoint
from tests.recompute_api.oracle import Saved, assert_same, by_torch

Call = Callable[..., Any]


def test_a_network_with_dropout(net: nn.Sequential, x: Tensor) -> None:
    assert_same(lambda call: call(net, call(net, x)).pow(2).sum(), [x, *net.parameters()])


def test_what_is_saved_is_the_input_alone(net: nn.Sequential, x: Tensor) -> None:
    saved = []
    for call in (checkpoint, by_torch):
        with Saved(list(net.parameters())) as counter:
            call(net, x)
        saved.append(counter.bytes)
    assert saved == [4 * 8 * 4, 4 * 8 * 4]


class Pair(NamedTuple):
    first: Tensor
    second: Tensor | None


@dataclass(frozen=True)
class Batch:
    tokens: Tensor
    mask: Tensor | None
    scale: float
    inner: list[Tensor] = field(default_factory=list)


@dataclass
class Result:
    value: Tensor
    extra: dict[str, Any]


class TestArguments:
    """Cases RC-03, AR-02, AR-04, AR-06 and their relatives."""

    def test_by_keyword(self, x: Tensor) -> None:
        y = torch.randn(4, 8, requires_grad=True)

        def fn(a: Tensor, *, extra: Tensor, power: int, note: str | None = None) -> Tensor:
            return (a * extra).sin().pow(power)

        assert_same(lambda call: call(fn, x, extra=y, power=3, note="n").sum(), [x, y])

    def test_only_by_keyword(self, x: Tensor) -> None:
        assert_same(lambda call: call(lambda *, a: a.exp().sin(), a=x).sum(), [x])

    def test_none_and_values(self, x: Tensor) -> None:
        def fn(a: Tensor, mask: None, past: None, n: int, name: str, flag: bool) -> tuple[Tensor, None, int]:
            return a.exp().sin() * n, past, n

        def loss(call: Call) -> Tensor:
            out, past, n = call(fn, x, None, None, 3, "relu", True)
            assert past is None and n == 3
            return out.sum()

        assert_same(loss, [x])

    @pytest.mark.parametrize("kind", ["list", "dict", "ordered", "named", "deep"])
    def test_nested(self, x: Tensor, kind: str) -> None:
        y = torch.randn(4, 8, requires_grad=True)
        values: dict[str, Any] = {
            "list": [x, y], "dict": {"a": x, "b": y}, "ordered": OrderedDict(a=x, b=y), "named": Pair(x, y),
            "deep": [{"k": (x, [y, None, 1])}],
        }  # fmt: skip

        def fn(value: Any) -> Any:
            tensors = [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, Tensor)]
            assert type(value) is type(values[kind])
            return {"out": [(tensors[0] * tensors[1]).sin()], "n": 2}

        assert_same(lambda call: call(fn, values[kind])["out"][0].sum(), [x, y])

    def test_dataclasses_in_and_out(self, x: Tensor) -> None:
        y, z = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)

        def fn(batch: Batch) -> Result:
            assert batch.mask is None and batch.scale == 2.0
            return Result((batch.tokens * batch.inner[0]).sin() * batch.scale, {"twice": [batch.inner[1].exp().cos()]})

        def loss(call: Call) -> Tensor:
            result = call(fn, Batch(x * 1, None, 2.0, [y * 2, z]))
            return (result.value * result.extra["twice"][0]).sum()

        assert_same(loss, [x, y, z])

    def test_a_dataclass_is_held_as_its_tensors(self, x: Tensor) -> None:
        """Its tensors are kept as any input is: an in-place change after the forward is an error, not a wrong
        gradient."""
        hidden = x.detach() * 1
        out = checkpoint(lambda b: (b.tokens * x).sin(), Batch(hidden, None, 1.0))
        hidden.add_(1)
        with pytest.raises(RuntimeError, match="inplace"):
            out.sum().backward()

    def test_inputs_that_need_no_gradient(self, net: nn.Sequential) -> None:
        """AR-01: parameters of a region whose inputs are constants get gradients."""
        constant = torch.randn(4, 8)
        assert_same(lambda call: call(net, constant).pow(2).sum(), list(net.parameters()))

    def test_outputs_of_other_types(self, x: Tensor) -> None:
        """AR-06: a mask and ids come out beside the values."""
        def fn(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return a.sin().exp(), a > 0, a.argsort()

        def loss(call: Call) -> Tensor:
            value, mask, order = call(fn, x)
            assert mask.dtype == torch.bool and order.dtype == torch.int64
            return (value.gather(1, order) * mask).sum()

        assert_same(loss, [x])

    def test_integer_and_boolean_inputs(self) -> None:
        table = torch.randn(5, 8, requires_grad=True)
        ids, mask = torch.tensor([0, 3, 3]), torch.tensor([True, False, True])
        assert_same(lambda call: call(lambda t, i, m: t[i].sin().exp()[m], table, ids, mask).sum(), [table])

    def test_one_tensor_twice(self, x: Tensor) -> None:
        assert_same(lambda call: call(lambda a, b: (a * b).sin(), x, x).sum(), [x])
