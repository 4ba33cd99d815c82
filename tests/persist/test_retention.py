"""Which checkpoints stay: never fewer than asked for, and none goes before a newer one is whole."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest

from megackpt.persist import CheckpointError, Retention, Saver
from megackpt.persist.tensor_file import FileDigest
from tests.persist.test_background import beside, holds
from tests.persist.tiny import lone_mesh, state_of


@pytest.mark.parametrize(
    ("last", "interval", "gone"),
    [
        (None, None, []),
        (1, None, [5, 10, 15, 20, 25]),
        (3, None, [5, 10, 15]),
        (9, None, []),
        (None, 10, [5, 15, 25]),  # as Megatron: the last, and multiples
        (2, 10, [5, 15]),
        (2, 100, [5, 10, 15, 20]),
    ],
)
def test_what_goes(last: int | None, interval: int | None, gone: list[int]) -> None:
    retention = Retention(last, interval)
    assert retention.surplus([5, 10, 15, 20, 25, 30], 30) == gone
    # those of a run that went further before this one went back are not its own to delete
    assert retention.surplus([5, 10, 15, 20, 25, 30, 35, 40], 30) == gone


def directories(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


@pytest.mark.parametrize("background", [False, True])
def test_checkpoints_go_as_new_ones_come(tmp_path: Path, background: bool) -> None:
    mesh, retention = lone_mesh(), Retention(2, 20)
    saver = beside(tmp_path, mesh, retention=retention) if background else Saver(tmp_path, mesh, retention=retention)
    (tmp_path / "iter_0000005").mkdir()  # no checkpoint of ours
    (tmp_path / "iter_0000005" / "model.pt").touch()
    seen = []
    for iteration in (10, 20, 30, 40, 50):
        saver.save(iteration, state_of(mesh, iteration))
        saver.finish()
        seen.append([int(name[5:]) for name in directories(tmp_path)])
        assert holds(tmp_path, mesh, iteration)
    assert seen == [[5, 10], [5, 10, 20], [5, 20, 30], [5, 20, 30, 40], [5, 20, 40, 50]]


def test_a_save_that_fails_costs_no_checkpoint(tmp_path: Path) -> None:
    mesh = lone_mesh()
    saver = Saver(tmp_path, mesh, retention=Retention(1))
    saver.save(1, state_of(mesh, 1))
    with mock.patch("megackpt.persist.directory.os.rename", side_effect=OSError("no")), pytest.raises(CheckpointError):
        saver.save(2, state_of(mesh, 2))
    assert directories(tmp_path) == ["iter_0000001"] and holds(tmp_path, mesh, 1)


def test_nothing_is_deleted_for_a_file_that_reads_back_differently(tmp_path: Path) -> None:
    mesh = lone_mesh()
    saver = Saver(tmp_path, mesh, retention=Retention(1))
    saver.save(1, state_of(mesh, 1))
    bad = mock.patch("megackpt.persist.save.digest_of", return_value=FileDigest(1, "00000000"))
    with bad, pytest.raises(CheckpointError, match=r"rank_00000\.safetensors does not read back as it was written"):
        saver.save(2, state_of(mesh, 2))
    assert directories(tmp_path) == ["iter_0000001"] and holds(tmp_path, mesh, 1)


def test_a_checkpoint_that_cannot_be_deleted_stays_and_training_goes_on(tmp_path: Path) -> None:
    mesh = lone_mesh()
    saver, real = Saver(tmp_path, mesh, retention=Retention(1)), os.rename

    def refuse(source: Path, target: Path) -> None:
        if Path(source).name == "iter_0000001":
            raise PermissionError("no")
        real(source, target)

    saver.save(1, state_of(mesh, 1))
    with mock.patch("megackpt.persist.directory.os.rename", refuse):
        saver.save(2, state_of(mesh, 2))
    assert directories(tmp_path) == ["iter_0000001", "iter_0000002"]
    saver.save(3, state_of(mesh, 3))
    assert directories(tmp_path) == ["iter_0000003"]
