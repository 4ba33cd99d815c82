"""A parameter, its record and its initial values, made in one call: no parameter exists without a record."""

from __future__ import annotations

import torch
from torch.nn import Parameter

from megackpt.mesh.parameter import annotate, record_of
from megackpt.tensor.context import TensorParallel
from megackpt.tensor.init import initialise


def new_parameter(
    tp: TensorParallel,
    global_shape: tuple[int, ...],
    *,
    name: str,
    kind: str | None,
    std: float | None = None,
    shard_dim: int | None = None,
    partial: bool = False,
    partial_under_sp: bool = False,
    tied: bool = False,
    counted: bool = True,
    decay: bool = True,
    valid: int | None = None,
    of_vocabulary: bool = False,
) -> Parameter:
    """This rank's shard of the parameter `name` (global name), annotated and filled.

    `kind` is "normal" with deviation `std`, "zeros" or "ones"; `kind=None`, or "normal" with `std=None`, leaves it
    uninitialised, for a checkpoint to fill. The other arguments are the fields of `ParameterRecord`. Raises
    ValueError if `global_shape` does not divide over the ranks.
    """
    shape = list(global_shape)
    if shard_dim is not None:
        if shape[shard_dim] % tp.axis.size:
            raise ValueError(f"{name}: {shape[shard_dim]} does not divide into {tp.axis.size} shards")
        shape[shard_dim] //= tp.axis.size
    parameter = annotate(
        Parameter(torch.empty(shape, dtype=tp.dtype, device=tp.device)),
        global_shape=global_shape,
        shard_dim=shard_dim,
        partial=partial,
        partial_under_sp=partial_under_sp,
        tied=tied,
        counted=counted,
        decay=decay,
        valid=valid,
        of_vocabulary=of_vocabulary,
    )
    if tp.seed is not None and kind is not None and not (kind == "normal" and std is None):
        initialise(parameter, record_of(parameter, name), kind, std or 0.0, tp.seed, tp.axis)
    return parameter
