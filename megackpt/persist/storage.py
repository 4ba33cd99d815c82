"""DCP's storage interface over our files: one safetensors file per rank on the way in, mapped reads on the way out.

An error while writing or reading is not raised inside DCP but held until `settle`, which all ranks call together.
DCP would pickle the exception with its stack for the other ranks; where that fails (any exception that does not
pickle, and every stack under Python 3.13 with torch 2.11) they would wait for it for ever.
"""

from __future__ import annotations

import dataclasses
import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from megackpt.persist.directory import MANIFEST, sync_directory
from megackpt.persist.manifest import Manifest, StoredPart, StoredTensor
from megackpt.persist.planner import PieceSavePlanner, stored_metadata
from megackpt.persist.tensor_file import DTYPE_NAMES, DTYPES, FileDigest, Part, write_bytes, write_tensors

RUN_FILE = "run.json"
T = TypeVar("T")


@dataclass(frozen=True)
class _Written:
    """What rank 0 must know of a part that another rank has written."""

    file: str
    digest: FileDigest
    shape: tuple[int, ...]
    dtype: torch.dtype
    valid_rows: int | None


class _HoldsFault:
    """Keeps the first error of DCP's phases on this rank until all ranks are there to hear of it."""

    def __init__(self) -> None:
        self._fault: Exception | None = None

    def hold(self, work: Callable[[], T], otherwise: T) -> T:
        """`work()`, or `otherwise` if it raises."""
        try:
            return work()
        except Exception as error:  # of any kind: the peers must learn of it
            self._fault = self._fault or error
            return otherwise

    def settle(self) -> None:
        """Raise what was held."""
        if self._fault is not None:
            raise self._fault


class ShardWriter(_HoldsFault, StorageWriter):
    """Writes this rank's parts into `directory` and, on rank 0 when all have, run file and manifest."""

    def __init__(self, directory: Path, iteration: int, run: bytes) -> None:
        super().__init__()
        self.directory = directory
        self.iteration = iteration
        self.run = run

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The directory is made, and seen by all ranks, before DCP begins."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        names = [f"rank_{rank:05d}.safetensors" for rank in range(len(plans))]
        return [dataclasses.replace(plan, storage_data=name) for plan, name in zip(plans, names, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        assert isinstance(planner, PieceSavePlanner)
        future: Future[list[WriteResult]] = Future()
        future.set_result(self.hold(partial(self._write, plan, planner), []))
        return future

    def _write(self, plan: SavePlan, planner: PieceSavePlanner) -> list[WriteResult]:
        if not plan.items:  # every piece of this rank is written by a replica: no file
            return []
        parts = [_part(item, planner) for item in plan.items]
        digest = write_tensors(self.directory / plan.storage_data, parts)
        results = []
        for item, part in zip(plan.items, parts, strict=True):
            rows = planner.pieces[part.key].valid_rows
            written = _Written(plan.storage_data, digest, part.shape, part.dtype, rows)
            results.append(WriteResult(item.index, part.size, written))
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        planned = sum(len(cast(TensorStorageMetadata, t).chunks) for t in metadata.state_dict_metadata.values())
        if sum(map(len, results)) == planned:  # else a rank holds the reason
            self.hold(partial(self._finish, metadata, results), None)

    def _finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files = {RUN_FILE: write_bytes(self.directory / RUN_FILE, self.run)}
        parts: dict[str, list[StoredPart]] = defaultdict(list)
        kinds: dict[str, _Written] = {}
        for result in (result for of_rank in results for result in of_rank):
            written: _Written = result.storage_data
            key, offsets = result.index.fqn, result.index.offset
            assert offsets is not None  # every piece has offsets
            files[written.file] = written.digest
            kinds[key] = written
            parts[key].append(StoredPart(written.file, tuple(offsets), written.shape))
        tensors = {
            key: StoredTensor(
                DTYPE_NAMES[kind.dtype],
                tuple(cast(TensorStorageMetadata, metadata.state_dict_metadata[key]).size),
                kind.valid_rows,
                tuple(parts[key]),
            )
            for key, kind in kinds.items()
        }
        write_bytes(self.directory / MANIFEST, Manifest(self.iteration, files, tensors).to_bytes())
        sync_directory(self.directory)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class ShardReader(_HoldsFault, StorageReader):
    """Reads parts of the files that `manifest`, already checked, describes. Nothing is unpickled."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        super().__init__()
        self.directory = directory
        self.manifest = manifest
        self._parts: dict[MetadataIndex, StoredPart] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        stored = {}
        for key, tensor in self.manifest.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.shape)) for p in tensor.parts]
            stored[key] = stored_metadata(DTYPES[tensor.dtype], tensor.shape, chunks)
        return Metadata(stored)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._parts = {
            MetadataIndex(key, part.offsets): part
            for key, tensor in self.manifest.tensors.items()
            for part in tensor.parts
        }

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self.hold(partial(self._read_all, plan, planner), None)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_all(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self._parts[item.storage_index].file].append(item)
        for name, items in by_file.items():
            with safe_open(str(self.directory / name), framework="pt") as file:
                for item in items:
                    self._read(file, item, planner)

    def _read(self, file: Any, item: ReadItem, planner: LoadPlanner) -> None:
        key, whole = item.storage_index.fqn, self._parts[item.storage_index].shape
        if tuple(item.lengths) == whole:
            value = file.get_tensor(key)  # also the only way to a tensor without dimensions
        else:
            ends = zip(item.storage_offsets, item.lengths, strict=True)
            value = file.get_slice(key)[tuple(slice(start, start + length) for start, length in ends)]
        target = planner.resolve_tensor(item)
        target.copy_(value)
        planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _part(item: WriteItem, planner: PieceSavePlanner) -> Part:
    data = item.tensor_data
    assert data is not None and item.index.offset is not None  # every piece has both
    dtype, shape = data.properties.dtype, tuple(data.chunk.sizes)
    return Part(item.index.fqn, dtype, shape, tuple(item.index.offset), partial(planner.resolve_data, item))
