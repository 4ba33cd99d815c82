"""Initial weights that are the same whole tensor at every tensor-parallel size, dtype and device.

Letting each rank draw its shard makes weights depend on the layout (or all shards equal); drawing the whole tensor on
each rank costs t times the time and memory. So the whole tensor is defined as a sequence of blocks of rows, each
drawn on the CPU in fp32 by a generator of its own, seeded by the run's seed, the parameter's global name and the
number of the block. A rank draws the blocks that its rows touch and keeps its part. A tensor's rows are all its
dimensions but the last, flattened; padded rows and columns (which depend on the layout) are not drawn: they are zero.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import Parameter

from megackpt.mesh.parameter import ParameterRecord
from megackpt.mesh.process_mesh import Axis
from megackpt.tensor.context import seed_of

BLOCK_ELEMENTS = (
    1 << 18
)  # 1 MiB of fp32: large enough to be fast, small enough to waste little at a shard's edge


@torch.no_grad()
def initialise(
    param: Parameter, record: ParameterRecord, kind: str, std: float, seed: int, axis: Axis
) -> None:
    """Fill this rank's shard of the parameter that `record` describes (with its name).

    `kind` is "normal" (mean 0, deviation `std`), "zeros" or "ones". Raises ValueError for another kind, for a
    normal parameter without a name, or if the shape of `param` is not that of a shard.
    """
    if kind not in ("normal", "zeros", "ones"):
        raise ValueError(f"{record.name}: unknown kind {kind!r}; choose normal, zeros or ones")
    if tuple(param.shape) != record.local_shape(axis.size):
        raise ValueError(
            f"{record.name}: shape {tuple(param.shape)} is not a shard of {record.global_shape} over {axis.size} ranks"
        )
    if kind == "normal":
        if not record.name:
            raise ValueError("a normal parameter needs its global name, which seeds it")
        _fill_normal(param, record, std, seed, axis)
    else:
        param.fill_(1.0 if kind == "ones" else 0.0)
        _zero_padding(param, record, axis)


def _fill_normal(param: Parameter, record: ParameterRecord, std: float, seed: int, axis: Axis) -> None:
    shape = record.global_shape if len(record.global_shape) > 1 else (*record.global_shape, 1)
    valid = list(shape)
    if record.valid is not None:
        valid[record.padded_dim] = record.valid
    valid_rows, width = math.prod(valid[:-1]), valid[-1]
    columns = slice(None)
    if record.shard_dim is not None and record.shard_dim == len(shape) - 1:
        columns = slice(axis.index * shape[-1] // axis.size, (axis.index + 1) * shape[-1] // axis.size)
    target = param.view(-1, param.shape[-1] if len(record.global_shape) > 1 else 1)
    held = len(range(*columns.indices(width)))  # columns that are drawn
    target[:, held:].zero_()
    row = 0  # of the shard
    for start, end in _owned_rows(shape, record.shard_dim, axis):
        end_drawn = max(start, min(end, valid_rows))
        for block in _blocks(start, end_drawn, valid_rows, width):
            first, last = max(start, block.start), min(end_drawn, block.stop)
            drawn = _draw(block, width, std, seed_of(seed, record.name, str(block.start)))
            count = last - first
            target[row : row + count, :held].copy_(drawn[first - block.start : last - block.start, columns])
            row += count
        target[row : row + end - end_drawn].zero_()
        row += end - end_drawn


def _owned_rows(shape: tuple[int, ...], shard_dim: int | None, axis: Axis) -> list[tuple[int, int]]:
    """Ranges of flattened rows of the whole tensor that this rank holds, in the order in which it holds them."""
    rows = math.prod(shape[:-1])
    if shard_dim is None or shard_dim == len(shape) - 1:
        return [(0, rows)]
    inner = math.prod(shape[shard_dim + 1 : -1])
    stride = shape[shard_dim] * inner
    share = stride // axis.size
    return [
        (outer * stride + axis.index * share, outer * stride + (axis.index + 1) * share)
        for outer in range(math.prod(shape[:shard_dim]))
    ]


def _blocks(start: int, end: int, valid_rows: int, width: int) -> list[range]:
    """The blocks, as ranges of rows, that rows start..end touch. Where they lie depends on the whole tensor only."""
    height = max(1, BLOCK_ELEMENTS // max(1, width))
    if start >= end:
        return []
    first, last = start // height, (end - 1) // height
    return [range(i * height, min((i + 1) * height, valid_rows)) for i in range(first, last + 1)]


def _draw(block: range, width: int, std: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(len(block), width, dtype=torch.float32).normal_(0.0, std, generator=generator)


def _zero_padding(param: Parameter, record: ParameterRecord, axis: Axis) -> None:
    if record.valid is None:
        return
    held = param.shape[record.padded_dim]
    first = axis.index * held if record.shard_dim is not None else 0
    valid = max(0, min(held, record.valid - first))
    param.narrow(record.padded_dim, valid, held - valid).zero_()
