"""Pieces as DCP plans: our pieces say where they lie, DCP decides who writes what and which stored parts to read.

A DTensor would say the same thing, at the price of a device mesh whose process groups have to be made and owned and
of shards that can only be even; a piece is just an offset and a shape, and needs no communicator.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megackpt.persist.agree import CheckpointError
from megackpt.persist.state import Piece

_ALL = "pieces"


def as_state_dict(pieces: list[Piece]) -> dict[str, Any]:
    """What `dcp.save` and `dcp.load` take. One entry for all: each entry costs them a log record or two."""
    return {_ALL: {piece.key: piece for piece in pieces}}


class PieceSavePlanner(DefaultSavePlanner):
    """DCP's planner (one copy of each replica, spread evenly by size) over pieces instead of tensors."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.pieces: dict[str, Piece] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.pieces = state_dict[_ALL]
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(piece) for piece in self.pieces.values()])
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """As DCP's, after checking that all ranks mean the same tensor by a key."""
        first: dict[str, tuple[torch.Size, torch.dtype]] = {}
        for plan in all_plans:
            for item in plan.items:
                assert item.tensor_data is not None  # every piece has one
                kind = (item.tensor_data.size, item.tensor_data.properties.dtype)
                if first.setdefault(item.index.fqn, kind) != kind:
                    raise CheckpointError(
                        f"ranks disagree about {item.index.fqn}: {first[item.index.fqn]} or {kind}"
                    )
        return super().create_global_plan(all_plans)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.pieces[write_item.index.fqn].tensor.detach()


class PieceLoadPlanner(LoadPlanner):
    """Reads whatever stored parts overlap each piece straight into its tensor.

    What the stored tensor does not cover (padding rows of a larger padded vocabulary) is left as it is.
    """

    def __init__(self) -> None:
        self.pieces: dict[str, Piece] = {}
        self.stored: dict[str, Any] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None  # our reader always has it
        self.pieces, self.stored = state_dict[_ALL], metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for key, piece in self.pieces.items():
            items += create_read_items_for_chunk_list(key, self.stored[key], [_chunk(piece)])
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan  # each rank reads for itself

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        target = self.pieces[read_item.dest_index.fqn].tensor.detach()
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing to do: `resolve_tensor` gave a view of the tensor itself."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn} is not a tensor")

    def resolve_bytes(self, read_item: ReadItem) -> io.BytesIO:
        raise CheckpointError(f"{read_item.dest_index.fqn} is not a tensor")


def stored_metadata(dtype: torch.dtype, shape: tuple[int, ...], parts: list[ChunkStorageMetadata]) -> Any:
    """DCP's description of a stored tensor."""
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), parts)


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(piece.offsets), sizes=piece.tensor.shape)


def _write_item(piece: Piece) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(piece.key, piece.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_chunk(piece),
            properties=TensorProperties(dtype=piece.tensor.dtype),
            size=torch.Size(piece.global_shape),
        ),
    )
