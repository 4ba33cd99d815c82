"""The parameter record: what many rooms must know of a parameter, said once where the parameter is made.

Initialisation, gradient reduction, norms, clipping and checkpoints all ask the same things: what is its name in the
whole model, what shape has it before sharding, along which dimension is it cut, is its gradient complete on each
tensor-parallel rank, does another stage hold a copy. A parameter without a record is an error, never a guess: a
replicated weight taken for a sharded one (or the reverse) is counted t times in the norm, silently.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megackpt.mesh.process_mesh import Axis

_ATTRIBUTE = "megackpt_record"


@dataclass(frozen=True)
class ParameterRecord:
    """Facts of one parameter. Shapes are those of the whole, unsharded tensor."""

    global_shape: tuple[int, ...]
    name: str = ""  # in the whole model, the same at every layout
    shard_dim: int | None = None  # cut contiguously over tp along this dimension; None: replicated
    partial: bool = False  # each tp rank holds only a part of the gradient's sum: that of its heads
    partial_under_sp: bool = False  # ... with sequence parallel, that of its part of the sequence
    tied: bool = False  # a second copy lives on another pipeline stage
    counted: bool = True  # this copy counts in norms (False for the last stage's copy of a tied weight)
    decay: bool = True  # weight decay applies
    valid: int | None = None  # what lies beyond this along `padded_dim` is padding, zero; None: there is none
    of_vocabulary: bool = False  # a row per token id: the word embedding or the output layer

    def __post_init__(self) -> None:
        if self.shard_dim is not None and not 0 <= self.shard_dim < len(self.global_shape):
            raise ValueError(
                f"{self.name or 'parameter'}: no dimension {self.shard_dim} in {self.global_shape}"
            )
        if self.valid is not None and not 0 <= self.valid <= self.global_shape[self.padded_dim]:
            raise ValueError(
                f"{self.name or 'parameter'}: {self.valid} of dimension {self.padded_dim} valid in {self.global_shape}"
            )

    @property
    def padded_dim(self) -> int:
        """Padding makes a dimension divide: the sharded one."""
        return self.shard_dim or 0

    def without_padding(self, whole: Tensor) -> Tensor:
        """View of the elements of the whole tensor that are not padding."""
        return whole if self.valid is None else whole.narrow(self.padded_dim, 0, self.valid)

    def local_shape(self, tp_size: int) -> tuple[int, ...]:
        """Shape of one shard. Raises ValueError if the sharded dimension does not divide by `tp_size`."""
        if self.shard_dim is None:
            return self.global_shape
        extent = self.global_shape[self.shard_dim]
        if extent % tp_size:
            raise ValueError(f"{self.name or 'parameter'}: {extent} does not divide into {tp_size} shards")
        shape = list(self.global_shape)
        shape[self.shard_dim] = extent // tp_size
        return tuple(shape)


def annotate(
    parameter: Parameter,
    *,
    global_shape: tuple[int, ...] | None = None,
    shard_dim: int | None = None,
    partial: bool = False,
    partial_under_sp: bool = False,
    tied: bool = False,
    counted: bool = True,
    decay: bool = True,
    valid: int | None = None,
    of_vocabulary: bool = False,
) -> Parameter:
    """Store a record (still without its name) on `parameter`, which is returned.

    `global_shape` may be left out for a replicated parameter. Raises ValueError if the parameter cannot be a shard
    of such a tensor.
    """
    if global_shape is None and shard_dim is not None:
        raise ValueError("a sharded parameter needs its global shape")
    record = ParameterRecord(
        global_shape=tuple(global_shape if global_shape is not None else parameter.shape),
        shard_dim=shard_dim,
        partial=partial,
        partial_under_sp=partial_under_sp,
        tied=tied,
        counted=counted,
        decay=decay,
        valid=valid,
        of_vocabulary=of_vocabulary,
    )
    whole, local = record.global_shape, tuple(parameter.shape)
    same = len(whole) == len(local) and all(
        a == b or (dim == shard_dim and b > 0 and a % b == 0)
        for dim, (a, b) in enumerate(zip(whole, local, strict=True))
    )
    if not same:
        raise ValueError(f"a parameter of shape {local} is no shard of {whole} along dimension {shard_dim}")
    setattr(parameter, _ATTRIBUTE, record)
    return parameter


def record_of(parameter: Parameter, name: str = "") -> ParameterRecord:
    """The record of one parameter under `name`. Raises ValueError if it was never annotated."""
    record: ParameterRecord | None = getattr(parameter, _ATTRIBUTE, None)
    if record is None:
        raise ValueError(f"parameter {name!r} of shape {tuple(parameter.shape)} has no record: annotate it")
    return replace(record, name=name)


def records(named_parameters: Iterable[tuple[str, Parameter]]) -> list[tuple[Parameter, ParameterRecord]]:
    """Parameters with their records, names filled in, in the order given: `records(model.named_parameters())`."""
    return [(parameter, record_of(parameter, name)) for name, parameter in named_parameters]


def local_shard(full: Tensor, record: ParameterRecord, axis: Axis) -> Tensor:
    """This rank's shard of a whole tensor, as a view of it."""
    if tuple(full.shape) != record.global_shape:
        raise ValueError(f"{record.name}: shape {tuple(full.shape)} where {record.global_shape} is the whole")
    if record.shard_dim is None or axis.size == 1:
        return full
    extent = record.local_shape(axis.size)[record.shard_dim]
    return full.narrow(record.shard_dim, axis.index * extent, extent)


def gather_full(local: Tensor, record: ParameterRecord, axis: Axis) -> Tensor:
    """The whole tensor from its shards (a parameter, its gradient or optimizer state). A collective call over `axis`.

    Returns a new tensor if there is anything to gather, else `local` itself; carries no gradient.
    """
    local = local.detach()
    if record.shard_dim is None or axis.size == 1:
        return local
    shards = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(axis.size)]
    dist.all_gather(shards, local.contiguous(), group=axis.group)
    return torch.cat(shards, dim=record.shard_dim)
