"""A save that fails or is killed at any point leaves what was there, and every rank learns of it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

from megackpt.config.errors import UsageError
from megackpt.mesh.parameter import ParameterRecord
from megackpt.persist import (
    CheckpointError,
    NamedShard,
    RunState,
    claimed,
    latest_iteration,
    load,
    prepare_directory,
    save,
)
from megackpt.persist.tensor_file import write_tensors
from tests.persist.tiny import lone_mesh, mesh_of, same, state_of
from tests.pool import ROOT, DistributedFailure, run_distributed


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def seeded(root: Path, *iterations: int) -> dict[str, bytes]:
    for iteration in iterations:
        save(root, iteration, state_of(lone_mesh(), iteration), lone_mesh())
    return files(root)


def loaded_seed(root: Path) -> tuple[int, tuple[str, ...]]:
    state = state_of(lone_mesh(), None)
    report = load(root, state, lone_mesh())
    assert report is not None
    assert same(state, lone_mesh(), report.extra["iteration"])
    return report.extra["iteration"], report.messages


def failing_save(rank: int, world_size: int, root: str, failing: int) -> str:
    mesh = mesh_of(world_size, 2)
    if rank == failing:
        full_disk = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
        patch = mock.patch("megackpt.persist.tensor_file.os.fsync", full_disk)
    else:
        patch = contextlib.nullcontext()
    with patch, pytest.raises(CheckpointError) as caught:
        save(root, 9, state_of(mesh, 9), mesh)
    return str(caught.value)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_write_fails_the_save_on_all_and_leaves_the_previous(tmp_path: Path, failing: int) -> None:
    before = seeded(tmp_path, 5)
    messages = run_distributed(failing_save, 2, str(tmp_path), failing, timeout=30)
    said = rf"could not save: rank {failing}: OSError: \[Errno 28\] No space left on device:"
    said += rf" rank_0000{failing}\.safetensors needs \d+ bytes, \d+ are free under {tmp_path}"
    assert messages[0] == messages[1] and re.fullmatch(said, messages[0])
    assert files(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["iter_0000005"]  # no temporary stays


def save_past_the_limit(rank: int, world_size: int, root: str) -> str:
    """The operating system itself refuses to let rank 1's file grow: it fails in the middle of writing."""
    mesh, soft = mesh_of(world_size), resource.getrlimit(resource.RLIMIT_FSIZE)
    big = RunState([], {"big": torch.zeros(3_000_000, dtype=torch.uint8)})
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, soft[1]))
    try:
        with pytest.raises(CheckpointError) as caught:
            save(root, 9, big, mesh)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft)
    return str(caught.value)


def test_a_file_that_cannot_grow_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    before = seeded(tmp_path, 5)
    for message in run_distributed(save_past_the_limit, 2, str(tmp_path), timeout=30):
        assert "rank 1: OSError: [Errno 27] File too large" in message
    assert files(tmp_path) == before
    assert loaded_seed(tmp_path) == (5, ())


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_after(work: Callable[..., object]) -> Callable[..., object]:
    return lambda *arguments: die(work(*arguments))


def killed_while_writing(rank: int, world_size: int, root: str) -> None:
    """Rank 1 is killed when its tensors are on disk and rank 0 has not heard of it."""
    mesh = mesh_of(world_size, 2)
    if rank == 1:
        mock.patch("megackpt.persist.save.write_tensors", dies_after(write_tensors)).start()
    save(root, 9, state_of(mesh, 9), mesh)


def test_a_kill_between_shards_leaves_the_previous_and_the_next_start_cleans_up(tmp_path: Path) -> None:
    before = seeded(tmp_path, 5)
    (tmp_path / ".iter_0000007.tmp-0badcafe").mkdir()  # and another one, from an earlier accident
    with pytest.raises(DistributedFailure, match="SIGKILL"):
        run_distributed(killed_while_writing, 2, str(tmp_path), timeout=30)
    assert latest_iteration(tmp_path) == 5
    assert loaded_seed(tmp_path) == (5, ())
    assert any(".iter_0000007.tmp-0badcafe" in line for line in prepare_directory(tmp_path))
    assert files(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["iter_0000005"]
    assert prepare_directory(tmp_path) == []


def test_a_root_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "a-file"
    file.touch()
    with pytest.raises(UsageError, match=r"--save .*/a-file: nothing can be written there"):
        prepare_directory(file)
    prepare_directory(tmp_path / "new" / "root")
    assert list((tmp_path / "new" / "root").iterdir()) == []


def test_two_runs_do_not_save_into_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is refused before it clears away what the first is writing; a dead run holds nothing."""
    monkeypatch.setattr("megackpt.persist.directory._LEAVING_SECONDS", 0.2)
    with claimed(tmp_path) as messages:
        assert messages == []
        (tmp_path / ".iter_0000007.tmp-0badcafe").mkdir()
        with pytest.raises(UsageError, match=f"--save {tmp_path}: another run is saving there"), claimed(tmp_path):
            pass
        assert (tmp_path / ".iter_0000007.tmp-0badcafe").is_dir()
    with claimed(tmp_path) as messages:
        assert messages == ["removed .iter_0000007.tmp-0badcafe, left over from an interrupted save"]
    code = f"""
import os, signal
from megackpt.persist import claimed
with claimed({str(tmp_path)!r}):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == -signal.SIGKILL
    with claimed(tmp_path) as messages, claimed(None) as nothing:
        assert messages == nothing == []
    assert list(tmp_path.iterdir()) == []


def killed_at(rank: int, world_size: int, root: str, iteration: int, call: str, count: int) -> None:
    """One process saves seed 6 as `iteration` and is killed at the `count`-th call of os.`call` in directory.py."""
    real, calls = getattr(os, call), []

    def counted(*args: object) -> object:
        calls.append(args)
        return die() if len(calls) == count else real(*args)

    with mock.patch(f"megackpt.persist.directory.os.{call}", counted):
        save(root, iteration, state_of(lone_mesh(), 6), lone_mesh())


@pytest.mark.parametrize(
    ("call", "count", "survivor"),
    [("rename", 1, 5), ("rename", 2, 5), ("replace", 1, 6)],
    ids=["before-the-old-moves", "old-moved-new-not-yet", "before-the-tracker"],
)
def test_a_kill_while_overwriting_loses_neither(tmp_path: Path, call: str, count: int, survivor: int) -> None:
    seeded(tmp_path, 5)
    with pytest.raises(DistributedFailure, match="SIGKILL"):
        run_distributed(killed_at, 1, str(tmp_path), 5, call, count, timeout=30)
    prepare_directory(tmp_path)
    assert loaded_seed(tmp_path) == (survivor, ())
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["iter_0000005"]


@pytest.mark.parametrize(
    ("call", "iterations"), [("rename", ["iter_0000005"]), ("replace", ["iter_0000005", "iter_0000006"])]
)
def test_a_kill_before_the_tracker_moves_leaves_it_at_a_whole_one(
    tmp_path: Path, call: str, iterations: list[str]
) -> None:
    seeded(tmp_path, 5)
    with pytest.raises(DistributedFailure, match="SIGKILL"):
        run_distributed(killed_at, 1, str(tmp_path), 6, call, 1, timeout=30)
    prepare_directory(tmp_path)
    assert latest_iteration(tmp_path) == 5 and loaded_seed(tmp_path) == (5, ())
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == iterations


def test_overwriting_an_iteration_replaces_it(tmp_path: Path) -> None:
    seeded(tmp_path, 5)
    save(tmp_path, 5, state_of(lone_mesh(), 6), lone_mesh())
    assert loaded_seed(tmp_path) == (6, ())
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["iter_0000005"]


def test_an_old_checkpoint_comes_back_when_the_new_one_cannot_be_moved_in(tmp_path: Path) -> None:
    before, real, calls = seeded(tmp_path, 5), os.rename, []

    def second_fails(source: object, target: object) -> None:
        calls.append(source)
        if len(calls) == 2:
            raise PermissionError("no")
        real(source, target)  # type: ignore[arg-type]

    with (
        mock.patch("megackpt.persist.directory.os.rename", second_fails),
        pytest.raises(CheckpointError, match="no"),
    ):
        save(tmp_path, 5, state_of(lone_mesh(), 6), lone_mesh())
    assert files(tmp_path) == before


def wrong_on_one_rank(rank: int, world_size: int, root: str) -> str:
    mesh, rows = mesh_of(world_size), 3 if rank == 0 else 2
    state = RunState([NamedShard("model.w", torch.zeros(rows, 2), ParameterRecord((3, 2)))])
    with pytest.raises(CheckpointError) as caught:
        save(root, 1, state, mesh)
    return str(caught.value)


def disagreeing(rank: int, world_size: int, root: str) -> str:
    mesh = mesh_of(world_size)
    record = ParameterRecord((3 + rank, 2))
    with pytest.raises(CheckpointError) as caught:
        save(root, 1, RunState([NamedShard("model.w", torch.zeros(record.global_shape), record)]), mesh)
    return str(caught.value)


def test_state_that_is_wrong_on_one_rank_is_refused_on_all(tmp_path: Path) -> None:
    for message in run_distributed(wrong_on_one_rank, 2, str(tmp_path), timeout=30):
        assert "rank 1: model.w: local shape [2, 2]" in message
    for message in run_distributed(disagreeing, 2, str(tmp_path), timeout=30):
        assert "ranks disagree about model.w" in message
    assert files(tmp_path) == {} and latest_iteration(tmp_path) is None


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (
            RunState([NamedShard("w", torch.zeros(1), ParameterRecord((1,)))]),
            "begins with one of model, optimizer",
        ),
        (
            RunState([NamedShard("model.w", torch.zeros(1), ParameterRecord((1,)))] * 2),
            "two tensors .* named model.w",
        ),
        (RunState([], {"z": torch.zeros(1, dtype=torch.complex64)}), "complex64 cannot be stored"),
        (RunState([], {}, {"path": Path("x")}), "`extra` cannot be written as JSON"),
    ],
)
def test_state_that_cannot_be_stored_is_refused_before_anything_is_written(
    tmp_path: Path, state: RunState, reason: str
) -> None:
    with pytest.raises(CheckpointError, match=reason):
        save(tmp_path, 1, state, lone_mesh())
    assert list(tmp_path.iterdir()) == []
