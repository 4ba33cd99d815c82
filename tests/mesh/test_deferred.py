"""Weight gradients put off: who gets them, in which order, and what waits."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import Tensor
from torch.nn import Parameter

from megackpt.mesh.deferred import DeferredSink
from megackpt.mesh.sink import AutogradSink, GradientSink
from megackpt.tensor.linear import linear


class Logged(GradientSink):
    def __init__(self) -> None:
        self.got: list[tuple[int, float]] = []

    def weight_gradient(self, weight: Parameter, grad_output: Tensor, input: Tensor) -> Tensor | None:
        assert not torch.is_grad_enabled()
        self.got.append((id(weight), float(input.sum())))
        return None


def test_contributions_come_in_order_when_they_are_asked_for() -> None:
    inner = Logged()
    sink = DeferredSink(inner)
    first, second = (Parameter(torch.eye(2) * k) for k in (2, 3))
    for m in range(2):
        x = torch.full((5, 2), float(m + 1), requires_grad=True)
        with sink.holding((m, 0)):
            linear(linear(x, first, None, sink), second, None, sink).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 6.0)) and not inner.got  # type: ignore[arg-type]
    sink.release((0, 0))
    assert inner.got == [(id(second), 20.0), (id(first), 10.0)]
    sink.release((1, 0))
    assert inner.got[2:] == [(id(second), 40.0), (id(first), 20.0)]
    assert sink.waiting_bytes() == 0


def test_outside_of_a_held_backward_nothing_waits() -> None:
    inner = Logged()
    sink = DeferredSink(inner)
    weight = Parameter(torch.ones(2, 2))
    linear(torch.ones(3, 2, requires_grad=True), weight, None, sink).sum().backward()
    with sink.holding((0, 0)):
        linear(torch.ones(3, 2, requires_grad=True), weight, None, sink.at_once).sum().backward()
    assert len(inner.got) == 2
    assert inner.at_once is inner and sink.at_once is inner


def test_a_gradient_that_nobody_consumes_ends_in_the_parameter() -> None:
    sink = DeferredSink(AutogradSink())
    weight = Parameter(torch.ones(2, 2))
    for m in range(2):
        with sink.holding((m, 0)):
            linear(torch.ones(3, 2, requires_grad=True), weight, None, sink).sum().backward()
        assert weight.grad is None or m
        sink.release((m, 0))
    assert torch.equal(weight.grad, torch.full((2, 2), 6.0))  # type: ignore[arg-type]


def test_only_the_two_factors_wait_and_no_graph() -> None:
    sink = DeferredSink(Logged())
    weight = Parameter(torch.ones(4, 2))
    earlier = torch.ones(3, 2, requires_grad=True).sin()
    x = earlier.cos()  # its node saves `earlier`
    saved = weakref.ref(earlier.untyped_storage())
    with sink.holding((0, 0)):
        linear(x, weight, None, sink).square().sum().backward()
    del x, earlier
    gc.collect()
    assert saved() is None
    assert sink.waiting_bytes() == (3 * 2 + 3 * 4) * 4
    sink.clear()
    assert sink.waiting_bytes() == 0
