"""Communication along the tp axis as autograd functions.

Letters: s sequence, b micro-batch, h hidden, t size of the axis.

| function                 | forward                          | backward        |
|--------------------------|----------------------------------|-----------------|
| gather_sequence          | all-gather      [s/t,b,h]->[s,b,h] | reduce-scatter  |
| reduce_scatter_sequence  | reduce-scatter  [s,b,h]->[s/t,b,h] | all-gather      |
| split_sequence           | own slice       [s,b,h]->[s/t,b,h] | all-gather      |
| reduce_from_tp           | all-reduce                       | identity        |
| copy_to_tp               | identity                         | all-reduce      |

All are out of place (an in-place collective does not move a tensor's version, so a change of a saved tensor would go
unseen), save nothing for backward (so a replay never has a reason to repeat one), reduce in the tensor's own dtype,
and on an axis of size 1 return their argument itself.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from megackpt.mesh.process_mesh import Axis
from megackpt.recompute import TwoPhase

# -- plain functions, no autograd --------------------------------------------------------------------------------


def launch_gather(x: Tensor, axis: Axis) -> tuple[Tensor, dist.Work | None]:
    """Begin to gather `x` [s/t, ...] along dimension 0: the buffer [s, ...] and the work to wait for.

    The buffer is filled once `work.wait()` has returned (None: it is filled already); `x` must live until then.
    """
    if axis.size == 1:
        return x, None
    out = x.new_empty((x.shape[0] * axis.size, *x.shape[1:]))
    return out, dist.all_gather_into_tensor(out, x.contiguous(), group=axis.group, async_op=True)


def launch_all_reduce(x: Tensor, axis: Axis) -> tuple[Tensor, dist.Work | None]:
    """Begin to sum `x` over the axis *in its own memory*; only for a fresh buffer that nobody else has seen."""
    if axis.size == 1:
        return x, None
    return x, dist.all_reduce(x, group=axis.group, async_op=True)


def _gather(x: Tensor, axis: Axis) -> Tensor:
    out = x.new_empty((x.shape[0] * axis.size, *x.shape[1:]))
    dist.all_gather_into_tensor(out, x.contiguous(), group=axis.group)
    return out


def _reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    out = x.new_empty((_share(x, axis), *x.shape[1:]))
    dist.reduce_scatter_tensor(out, x.contiguous(), group=axis.group)
    return out


def _all_reduce(x: Tensor, axis: Axis) -> Tensor:
    # clone() alone would keep strides, and a transposed buffer is not what a collective wants
    out = x.contiguous()
    out = out.clone() if out is x else out
    dist.all_reduce(out, group=axis.group)
    return out


def _share(x: Tensor, axis: Axis) -> int:
    if x.shape[0] % axis.size:
        raise ValueError(f"a sequence of {x.shape[0]} does not divide over {axis.size} tensor-parallel ranks")
    return x.shape[0] // axis.size


class GatherSequence(TwoPhase):
    """:func:`gather_sequence` over one axis as a step's function, which a replay may begin ahead."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def __call__(self, x: Tensor) -> Tensor:
        return gather_sequence(x, self.axis)

    def launch(self, x: Tensor) -> tuple[Tensor, Tensor, dist.Work | None]:
        source = x.detach()
        return source, *launch_gather(source, self.axis)

    def finish(self, launched: tuple[Tensor, Tensor, dist.Work | None]) -> Tensor:
        _, out, work = launched
        if work is not None:
            work.wait()
        return out


def gather_flat(part: Tensor, axis: Axis) -> Tensor:
    """[n/t] on each rank -> [n] on all, without history: how a kept tensor that is spread over the ranks comes back."""
    return part if axis.size == 1 else _gather(part, axis)


# -- autograd functions ------------------------------------------------------------------------------------------


class EarlyScatter:
    """Where whoever makes the gradient of a gathered tensor leaves its reduce-scatter, begun: it then runs beside what
    follows, and the gather's backward takes the result."""

    __slots__ = ("axis", "_begun")

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._begun: tuple[Tensor, int, Tensor, dist.Work] | None = None

    def begin(self, grad: Tensor) -> None:
        """Begin to sum and scatter `grad` [s, ...], which is contiguous and will not be changed."""
        out = grad.new_empty((_share(grad, self.axis), *grad.shape[1:]))
        work = dist.reduce_scatter_tensor(out, grad, group=self.axis.group, async_op=True)
        self._begun = (grad, grad._version, out, work)

    def take(self, grad: Tensor) -> Tensor | None:
        """The result [s/t, ...], if it was begun for this very gradient and nothing was added to that since."""
        if self._begun is None:
            return None
        (given, version, out, work), self._begun = self._begun, None
        work.wait()
        same = grad.data_ptr() == given.data_ptr() and grad.shape == given.shape and grad._version == version
        return out if same else None


class _GatherSequence(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis, ctx.early = axis, EarlyScatter(axis)
        return _gather(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        begun = ctx.early.take(grad)
        return _reduce_scatter(grad, ctx.axis) if begun is None else begun, None


def early_scatter(x: Tensor) -> EarlyScatter | None:
    """Of a tensor that is the direct result of `gather_sequence`."""
    return getattr(x.grad_fn, "early", None)


class _ReduceScatterSequence(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _reduce_scatter(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather(grad, ctx.axis), None


class _SplitSequence(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        share = _share(x, axis)
        # a copy: a view would hold the memory of the whole sequence for as long as the slice lives
        return x.narrow(0, axis.index * share, share).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather(grad, ctx.axis), None


class _ReduceFromTp(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return _all_reduce(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _CopyToTp(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad, ctx.axis), None


def gather_sequence(x: Tensor, axis: Axis) -> Tensor:
    """The whole sequence [s, ...] from this rank's part [s/t, ...]; gradients are summed and scattered."""
    return x if axis.size == 1 else _GatherSequence.apply(x, axis)


def reduce_scatter_sequence(x: Tensor, axis: Axis) -> Tensor:
    """Sum of the ranks' partial results [s, ...], of which each keeps its part [s/t, ...].

    Raises ValueError if s does not divide by t.
    """
    return x if axis.size == 1 else _ReduceScatterSequence.apply(x, axis)


def split_sequence(x: Tensor, axis: Axis) -> Tensor:
    """This rank's part [s/t, ...] of a sequence [s, ...] that all ranks hold. Raises ValueError as above."""
    return x if axis.size == 1 else _SplitSequence.apply(x, axis)


def reduce_from_tp(x: Tensor, axis: Axis) -> Tensor:
    """Sum of the ranks' partial results, whole on each; the gradient is the same on all ranks already."""
    return x if axis.size == 1 else _ReduceFromTp.apply(x, axis)


def copy_to_tp(x: Tensor, axis: Axis) -> Tensor:
    """`x` as it is, for use by sharded layers; their partial gradients are summed."""
    return x if axis.size == 1 else _CopyToTp.apply(x, axis)
