"""Saving: all or nothing, and every rank knows which.

Ranks write into a temporary directory, tell each other how it went, and only then rank 0 renames it into place and
moves the tracker. A full disk, a failing rank or a kill at any point leaves the previous checkpoint and the tracker
as they were.

::

    save     plan (once) ─ temporary directory ─ snapshot │ training goes on
    writer   on every rank                                └─ write, sum, fsync ┐
    poll                                                    all ranks done? ───┤
    writer   on rank 0                                                         └─ manifest ─ rename ─ tracker ─ delete
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megackpt.config.checkpoint_folder import MANIFEST, RUN_FILE
from megackpt.mesh.process_mesh import ProcessMesh
from megackpt.persist import directory
from megackpt.persist.agree import CheckpointError, Ranks
from megackpt.persist.manifest import Manifest, digest_of
from megackpt.persist.planner import Kind, WritePlan, kinds_of, plan_writing
from megackpt.persist.retention import KEEP_ALL, Retention
from megackpt.persist.state import Piece, RunState, layout_of, pieces_of
from megackpt.persist.tensor_file import FileDigest, Part, write_bytes, write_tensors
from megackpt.persist.torch_file import file_name, pieces_of_file, write_document
from megackpt.persist.writing import HostCopy, Writing

T = TypeVar("T")


def save(
    root: str | Path, iteration: int, state: RunState, mesh: ProcessMesh, group: ProcessGroup | None = None
) -> Path:
    """Write `state` as the checkpoint of `iteration` under `root`; returns its directory. See `Saver.save`."""
    path = Saver(root, mesh, group).save(iteration, state)
    assert path is not None  # nothing was left to a writer
    return path


@dataclass
class _Flight:
    """A save that has begun. `written`: all ranks are known to have written their files; then rank 0 commits."""

    iteration: int
    temporary: Path
    run: bytes
    plan: WritePlan
    writing: Writing[FileDigest | None]
    written: bool = False
    commit: Writing[Path] | None = None

    @property
    def done(self) -> bool:
        """This rank has nothing to do at the moment."""
        return self.writing.done and (self.commit is None or self.commit.done)


class Saver:
    """Writes the checkpoints of one run, one at a time. Its methods are called by all ranks together."""

    def __init__(
        self,
        root: str | Path,
        mesh: ProcessMesh,
        group: ProcessGroup | None = None,
        *,
        host_copy: HostCopy | None = None,
        form: str = "torch_dist",
        retention: Retention = KEEP_ALL,
    ) -> None:
        """`root` is on a file system that all ranks see. `group`: see coordination_group.

        `host_copy`: where a snapshot goes; with it saves are written in the background. `form`: torch_dist or torch.
        """
        self.root, self.mesh, self.ranks = Path(root), mesh, Ranks(group)
        self._host_copy, self._form, self._retention = host_copy, form, retention
        self._planned: tuple[tuple[Kind, ...], WritePlan] | None = None
        self._flight: _Flight | None = None

    @property
    def busy(self) -> bool:
        """A save is being written, or waits for the ranks to meet."""
        return self._flight is not None

    def save(self, iteration: int, state: RunState) -> Path | None:
        """Write `state` as the checkpoint of `iteration`; waits first for a save that is still being written.

        What flags leave out (`--no-save-optim`, `--no-save-rng`) is simply not in `state`. An existing checkpoint of
        the same iteration is replaced once the new one is complete. Returns the directory, or in the background None
        as soon as `state` may change. Raises CheckpointError on every rank if any rank failed; earlier checkpoints
        and the tracker are then untouched.
        """
        self.finish()
        ranks, form = self.ranks, self._form
        pieces = ranks.together("save", lambda: pieces_of(state, self.mesh))
        if form == "torch":
            pieces = pieces_of_file(ranks, self.mesh, pieces)
        run = ranks.from_first("save", lambda: _run_file(iteration, state, self.mesh))
        plan = self._plan(pieces)
        temporary = ranks.from_first("save", lambda: directory.begin(self.root, iteration))
        try:
            ranks.together("save", lambda: _must_see(temporary))
            plain = {"iteration": iteration, "run": state.extra}
            work = ranks.together("save", lambda: self._work(plan, pieces, temporary, plain))
            writing = Writing(work, background=self._host_copy is not None)
            self._flight = _Flight(iteration, temporary, run, plan, writing)
        except BaseException:
            self._discard(temporary)
            raise
        return None if self._host_copy is not None else self.finish()

    def poll(self) -> Path | None:
        """The directory of a save that all ranks have written since; None while there is none. Never waits for one.

        Raises like `save`.
        """
        flight = self._flight
        if flight is None or not self.ranks.all_true(flight.done):
            return None
        if flight.written:
            return self.finish()
        self._begin_commit(flight)
        return None

    def finish(self) -> Path | None:
        """Wait for the save that is being written, if any; its directory. Raises like `save`."""
        flight = self._flight
        if flight is None:
            return None
        self._begin_commit(flight)
        return self._land(flight, lambda: self.ranks.from_first("save", lambda: _result(flight.commit)))

    def abandon(self) -> None:
        """Stop writing without asking the other ranks, who may be gone. The next start removes what is there."""
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.writing.stop()

    def _begin_commit(self, flight: _Flight) -> None:
        """Ask all ranks how it went; if well, rank 0 begins to make a checkpoint of the files."""
        if flight.written:
            return
        digests = self._land(flight, lambda: self.ranks.collect("save", flight.writing.result), last=False)
        flight.written = True
        if self.ranks.rank == 0:
            background = self._host_copy is not None
            flight.commit = Writing(lambda check: self._commit(flight, digests), background=background)

    def _land(self, flight: _Flight, step: Callable[[], T], *, last: bool = True) -> T:
        """A step of all ranks that ends the flight if it fails, or if it is the `last`."""
        try:
            result = step()
        except BaseException:
            self._flight = None
            self._discard(flight.temporary)
            raise
        if last:
            self._flight = None
        return result

    def _plan(self, pieces: list[Piece]) -> WritePlan:
        """Of the save before if all ranks still hold the same, which they do unless the caller changed its mind."""
        kinds = kinds_of(pieces)
        known = self._planned is not None and self._planned[0] == kinds
        if self._planned is None or not self.ranks.all_true(known):
            own = file_name(self.mesh) if self._form == "torch" else f"rank_{self.ranks.rank:05d}.safetensors"
            plan = plan_writing(self.ranks, kinds, own, shared=self._form != "torch")
            self._planned = kinds, plan
        return self._planned[1]

    def _work(
        self, plan: WritePlan, pieces: list[Piece], temporary: Path, plain: Mapping[str, Any]
    ) -> Callable[[Callable[[], None]], FileDigest | None]:
        """What this rank's writer does."""
        by_place = {piece.place: piece.tensor.detach() for piece in pieces}
        tensors = [by_place[place] for place, _ in plan.entries]
        if self._host_copy is not None:
            tensors = self._host_copy.take(tensors)
        parts = [_part(place, entry, t) for (place, entry), t in zip(plan.entries, tensors, strict=True)]
        path, verify, form = temporary / plan.file, self._retention != KEEP_ALL, self._form

        def work(check: Callable[[], None]) -> FileDigest | None:
            if not plan.file:  # every piece of this rank is written by a replica
                return None
            try:
                if form == "torch":
                    written = write_document(path, parts, plain, check)
                else:
                    written = write_tensors(path, parts, check)
            except OSError as error:
                raise _explained(error, path, parts) from error
            if verify and digest_of(path) != written:  # another checkpoint may be deleted for this one
                raise CheckpointError(f"{path.name} does not read back as it was written")
            return written

        return work

    def _commit(self, flight: _Flight, digests: list[FileDigest | None]) -> Path:
        temporary, tensors = flight.temporary, flight.plan.tensors
        assert tensors is not None  # this is rank 0
        files = {file: digest for file, digest in zip(flight.plan.files, digests, strict=True) if digest is not None}
        files[RUN_FILE] = write_bytes(temporary / RUN_FILE, flight.run)
        manifest = Manifest(flight.iteration, files, tensors, self._form)
        write_bytes(temporary / MANIFEST, manifest.to_bytes())
        for folder in {temporary / Path(name).parent for name in files}:
            directory.sync_directory(folder)
        path = directory.commit(self.root, temporary, flight.iteration)
        self._retention.apply(self.root, flight.iteration)
        return path

    def _discard(self, temporary: Path) -> None:
        if self.ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)  # a full disk should not stay full


def _result(commit: Writing[Path] | None) -> Path:
    assert commit is not None  # this is rank 0
    return commit.result()


def _part(place: tuple[str, tuple[int, ...]], entry: str, tensor: Tensor) -> Part:
    return Part(entry, tensor.dtype, tuple(tensor.shape), place[1], lambda: tensor)


def _explained(error: OSError, path: Path, parts: list[Part]) -> OSError:
    """A full disk, with the numbers; other errors as they are."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error
    needed, free = sum(part.size for part in parts), shutil.disk_usage(path.parent).free
    text = f"{error.strerror}: {path.name} needs {needed} bytes, {free} are free under {path.parent.parent}"
    return OSError(error.errno, text)


def _run_file(iteration: int, state: RunState, mesh: ProcessMesh) -> bytes:
    run = {
        "iteration": iteration,
        "layout": layout_of(mesh),
        "torch": torch.__version__,
        "extra": state.extra,
    }
    try:
        text = json.dumps(run, indent=1)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"`extra` cannot be written as JSON: {error}") from error
    return text.encode()


def _must_see(path: Path) -> None:
    if not path.is_dir():
        raise CheckpointError(
            f"{path} was made by rank 0 and is not visible here: --save must be on a shared disk"
        )
