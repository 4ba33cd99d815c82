"""The steps that join the split parts of a layer to its residual stream."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from torch.nn import Parameter

from megackpt.config.model import ModelConfig
from megackpt.recompute import Named, dropout
from megackpt.tensor.collectives import GatherSequence, reduce_from_tp, reduce_scatter_sequence
from megackpt.tensor.context import TensorParallel


class Residual(nn.Module):
    """x + dropout(y + bias).  Saves nothing but the mask, if the plan keeps that.

    ``bias`` belongs to the row-parallel layer before the reduction and must be added once, after it; None where
    there is no reduction, as that layer has added it.
    """

    def __init__(self, config: ModelConfig, tp: TensorParallel, bias: Parameter | None) -> None:
        super().__init__()
        self.p, self.tp = config.hidden_dropout, tp
        self._bias = (bias,)  # in a tuple: the parameter is registered where it belongs, not here again

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # [s/t, b, h] twice
        bias = self._bias[0]
        if bias is not None:
            y = y + bias
        return x + dropout(y, self.p, self.tp.hidden_stream if self.p else None, self.training)


def gather_step(name: str, tp: TensorParallel) -> tuple[Named, ...]:
    """[s/t, b, h] -> [s, b, h]: a step of its own under sequence parallelism, else nothing at all."""
    return ((name, GatherSequence(tp.axis)),) if tp.sequence_parallel else ()


def reduce_step(name: str, tp: TensorParallel) -> tuple[Named, ...]:
    """Sum of the partial results [s, b, h]: each rank's part [s/t, b, h] under sequence parallelism, else all of
    it on each rank.  No step when t = 1."""
    if tp.axis.size == 1:
        return ()
    reduction = reduce_scatter_sequence if tp.sequence_parallel else reduce_from_tp
    return ((name, partial(reduction, axis=tp.axis)),)
