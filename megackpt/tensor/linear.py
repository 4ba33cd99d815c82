"""Linear layers split over the tp axis, on a linear function of our own.

Letters: s sequence, b micro-batch, in and out features, t tensor-parallel size.

Why not F.linear: it hands its weight gradient to autograd, while ours goes to a sink (a flat fp32 buffer, a queue).
A custom Function packs what it saves only after its body has run, so a replay that wants no more than those packs
would run the product for nothing: our body asks the replay, before its kernel, whether the product is wanted. What is
saved is the input exactly as it was passed (a transposed view of an attention output stays one, so the engine finds
its storage) and the weight. The flattening to two dimensions is done anew in backward and costs nothing unless the
input is not contiguous.

In backward communication runs beside the products:

* without sequence parallelism the input gradient is summed beside the product for the weight gradient;
* with it, an input that was gathered is gathered again (if the plan dropped it) beside the product for the input
  gradient, which is summed and scattered beside the product for the weight gradient. For that the two products are
  two nodes, and only the second asks for the input; what is saved, and in which order, is the same.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import Module, Parameter

from megackpt.mesh.process_mesh import Axis
from megackpt.mesh.sink import GradientSink
from megackpt.recompute import Prefetch, product_wanted
from megackpt.tensor.collectives import EarlyScatter, early_scatter, launch_all_reduce
from megackpt.tensor.context import TensorParallel
from megackpt.tensor.parameters import new_parameter


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Parameter,
        bias: Tensor | None,
        sink: GradientSink,
        reduce_input_gradient: Axis | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter = (
            weight  # under saved-tensor hooks what comes back from saved_tensors is not the Parameter
        )
        ctx.sink = sink
        ctx.axis = reduce_input_gradient
        matrix = weight if weight.dim() == 2 else weight.view(-1, weight.shape[-1])  # [out, in]
        if any(ctx.needs_input_grad) and not product_wanted(2):  # else nothing is packed at all
            return x.new_empty((*x.shape[:-1], matrix.shape[0]))
        return F.linear(x.contiguous(), matrix, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_weight = grad_bias = work = None
        if ctx.needs_input_grad[0]:
            grad_x = rows @ weight.view(-1, weight.shape[-1])
            if ctx.axis is not None:
                grad_x, work = launch_all_reduce(grad_x, ctx.axis)  # runs beside the weight gradient
        if ctx.needs_input_grad[1]:
            grad_weight = ctx.sink.weight_gradient(ctx.parameter, rows, x.reshape(-1, x.shape[-1]))
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0)
        if work is not None:
            work.wait()
        return None if grad_x is None else grad_x.view(x.shape), grad_weight, grad_bias, None, None


class _Handover:
    """What the node of the input gradient, which runs first, does for that of the weight gradient."""

    __slots__ = ("prefetch", "scatter", "rows")

    def __init__(self, x: Tensor, scatter: EarlyScatter) -> None:
        self.prefetch, self.scatter = Prefetch(x), scatter
        self.rows: Tensor | None = None  # the gradient of the output


class _WeightGradient(Function):
    """The input as it is; in backward the product for the weight gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Parameter, sink: GradientSink, handover: _Handover) -> Tensor:
        ctx.save_for_backward(x)
        ctx.parameter, ctx.sink, ctx.handover = weight, sink, handover
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        rows, ctx.handover.rows = ctx.handover.rows, None
        grad_weight = ctx.sink.weight_gradient(ctx.parameter, rows, x.reshape(-1, x.shape[-1]))
        return grad_x, grad_weight, None, None


class _InputGradient(Function):
    """The product; in backward the gradients of input and bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Parameter, bias: Tensor | None, handover: _Handover) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.shape, ctx.handover = x.shape, handover
        matrix = weight if weight.dim() == 2 else weight.view(-1, weight.shape[-1])  # [out, in]
        if not product_wanted(1):
            return x.new_empty((*x.shape[:-1], matrix.shape[0]))
        return F.linear(x.contiguous(), matrix, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        handover: _Handover = ctx.handover
        handover.prefetch()
        (weight,) = ctx.saved_tensors
        handover.rows = rows = grad.reshape(-1, grad.shape[-1])
        grad_x = (rows @ weight.view(-1, weight.shape[-1])).view(ctx.shape)
        handover.scatter.begin(grad_x)
        return grad_x, None, rows.sum(0) if ctx.needs_input_grad[2] else None, None


def linear(
    x: Tensor,
    weight: Parameter,
    bias: Tensor | None,
    sink: GradientSink,
    reduce_input_gradient: Axis | None = None,
) -> Tensor:
    """`x @ weight.T + bias` with the weight gradient handed to `sink`.

    `x` is [..., in], contiguous or not; `weight` [out, in], or [2, out/2, in] for a gated layer; `bias` [out] or None.
    The result is [..., out], contiguous. With
    `reduce_input_gradient` the input gradient is summed over that axis. Saves exactly (x, weight). Not twice
    differentiable.
    """
    scatter = early_scatter(x) if weight.requires_grad else None
    if scatter is None:
        return _Linear.apply(x, weight, bias, sink, reduce_input_gradient)
    handover = _Handover(x, scatter)
    return _InputGradient.apply(_WeightGradient.apply(x, weight, sink, handover), weight, bias, handover)


class ColumnLinear(Module):
    """A linear layer whose output features are split: weight [out/t, in], x [s, b, in] -> [s, b, out/t].

    `gated` makes room for a pair of equal parts (gate and up): weight [2, out/2/t, in] and bias [2, out/2/t], so that
    each rank holds matching columns of both; the last dimension of the result is gate then up.
    """

    def __init__(
        self,
        tp: TensorParallel,
        in_features: int,
        out_features: int,
        *,
        name: str,
        std: float | None,
        bias: bool = True,
        gated: bool = False,
        tied: bool = False,
        counted: bool = True,
        valid: int | None = None,
    ) -> None:
        """`name` is the global name of the layer, which seeds its weights; `std` their deviation.

        `std=None` leaves the weights uninitialised, for a checkpoint to fill; their record stands all the same.
        `out_features` is that of all ranks together; it includes padded rows beyond `valid`, which are zero. Raises
        ValueError if it does not divide over the ranks.
        """
        super().__init__()
        parts = 2 if gated else 1
        if out_features % (parts * tp.axis.size):
            raise ValueError(
                f"{name}: {out_features} output features do not divide into {parts} x {tp.axis.size} shards"
            )
        rows = (2, out_features // 2) if gated else (out_features,)
        self.tp = tp
        self.weight = new_parameter(
            tp,
            (*rows, in_features),
            name=f"{name}.weight",
            kind="normal",
            std=std,
            shard_dim=len(rows) - 1,
            tied=tied,
            counted=counted,
            valid=valid,
        )
        self.bias: Parameter | None = None
        if bias:
            kind = None if std is None else "zeros"
            self.bias = new_parameter(
                tp,
                rows,
                name=f"{name}.bias",
                kind=kind,
                shard_dim=len(rows) - 1,
                decay=False,
                valid=valid,
            )

    def forward(self, x: Tensor) -> Tensor:
        """x [s, b, in] (gathered along s with sequence parallel) -> [s, b, out/t]."""
        bias: Tensor | None = self.bias
        if bias is not None and bias.dim() > 1:
            bias = bias.view(-1)
        return linear(x, self.weight, bias, self.tp.sink, self.tp.input_gradient_axis)


class RowLinear(Module):
    """A linear layer whose input features are split: weight [out, in/t], x [s, b, in/t] -> [s, b, out], a partial sum.

    Split, it is the plain product only: the sum over ranks is a step of its own after it (reduce_from_tp or
    reduce_scatter_sequence), and `bias` [out], replicated, is to be added once, after that sum (`bias_after`). On an
    axis of one rank there is no sum, and the product adds the bias.
    """

    def __init__(
        self,
        tp: TensorParallel,
        in_features: int,
        out_features: int,
        *,
        name: str,
        std: float | None,
        bias: bool = True,
        valid: int | None = None,
    ) -> None:
        """As for ColumnLinear; `in_features` is that of all ranks together and includes padded ones beyond `valid`."""
        super().__init__()
        if in_features % tp.axis.size:
            raise ValueError(f"{name}: {in_features} input features do not divide into {tp.axis.size} shards")
        self.tp = tp
        shape = (out_features, in_features)
        self.weight = new_parameter(tp, shape, name=f"{name}.weight", kind="normal", std=std, shard_dim=1, valid=valid)
        self.bias: Parameter | None = None
        if bias:
            kind = None if std is None else "zeros"
            self.bias = new_parameter(
                tp, (out_features,), name=f"{name}.bias", kind=kind, decay=False, partial_under_sp=True
            )

    def forward(self, x: Tensor) -> Tensor:
        """x [s, b, in/t] -> this rank's partial sum [s, b, out], without `bias_after`."""
        return linear(x, self.weight, self.bias if self.bias_after is None else None, self.tp.sink)

    @property
    def bias_after(self) -> Parameter | None:
        """The bias that is to be added after the sum over ranks, if there is one."""
        return self.bias if self.tp.axis.size > 1 else None
