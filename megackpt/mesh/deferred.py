"""A gradient sink that puts weight gradients off: what a zero-bubble schedule fills its gaps with.

A backward is two things: the gradient of the input, for which the stage before waits, and those of the weights, for
which nobody does.  A linear of ours hands the two factors of its weight gradient to a sink.  This one remembers them
and multiplies later, so that one autograd call makes the first half and the second is a loop over products: nothing is
replayed twice, and no graph is kept.  Each weight gets its products in the order in which they were put off.

What waits is the input of the layer and the gradient of its output, rebuilt or not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter

from megackpt.mesh.sink import GradientSink

Key = tuple[int, int]
"""(micro-batch, chunk)"""


class DeferredSink(GradientSink):
    """Hands everything to ``inner``, but weight gradients of a backward in `holding` only when `release` says so.

    ``at_once`` is for weights whose factors are too large to wait (logits); rows of embeddings never wait.
    """

    def __init__(self, inner: GradientSink) -> None:
        self.inner = inner
        self._waiting: dict[Key, deque[tuple[Parameter, Tensor, Tensor]]] = {}
        self._open: deque[tuple[Parameter, Tensor, Tensor]] | None = None

    @property
    def at_once(self) -> GradientSink:
        return self.inner.at_once

    @contextmanager
    def holding(self, key: Key) -> Iterator[None]:
        """Weight gradients that come within wait under ``key``."""
        self._open = self._waiting[key] = deque()
        try:
            yield
        finally:
            self._open = None

    @torch.no_grad()
    def release(self, key: Key) -> None:
        """Multiply what waits under ``key``, in order; each pair of factors is free as soon as it has been used.
        Nothing waits where nothing is trained."""
        waiting = self._waiting.pop(key, deque())
        while waiting:
            weight, grad_output, input = waiting.popleft()
            gradient = self.inner.weight_gradient(weight, grad_output, input)
            if gradient is not None:  # no autograd call is there to take it
                weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)

    def waiting_bytes(self) -> int:
        """Bytes of the factors that wait, each storage once."""
        factors = [t for queue in self._waiting.values() for _, *pair in queue for t in pair]
        return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in factors}.values())

    def clear(self) -> None:
        """Forget what waits, after a failure."""
        self._waiting.clear()

    def weight_gradient(self, weight: Parameter, grad_output: Tensor, input: Tensor) -> Tensor | None:
        if self._open is None:
            return self.inner.weight_gradient(weight, grad_output, input)
        self._open.append((weight, grad_output, input.detach()))  # else the graph behind it would wait too
        return None

    def row_gradient(self, weight: Parameter, rows: Tensor, grad: Tensor) -> Tensor | None:
        return self.inner.row_gradient(weight, rows, grad)
