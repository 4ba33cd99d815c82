"""Saves beside training: what was there when `save` was called is what is saved, one at a time, whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from megackpt.mesh.device import DeviceSeam
from megackpt.mesh.process_mesh import ProcessMesh
from megackpt.persist import CheckpointError, HostCopy, Retention, RunState, Saver, latest_iteration, load, writing
from megackpt.persist.retention import KEEP_ALL
from megackpt.persist.tensor_file import write_tensors
from megackpt.persist.torch_file import write_document
from tests.persist.tiny import lone_mesh, mesh_of, same, state_of
from tests.pool import run_distributed

SEAM = DeviceSeam("cpu", torch.device("cpu"), "gloo")


def beside(root: str | Path, mesh: ProcessMesh, form: str = "torch_dist", retention: Retention = KEEP_ALL) -> Saver:
    return Saver(root, mesh, host_copy=HostCopy(SEAM), form=form, retention=retention)


class Gate:
    """Holds writers back until it is opened; counts how many write at once."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.entered = threading.Event()
        self.now = self.most = 0
        self._lock = threading.Lock()

    def through(self, write: Callable[..., object]) -> Callable[..., object]:
        def gated(*arguments: object) -> object:
            with self._lock:
                self.now += 1
                self.most = max(self.most, self.now)
            self.entered.set()
            assert self.open.wait(30)
            try:
                return write(*arguments)
            finally:
                with self._lock:
                    self.now -= 1

        return gated


@contextlib.contextmanager
def gated() -> Iterator[Gate]:
    gate = Gate()
    with (
        mock.patch("megackpt.persist.save.write_tensors", gate.through(write_tensors)),
        mock.patch("megackpt.persist.save.write_document", gate.through(write_document)),
    ):
        yield gate
        gate.open.set()


def overwrite(state: RunState) -> None:
    """Training goes on: every tensor changes."""
    for shard in state.tensors:
        shard.local.fill_(99)
    for tensor in state.per_rank.values():
        tensor.fill_(99)


def holds(root: str | Path, mesh: ProcessMesh, seed: int) -> bool:
    state = state_of(mesh, None)
    report = load(root, state, mesh)
    assert report is not None and report.extra["iteration"] == report.iteration == seed
    right = int(state.per_rank["stream.tensor"]) == 1000 * seed + mesh.rank
    return right and same(state, mesh, seed)


def goes_on(rank: int, world: int, root: str, tp: int, pp: int, form: str) -> None:
    mesh = mesh_of(world, tp, pp)
    saver, state = beside(root, mesh, form), state_of(mesh, 5)
    with gated() as gate:
        assert saver.save(5, state) is None
        assert saver.busy and saver.poll() is None and latest_iteration(root) is None
        overwrite(state)
        gate.open.set()
        deadline = time.monotonic() + 30
        while (path := saver.poll()) is None:
            assert time.monotonic() < deadline
    assert path == Path(root) / "iter_0000005" and not saver.busy
    assert saver.poll() is None and saver.finish() is None
    assert holds(root, mesh, 5)


@pytest.mark.parametrize("form", ["torch_dist", "torch"])
@pytest.mark.parametrize(("world", "tp", "pp"), [(1, 1, 1), (2, 2, 1), (4, 2, 2), (2, 1, 1)])
def test_training_goes_on_while_a_save_is_written(tmp_path: Path, world: int, tp: int, pp: int, form: str) -> None:
    run_distributed(goes_on, world, str(tmp_path), tp, pp, form, timeout=60)  # CD-05


def one_after_the_other(rank: int, world: int, root: str) -> int:
    mesh = mesh_of(world, 2)
    saver = beside(root, mesh)
    with gated() as gate:
        saver.save(1, state_of(mesh, 1))
        assert gate.entered.wait(30)
        threading.Timer(0.2, gate.open.set).start()
        for iteration in (2, 3):
            saver.save(iteration, state_of(mesh, iteration))
            assert latest_iteration(root) == iteration - 1  # the one before is whole before the next begins
        assert saver.finish() == Path(root) / "iter_0000003"
    assert holds(root, mesh, 3)
    return gate.most


def test_never_two_at_once(tmp_path: Path) -> None:
    assert run_distributed(one_after_the_other, 2, str(tmp_path), timeout=60) == [1, 1]


def fails_on_one(rank: int, world: int, root: str, at: str) -> str:
    mesh = mesh_of(world, 2)
    saver = beside(root, mesh)
    saver.save(5, state_of(mesh, 5))
    saver.finish()
    full_disk = mock.patch(
        "megackpt.persist.tensor_file.os.fsync", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    )
    with full_disk if rank == 1 else contextlib.nullcontext():
        assert saver.save(9, state_of(mesh, 9)) is None
        with pytest.raises(CheckpointError) as caught:
            if at == "poll":
                while saver.poll() is None:
                    time.sleep(0.001)
            elif at == "finish":
                saver.finish()
            else:
                saver.save(10, state_of(mesh, 10))
    assert not saver.busy and holds(root, mesh, 5)
    saver.save(11, state_of(mesh, 11))
    saver.finish()
    assert holds(root, mesh, 11)  # the failure leaves nothing behind
    return str(caught.value)


@pytest.mark.parametrize("at", ["poll", "finish", "next-save"])
def test_a_writer_that_fails_is_reported_on_all_ranks(tmp_path: Path, at: str) -> None:
    first, second = run_distributed(fails_on_one, 2, str(tmp_path), at, timeout=60)
    assert first == second
    assert first.startswith("could not save: rank 1: OSError: [Errno 28] No space left on device: rank_00001.saf")
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["iter_0000005", "iter_0000011"]


def fails_to_commit(rank: int, world: int, root: str) -> str:
    """Rank 0's manifest cannot be written when all files are."""
    mesh = mesh_of(world, 2)
    saver = beside(root, mesh)
    saver.save(5, state_of(mesh, 5))
    saver.finish()
    broken = mock.patch("megackpt.persist.save.write_bytes", side_effect=OSError(errno.EIO, "Input/output error"))
    with broken if rank == 0 else contextlib.nullcontext(), pytest.raises(CheckpointError) as caught:
        saver.save(9, state_of(mesh, 9))
        while saver.poll() is None:
            time.sleep(0.001)
    assert not saver.busy and holds(root, mesh, 5)
    return str(caught.value)


def test_a_commit_that_fails_is_reported_on_all_ranks(tmp_path: Path) -> None:
    said = run_distributed(fails_to_commit, 2, str(tmp_path), timeout=60)
    assert said == ["could not save: rank 0: OSError: [Errno 5] Input/output error"] * 2
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == ["iter_0000005"]


def test_a_run_that_breaks_off_does_not_wait_for_its_writer(tmp_path: Path) -> None:
    """The files are large; leaving takes no longer than a block."""
    mesh = lone_mesh()
    big = RunState([], {"big": torch.zeros(400 << 20, dtype=torch.uint8)})
    saver = beside(tmp_path, mesh)
    saver.save(1, big)
    began = time.monotonic()
    saver.abandon()
    assert time.monotonic() - began < 5 and not saver.busy
    assert not any(thread.name == "checkpoint writer" for thread in threading.enumerate())
    assert latest_iteration(tmp_path) is None
    saver.abandon()  # nothing is under way: nothing happens


def test_the_snapshot_is_reused_and_grows(tmp_path: Path) -> None:
    copy = HostCopy(SEAM)
    first = copy.take([torch.arange(3), torch.ones(2, 2, dtype=torch.bfloat16)])
    place = first[0].data_ptr()
    assert first[0].tolist() == [0, 1, 2] and bool((first[1] == 1).all())
    second = copy.take([torch.arange(2), torch.tensor(True)])
    assert second[0].data_ptr() == place and second[1].item() is True
    third = copy.take([torch.zeros(1000), torch.arange(5, dtype=torch.int16)])
    assert third[1].tolist() == [0, 1, 2, 3, 4] and all(t.data_ptr() % 16 == 0 for t in third)


def changes_its_mind(rank: int, world: int, root: str) -> list[int]:
    """The plan of a save is kept, unless what is saved changes."""
    mesh = mesh_of(world, 2)
    saver, gathers = beside(root, mesh), []
    real = torch.distributed.gather_object
    with mock.patch("torch.distributed.gather_object", lambda *a, **k: (gathers.append(1), real(*a, **k))[1]):
        counts = []
        for iteration in (1, 2, 3):
            state = state_of(mesh, iteration)
            if iteration == 3:
                state.tensors = [s for s in state.tensors if s.key.startswith("model.")]
            saver.save(iteration, state)
            saver.finish()
            counts.append(len(gathers))
    fresh = state_of(mesh, None)
    load(root, fresh, mesh, want={"model"})
    assert bool((fresh.tensors[0].local != -7).all())
    return counts


def test_ranks_plan_a_save_once(tmp_path: Path) -> None:
    assert run_distributed(changes_its_mind, 2, str(tmp_path), timeout=60) == [[1, 1, 2]] * 2


def test_host_memory_is_taken_in_blocks_that_pinning_does_not_double() -> None:
    """Pinned memory is rounded up to a power of two: a full block is one, and only the last is partly for nothing."""
    block = writing._BLOCK
    places, blocks = writing._places([block - 100, 40, 60, 7, 2 * block + 1, 5])
    assert places == [(0, 0), (0, block - 64), (1, 0), (1, 64), (2, 0), (3, 0)]
    assert blocks == [block - 24, 71, 2 * block + 1, 5]
