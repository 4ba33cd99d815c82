"""The vocabulary embedding with its rows split over the tp axis.

Letters: s sequence, b micro-batch, h hidden, V padded vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import Module, Parameter

from megackpt.mesh.process_mesh import Axis
from megackpt.mesh.sink import GradientSink
from megackpt.tensor.context import TensorParallel
from megackpt.tensor.parameters import new_parameter


class _Lookup(Function):
    """Rows of this shard for the ids that fall into it, zeros for the others. Saves the ids as passed, 8sb bytes."""

    @staticmethod
    def forward(ctx: Any, weight: Parameter, ids: Tensor, axis: Axis, sink: GradientSink) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.axis, ctx.sink = weight, axis, sink
        local, foreign = _localise(ids, weight.shape[0], axis)
        out = F.embedding(local, weight)
        return out if foreign is None else out.masked_fill_(foreign, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        (ids,) = ctx.saved_tensors
        local, foreign = _localise(ids, ctx.weight.shape[0], ctx.axis)
        if foreign is not None:
            grad = grad.masked_fill(foreign, 0.0)
        lines = grad.reshape(-1, grad.shape[-1])
        return ctx.sink.row_gradient(ctx.weight, local.reshape(-1), lines), None, None, None


def _localise(ids: Tensor, rows: int, axis: Axis) -> tuple[Tensor, Tensor | None]:
    """Ids as rows of this shard (0 for foreign ones), and which of them are foreign [..., 1]; None: none can be."""
    if axis.size == 1:
        return ids, None
    local = ids - axis.index * rows
    foreign = (local < 0) | (local >= rows)
    return local.masked_fill_(foreign, 0), foreign.unsqueeze(-1)


class VocabEmbedding(Module):
    """weight [V/t, h]; ids [...] -> [..., h], a partial sum over the tp axis that a reduction of its own completes."""

    def __init__(
        self,
        tp: TensorParallel,
        padded_vocab: int,
        hidden_size: int,
        *,
        name: str,
        std: float | None,
        valid_vocab: int | None = None,
        tied: bool = False,
    ) -> None:
        """`name` is the global name of the module; rows from `valid_vocab` on are padding, zero and never looked up.

        `std=None` leaves the weight uninitialised. Raises ValueError if `padded_vocab` does not divide over the ranks.
        """
        super().__init__()
        self.tp = tp
        self.valid_vocab = padded_vocab if valid_vocab is None else valid_vocab
        self.weight = new_parameter(
            tp,
            (padded_vocab, hidden_size),
            name=f"{name}.weight",
            kind="normal",
            std=std,
            shard_dim=0,
            tied=tied,
            valid=valid_vocab,
            of_vocabulary=True,
        )

    def forward(self, ids: Tensor) -> Tensor:
        """ids: int64 of any shape -> [*ids.shape, h].

        Raises RuntimeError for an id outside the vocabulary (on a GPU when the device gets there): no shard would
        own it, and its embedding would silently be zero.
        """
        inside = ((ids >= 0) & (ids < self.valid_vocab)).all()
        torch._assert_async(inside, f"an id is outside the vocabulary of {self.valid_vocab}")
        return _Lookup.apply(self.weight, ids, self.tp.axis, self.tp.sink)
