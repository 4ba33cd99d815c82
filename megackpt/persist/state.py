"""What is saved: tensors with global names, items that belong to one rank, and a dictionary of plain values.

A tensor's key is its group and its global name, the same on every layout: `model.layers.3.attn.qkv.weight`,
`optimizer.exp_avg.layers.3.attn.qkv.weight`. Where it lies in the global tensor follows from its parameter record
and this rank's tensor-parallel index; copies on other data-parallel ranks and tied copies on another stage have the
same key and place and are written once. A rank's own items (the states of its RNG streams) are keyed by rank, so
that no rank's state is ever taken for a replica of another's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import Tensor

from megackpt.mesh.parameter import ParameterRecord
from megackpt.mesh.process_mesh import ProcessMesh
from megackpt.persist.agree import CheckpointError
from megackpt.persist.rectangles import Rectangle, flat_rectangles
from megackpt.persist.tensor_file import DTYPE_NAMES

TENSOR_GROUPS = ("model", "optimizer")
GROUPS = (*TENSOR_GROUPS, "rng")


@dataclass(frozen=True)
class NamedShard:
    """One local tensor. `local` is read by save and filled in place by load.

    `record` says how it lies in the global tensor; its own name is not used, so that an optimizer moment carries
    the record of its parameter.

    With `flat_range` (first, stop) this rank has only that part of its local tensor, flattened in row-major order:
    `local` is then contiguous, of stop - first elements. Other data-parallel ranks have the rest.
    """

    key: str
    local: Tensor
    record: ParameterRecord
    flat_range: tuple[int, int] | None = None


@dataclass
class RunState:
    """Everything one rank saves or wants back.

    `per_rank`: this rank's own tensors by name. `extra`: JSON-able values that are the same on all ranks
    (iteration, consumed samples, learning-rate schedule, config); rank 0's is written.
    """

    tensors: list[NamedShard]
    per_rank: dict[str, Tensor] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Piece:
    """A rectangular part of a global tensor: what is written and read. Lengths are those of `tensor`.

    A rank may hold several pieces of a tensor. What lies beyond `valid` along `padded_dim` of the global tensor is
    padding. `saved` False: other ranks hold all of it as well, perhaps cut differently, and theirs are written.
    """

    key: str
    tensor: Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    valid: int | None = None
    padded_dim: int = 0
    saved: bool = True

    @property
    def place(self) -> tuple[str, tuple[int, ...]]:
        """What tells it from all other pieces of this rank."""
        return self.key, self.offsets

    @property
    def group(self) -> str:
        return group_of(self.key)


def group_of(key: str) -> str:
    """`optimizer` for `optimizer.exp_avg.…`: the part of a checkpoint that flags can leave out."""
    return key.partition(".")[0]


def rank_key(rank: int, name: str) -> str:
    """Key of an item that belongs to one rank."""
    return f"rng.rank_{rank:05d}.{name}"


def layout_of(mesh: ProcessMesh) -> dict[str, int]:
    """Sizes of the mesh axes: on another layout, a rank number means another place."""
    shape = mesh.shape
    return {"tp": shape.tp, "cp": shape.cp, "dp": shape.dp, "pp": shape.pp}


def pieces_of(state: RunState, mesh: ProcessMesh) -> list[Piece]:
    """All pieces of this rank. Raises CheckpointError naming the tensor whose shape, type or key is wrong."""
    pieces = [piece for shard in state.tensors for piece in _pieces(shard, mesh)]
    for name, tensor in state.per_rank.items():
        shape = tuple(tensor.shape)
        pieces.append(Piece(rank_key(mesh.rank, name), tensor, shape, (0,) * len(shape)))
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for piece in pieces:
        if piece.place in seen:
            raise CheckpointError(f"two tensors of this rank are named {piece.key}")
        if piece.tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{piece.key}: tensors of type {piece.tensor.dtype} cannot be stored")
        seen.add(piece.place)
    return pieces


def _pieces(shard: NamedShard, mesh: ProcessMesh) -> list[Piece]:
    if group_of(shard.key) not in TENSOR_GROUPS:
        raise CheckpointError(f"{shard.key}: a tensor's key begins with one of {', '.join(TENSOR_GROUPS)}")
    record = shard.record
    shape, local = tuple(record.global_shape), record.local_shape(mesh.tp.size)
    offsets = [0] * len(shape)
    if record.shard_dim is not None:
        offsets[record.shard_dim] = mesh.tp.index * local[record.shard_dim]
    corner = tuple(offsets)
    if shard.flat_range is not None:
        # Copies of a tensor may be cut at other places of other buffers; one set of cuts is written.
        saved = record.counted and (record.shard_dim is not None or mesh.tp.index == 0)
        boxes = _cut(shard, local)
        return [
            Piece(shard.key, tensor, shape, box.moved(corner).offsets, record.valid, record.padded_dim, saved)
            for box, tensor in boxes
        ]
    if tuple(shard.local.shape) != local:
        raise CheckpointError(
            f"{shard.key}: local shape {list(shard.local.shape)}, but {list(shape)} sharded over dimension "
            f"{record.shard_dim} at tensor-parallel size {mesh.tp.size} gives {list(local)}"
        )
    return [Piece(shard.key, shard.local, shape, corner, record.valid, record.padded_dim)]


def _cut(shard: NamedShard, local: tuple[int, ...]) -> list[tuple[Rectangle, Tensor]]:
    """The rectangles of a flat range in the local tensor, each with its view of what this rank holds."""
    assert shard.flat_range is not None
    start, stop = shard.flat_range
    if not 0 <= start <= stop <= prod(local):
        raise CheckpointError(f"{shard.key}: range {start}:{stop} of a local tensor of shape {list(local)}")
    if shard.local.numel() != stop - start or not shard.local.is_contiguous():
        raise CheckpointError(
            f"{shard.key}: range {start}:{stop} needs {stop - start} contiguous elements, not a tensor of shape "
            f"{list(shard.local.shape)} and strides {list(shard.local.stride())}"
        )
    flat, at, cut = shard.local.detach().view(-1), 0, []
    for box in flat_rectangles(local, start, stop):
        cut.append((box, flat[at : at + box.size].view(box.lengths)))
        at += box.size
    return cut
