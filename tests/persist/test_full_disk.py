"""A disk that fills up in the middle of a save: it is said with the numbers, and what was there stays whole."""

from __future__ import annotations

import errno
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from megackpt.persist import CheckpointError, RunState, Saver, latest_iteration, load, prepare_directory
from megackpt.persist.tensor_file import SummedFile
from tests.persist.test_background import beside
from tests.persist.tiny import lone_mesh

SIZE, BALLAST = 20 << 20, 6 << 20  # three checkpoints fit, a fourth does not


def state(seed: int) -> RunState:
    return RunState([], {"ballast": torch.full((BALLAST,), seed, dtype=torch.uint8)}, {"iteration": seed})


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no permission to mount a small file system")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize("how", ["blocking", "background", "torch"])
def test_a_small_file_system_fills_up(small_disk: Path, how: str) -> None:  # CD-08
    mesh = lone_mesh()
    form = "torch" if how == "torch" else "torch_dist"
    saver = beside(small_disk, mesh) if how == "background" else Saver(small_disk, mesh, form=form)
    for iteration in (1, 2, 3):
        saver.save(iteration, state(iteration))
        saver.finish()
    with pytest.raises(CheckpointError) as caught:
        saver.save(4, state(4))
        saver.finish()
    said = re.search(r"No space left on device: \S+ needs (\d+) bytes, (\d+) are free under", str(caught.value))
    assert said and int(said[1]) >= BALLAST > int(said[2]), str(caught.value)
    assert latest_iteration(small_disk) == 3
    assert sorted(p.name for p in small_disk.iterdir() if p.is_dir()) == [f"iter_000000{i}" for i in (1, 2, 3)]
    fresh = state(0)
    assert load(small_disk, fresh, mesh) is not None and bool((fresh.per_rank["ballast"] == 3).all())
    shutil.rmtree(small_disk / "iter_0000001")
    saver.save(5, state(5))  # room was made: the run could have gone on
    saver.finish()
    assert latest_iteration(small_disk) == 5 and prepare_directory(small_disk) == []


@pytest.mark.parametrize("bytes_left", [0, 1, 5 << 20, BALLAST + 100])
def test_writes_that_fail_anywhere(tmp_path: Path, bytes_left: int) -> None:
    """The same without a file system: the write after so many bytes fails."""
    mesh, left = lone_mesh(), [bytes_left]
    saver = Saver(tmp_path, mesh)
    saver.save(1, state(1))
    real = SummedFile.write

    def write(self: SummedFile, data: memoryview | bytes) -> int:
        left[0] -= len(memoryview(data).cast("B"))
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, data)

    with mock.patch.object(SummedFile, "write", write), pytest.raises(CheckpointError, match="No space left on device"):
        saver.save(2, state(2))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000001", "latest_checkpointed_iteration.txt"]
    fresh = state(0)
    assert load(tmp_path, fresh, mesh) is not None and bool((fresh.per_rank["ballast"] == 1).all())
