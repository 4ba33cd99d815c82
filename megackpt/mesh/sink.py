"""The gradient sink: where our linear layers hand their weight gradients.

A weight gradient is a product of its own, grad_output^T x input. Who receives it decides what happens: autograd's
`.grad` (the default here), one flat fp32 buffer that the product adds into without a temporary, or a queue that
postpones the product. The layer knows none of that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor
from torch.nn import Parameter


class GradientSink(ABC):
    """Receives weight gradients as their two factors."""

    @abstractmethod
    def weight_gradient(self, weight: Parameter, grad_output: Tensor, input: Tensor) -> Tensor | None:
        """Take the gradient of `weight`.

        `weight` is [out, in] or, for gated layers, [2, out/2, in]; `grad_output` is [rows, out], `input` [rows, in],
        neither to be modified. Returns the gradient shaped like `weight` for autograd, or None if it was consumed.
        """

    @property
    def at_once(self) -> GradientSink:
        """The sink for a weight gradient that must not wait, because its factors are large; this one, if none waits
        here.
        """
        return self

    def row_gradient(self, weight: Parameter, rows: Tensor, grad: Tensor) -> Tensor | None:
        """Take the gradient of an embedding: each line of `grad` [n, h] belongs to the row of `weight` [V, h] that
        `rows` [n] names; a row named twice gets the sum. Returns as `weight_gradient` does.

        `index_add_` is an ordered sum on a CPU and, with deterministic algorithms switched on, on a GPU.
        """
        return grad.new_zeros(weight.shape).index_add_(0, rows, grad)


class AutogradSink(GradientSink):
    """Leaves the gradient to autograd: it ends in `weight.grad`."""

    def weight_gradient(self, weight: Parameter, grad_output: Tensor, input: Tensor) -> Tensor | None:
        return (grad_output.t() @ input).view(weight.shape)
