"""Numbers about all gradients or parameters of the model: norm, zeros, clipping.

A parameter counts once, whatever the layout: a sharded one on all tp ranks (each has another part), a
replicated one on tp rank 0, a tied one on the stage whose record says `counted`.  Data-parallel ranks hold
the same values, or with a sharded optimizer each its shards.  Squares are summed in fp64: in fp32 a plain sum over
some million elements is off by 1e-5 to 1e-3, more than the difference between layouts that must be seen.

All ranks get the same bits, which matters because they scale their copies of replicated weights by it.  So
the partial sums are not added by the collective, whose order may differ between groups: there is a slot for every
rank of the model and every data-parallel shard, each is written by whoever has that shard (every data-parallel rank
where nothing is sharded), and after one all-reduce over tp × pp, or over all ranks, all add the slots in the same
order.  The sums are those of shards in both modes, so a sharded optimizer clips by the same factor to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megackpt.mesh.parameter import ParameterRecord
from megackpt.mesh.process_mesh import ProcessMesh
from megackpt.optim.buffer import GradientBuffer

_MARGIN = 1.0e-6  # as in Megatron: keeps the coefficient finite for a gradient of zero


@dataclass(frozen=True)
class GradientStatistics:
    """Before clipping: `norm` (L2, of the whole model) and, if asked for, the number of elements that are
    zero.  `finite` is about all gradients, those of copies that do not count in the norm too."""

    norm: float
    finite: bool
    num_zeros: int | None = None


def is_counted(record: ParameterRecord, mesh: ProcessMesh) -> bool:
    """Whether this rank's copy of a parameter contributes to sums over the model."""
    return record.counted and (record.shard_dim is not None or mesh.tp.index == 0)


def gradient_statistics(
    buffer: GradientBuffer, mesh: ProcessMesh, *, count_zeros: bool = False
) -> GradientStatistics:
    """Statistics of finished gradients (after `finish`), equal bit for bit on all ranks.  One all-reduce.

    Padding rows of the vocabulary are not counted as zeros: the number does not depend on the padding.
    """
    shards = {}
    for rank in buffer.finished_ranks:
        counted = [part for part in buffer.parts[rank] if is_counted(part.record, mesh)]
        copies = [part for part in buffer.parts[rank] if not is_counted(part.record, mesh)]
        values = [squared_norm([part.gradient for part in parts], buffer.flat.device) for parts in (counted, copies)]
        if count_zeros:
            real = [without_padding(part.gradient, part.record, mesh, part.first) for part in counted]
            zeros = [one.numel() - torch.count_nonzero(one) for one in real]
            values.append(torch.stack(zeros).sum() if zeros else torch.zeros_like(values[0]))
        shards[rank] = values
    totals = _sum_over_model(shards, mesh, buffer.dp.size)
    finite = math.isfinite(totals[0]) and math.isfinite(totals[1])
    return GradientStatistics(math.sqrt(totals[0]), finite, int(totals[2]) if count_zeros else None)


def params_norm(
    parameters: Iterable[tuple[Tensor, ParameterRecord]], mesh: ProcessMesh, *, sharded: bool = False
) -> float:
    """L2 norm of all parameters of the model (give masters where there are any).  One all-reduce.

    `sharded`: `parameters` are those parts that lie in this data-parallel rank's shards.
    """
    pairs = list(parameters)
    device = pairs[0][0].device if pairs else torch.device("cpu")
    square = squared_norm([tensor for tensor, record in pairs if is_counted(record, mesh)], device)
    ranks, own = (mesh.dp.size, mesh.dp.index) if sharded else (1, 0)
    return math.sqrt(_sum_over_model({own: [square]}, mesh, ranks)[0])


def clip_coefficient(norm: float, max_norm: float) -> float:
    """Factor in (0, 1] that brings gradients of this norm to at most `max_norm`; 1 if that is 0 (off).

    A norm that is not finite gives 1: scaling by 0 would hide an overflow as a step of NaN or zero.
    """
    if max_norm <= 0.0 or not math.isfinite(norm):
        return 1.0
    return min(1.0, max_norm / (norm + _MARGIN))


def clip_(buffer: GradientBuffer, norm: float, max_norm: float) -> float:
    """Scale the gradients so that their norm is at most `max_norm`; returns the factor.  No collective."""
    coefficient = clip_coefficient(norm, max_norm)
    buffer.scale_(coefficient)  # leaves the bits alone when nothing is clipped
    return coefficient


def squared_norm(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Sum of squares of all elements as an fp64 scalar on `device`."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    # One fused call; about 5 times faster on a CPU than a norm with dtype=float64 of the flat buffer.
    norms = torch._foreach_norm([tensor.detach() for tensor in tensors], 2, dtype=torch.float64)
    return torch.stack(norms).square().sum()


def without_padding(local: Tensor, record: ParameterRecord, mesh: ProcessMesh, first: int) -> Tensor:
    """The elements that exist in the unpadded parameter (possibly none); `local` are those of the flattened local
    tensor from `first` on."""
    if record.valid is None:
        return local
    shape, dim = record.local_shape(mesh.tp.size), record.padded_dim
    before = mesh.tp.index * shape[dim] if record.shard_dim is not None else 0
    inner = math.prod(shape[dim + 1 :])
    valid = max(0, record.valid - before) * inner
    if dim == 0:
        return local[: max(0, valid - first)]
    place = torch.arange(first, first + local.numel(), device=local.device) % (shape[dim] * inner)
    return local[place < valid]


def _sum_over_model(shards: dict[int, list[Tensor]], mesh: ProcessMesh, ranks: int) -> list[float]:
    """Sums over tp × pp and all `ranks` shards of the values that this rank has for some of the shards."""
    own = {rank: torch.stack([value.to(torch.float64) for value in values]) for rank, values in shards.items()}
    some = next(iter(own.values()))
    slots = torch.zeros(mesh.model.size, ranks, some.numel(), dtype=torch.float64, device=some.device)
    for rank, values in own.items():
        slots[mesh.model.index, rank] = values
    axis = mesh.model if len(own) == ranks else mesh.world
    if axis.size > 1:
        dist.all_reduce(slots, group=axis.group)
    return slots.flatten(0, 1).sum(0).tolist()
