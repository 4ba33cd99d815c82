"""Who writes what, and which stored parts to read: DCP's planning over pieces.

A piece says where it lies; DCP's planner gives each place to one of the ranks that hold it, evenly by size, and its
resharding finds the stored parts that a wanted piece overlaps. A DTensor would say the same thing, at the price of a
device mesh whose process groups have to be made and owned and of shards that can only be even; a piece is just an
offset and a shape, and needs no communicator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megackpt.persist.agree import CheckpointError, Ranks
from megackpt.persist.manifest import Manifest, StoredPart, StoredTensor
from megackpt.persist.state import Piece
from megackpt.persist.tensor_file import DTYPE_NAMES, DTYPES

Place = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Kind:
    """What all ranks must say alike of a piece. Small and picklable: rank 0 sees those of all."""

    place: Place
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    dtype: torch.dtype
    valid: int | None


@dataclass(frozen=True)
class WritePlan:
    """This rank's part of a save: which pieces it writes, under which names, to which file ("": to none).

    `tensors` (on rank 0): what the manifest says of all ranks' tensors.
    """

    file: str
    entries: tuple[tuple[Place, str], ...]
    tensors: dict[str, StoredTensor] | None = None
    files: tuple[str, ...] = ()


def kinds_of(pieces: Iterable[Piece]) -> tuple[Kind, ...]:
    """The structure of what a rank saves. It is the same in every save of a run, and then so is the plan."""
    return tuple(
        Kind(p.place, tuple(p.tensor.shape), p.global_shape, p.tensor.dtype, p.valid) for p in pieces if p.saved
    )


def plan_writing(ranks: Ranks, kinds: tuple[Kind, ...], file: str, *, shared: bool) -> WritePlan:
    """Decide who writes what; called by all ranks together.

    `file`: what this rank would write to, "" if it writes nothing. `shared`: copies are written by one of the ranks
    that hold them; else every rank with a file writes all it has, and the manifest names the first copy of each.
    Raises CheckpointError on all ranks if they mean different tensors by one key.
    """
    requests = ranks.gather_to_first((file, kinds))
    return ranks.from_first_each("save", lambda: _plans(requests or [], shared))


def _plans(requests: Sequence[tuple[str, tuple[Kind, ...]]], shared: bool) -> list[WritePlan]:
    _check_agreement(kind for _, kinds in requests for kind in kinds)
    by_rank = [list(kinds) for _, kinds in requests]
    if shared:
        by_rank = _without_copies(by_rank)
    parts: dict[str, dict[tuple[int, ...], StoredPart]] = defaultdict(dict)
    first: dict[str, Kind] = {}
    plans = []
    for (file, _), kinds in zip(requests, by_rank, strict=True):
        times: dict[str, int] = defaultdict(int)
        entries = []
        for kind in kinds if file else ():
            key, offsets = kind.place
            entry = f"{key}#{times[key]}" if times[key] else ""
            times[key] += 1
            entries.append((kind.place, entry or key))
            first.setdefault(key, kind)
            parts[key].setdefault(offsets, StoredPart(file, offsets, kind.shape, entry))
        plans.append(WritePlan(file if entries else "", tuple(entries)))
    tensors = {
        key: StoredTensor(DTYPE_NAMES[kind.dtype], kind.global_shape, kind.valid, tuple(parts[key].values()))
        for key, kind in first.items()
    }
    _check_cover(tensors)
    files = tuple(plan.file for plan in plans)
    return [WritePlan(plans[0].file, plans[0].entries, tensors, files), *plans[1:]]


def _check_agreement(kinds: Iterable[Kind]) -> None:
    first: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for kind in kinds:
        key, meant = kind.place[0], (kind.global_shape, kind.dtype)
        if first.setdefault(key, meant) != meant:
            raise CheckpointError(f"ranks disagree about {key}: {first[key]} or {meant}")


def _check_cover(tensors: dict[str, StoredTensor]) -> None:
    for key, tensor in tensors.items():
        held = sum(prod(part.shape) for part in tensor.parts)
        if held != prod(tensor.shape):
            raise CheckpointError(f"all ranks together hold {held} of the {prod(tensor.shape)} elements of {key}")


def _without_copies(by_rank: Sequence[Sequence[Kind]]) -> list[list[Kind]]:
    """DCP's deduplication, evenly by size, and its check that the parts of a tensor neither overlap nor leave gaps."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        plans, _ = planner.create_global_plan([SavePlan([_write_item(kind) for kind in kinds]) for kinds in by_rank])
    except ValueError as error:
        raise CheckpointError(f"the parts that ranks hold overlap or leave gaps: {error}") from error
    return [
        [kind for kind, wanted in _matching(kinds, plan) if wanted] for kinds, plan in zip(by_rank, plans, strict=True)
    ]


def _matching(kinds: Sequence[Kind], plan: SavePlan) -> list[tuple[Kind, bool]]:
    kept = {(item.index.fqn, tuple(item.index.offset or ())) for item in plan.items}
    return [(kind, kind.place in kept) for kind in kinds]


def _write_item(kind: Kind) -> WriteItem:
    key, offsets = kind.place
    chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(kind.shape))
    properties = TensorProperties(dtype=kind.dtype)
    data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(kind.global_shape))
    return WriteItem(index=MetadataIndex(key, offsets), type=WriteItemType.SHARD, tensor_data=data)


@dataclass(frozen=True)
class Reading:
    """A box of a stored part and the view of this rank's tensor that it fills."""

    file: str
    entry: str
    offsets: tuple[int, ...]
    """in the part"""
    target: Tensor


def plan_reading(manifest: Manifest, pieces: Sequence[Piece]) -> list[Reading]:
    """What this rank reads to fill `pieces`: the overlaps with the stored parts, and nothing else.

    What the stored tensor does not cover (padding rows of a larger padded vocabulary) is left as it is.
    """
    by_key: dict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        by_key[piece.key].append(piece)
    return [reading for key, wanted in by_key.items() for reading in _readings(key, manifest.tensors[key], wanted)]


def _readings(key: str, stored: StoredTensor, wanted: list[Piece]) -> list[Reading]:
    parts = {part.offsets: part for part in stored.parts}
    chunks = [ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.shape)) for part in stored.parts]
    metadata = TensorStorageMetadata(TensorProperties(dtype=DTYPES[stored.dtype]), torch.Size(stored.shape), chunks)
    own = {piece.offsets: piece.tensor.detach() for piece in wanted}
    asked = [ChunkStorageMetadata(torch.Size(piece.offsets), piece.tensor.shape) for piece in wanted]
    readings = []
    for item in create_read_items_for_chunk_list(key, metadata, asked):
        target = own[tuple(item.dest_index.offset or ())]
        for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        part = parts[tuple(item.storage_index.offset or ())]
        readings.append(Reading(part.file, part.entry or key, tuple(item.storage_offsets), target))
    return readings
