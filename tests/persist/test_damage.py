"""What is on disk is not trusted: damage of any kind is noticed, named, and the newest whole checkpoint is taken."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from megackpt.config.errors import UsageError
from megackpt.persist import CheckpointError, latest_iteration, load, save
from tests.persist.tiny import lone_mesh, mesh_of, same, state_of
from tests.pool import run_distributed

TRACKER = "latest_checkpointed_iteration.txt"
SHARD = "rank_00000.safetensors"


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "flipped-last-byte": (lambda d: flip(d / SHARD, -1), "has changed since it was written"),
    "flipped-byte-in-header": (lambda d: flip(d / SHARD, 40), "has changed since it was written"),
    "truncated": (lambda d: truncate(d / SHARD), "bytes instead of"),
    "grown": (lambda d: grow(d / SHARD), "bytes instead of"),
    "shard-gone": (lambda d: (d / SHARD).unlink(), f"{SHARD} is missing"),
    "run-file-gone": (lambda d: (d / "run.json").unlink(), "run.json is missing"),
    "run-file-changed": (lambda d: flip(d / "run.json", 20), "run.json has changed"),
    "manifest-gone": (lambda d: (d / "manifest.json").unlink(), "no manifest.json"),
    "manifest-truncated": (lambda d: truncate_to_half(d / "manifest.json"), "manifest.json is damaged"),
    "manifest-number-changed": (
        lambda d: edit(d / "manifest.json", '"iteration":10', '"iteration":11'),
        "own digest",
    ),
    "directory-gone": (lambda d: shutil.rmtree(d), "no such directory"),
}


def truncate_to_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for iteration in (5, 10):
        save(tmp_path, iteration, state_of(lone_mesh(), iteration), lone_mesh())
    return tmp_path


def loaded(root: Path, **options: int) -> tuple[int, tuple[str, ...]]:
    state = state_of(lone_mesh(), None)
    report = load(root, state, lone_mesh(), **options)  # type: ignore[arg-type]
    assert report is not None and report.extra["iteration"] == report.iteration
    assert same(state, lone_mesh(), report.iteration)
    assert int(state.per_rank["stream.tensor"]) == 1000 * report.iteration
    return report.iteration, report.messages


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_noticed_and_the_checkpoint_before_is_taken(root: Path, damage: str) -> None:
    harm, reason = DAMAGES[damage]
    harm(root / "iter_0000010")
    iteration, messages = loaded(root)
    assert iteration == 5
    assert len(messages) == 1
    assert "iter_0000010 is not whole: " in messages[0] and reason in messages[0]
    assert messages[0].endswith(": loading iter_0000005 instead")


@pytest.mark.parametrize("damage", DAMAGES)
def test_no_whole_checkpoint_is_an_error_that_says_why(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 10, state_of(lone_mesh(), 10), lone_mesh())
    harm, reason = DAMAGES[damage]
    harm(tmp_path / "iter_0000010")
    state = state_of(lone_mesh(), None)
    with pytest.raises(UsageError, match="no checkpoint can be loaded") as caught:
        load(tmp_path, state, lone_mesh())
    assert reason in str(caught.value)
    assert all(bool((shard.local == -7).all()) for shard in state.tensors)  # and nothing was touched


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mp_rank_00/model_optim_rng.pt", r"looks like one of Megatron-LM \(megackpt convert reads those\)"),
        (".metadata", "whose index is a pickle: it is not read"),
    ],
)
def test_a_checkpoint_of_another_program_is_called_one(tmp_path: Path, name: str, said: str) -> None:
    file = tmp_path / "iter_0000010" / name
    file.parent.mkdir(parents=True)
    file.write_bytes(b"x")
    with pytest.raises(UsageError, match=said):
        load(tmp_path, state_of(lone_mesh(), None), lone_mesh())


def test_every_single_byte_counts(tmp_path: Path) -> None:
    """Flip one bit at a spread of places of every file: it is noticed."""
    save(tmp_path, 10, state_of(lone_mesh(), 10), lone_mesh())
    directory = tmp_path / "iter_0000010"
    for name in ("manifest.json", "run.json", SHARD):
        size = (directory / name).stat().st_size
        for position in range(0, size, max(1, size // 23)):
            flip(directory / name, position)
            with pytest.raises(UsageError):
                loaded(tmp_path)
            flip(directory / name, position)
    assert loaded(tmp_path) == (10, ())


def test_a_tensor_taken_out_of_a_file_is_named(tmp_path: Path) -> None:
    save(tmp_path, 10, state_of(lone_mesh(), 10), lone_mesh())
    path = tmp_path / "iter_0000010" / SHARD
    tensors = load_file(path)
    del tensors["model.layers.0.mlp.up.weight"]
    save_file(tensors, path)
    with pytest.raises(UsageError, match=r"it lacks model\.layers\.0\.mlp\.up\.weight$"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("content", "iteration", "message"),
    [
        (None, 10, "it has no latest_checkpointed_iteration.txt; trying the newest"),
        ("ten", 10, "holds 'ten', not an iteration number; trying the newest"),
        ("", 10, "holds '', not an iteration number"),
        ("15", 10, "iter_0000015 is not whole: there is no such directory: loading iter_0000010 instead"),
        ("7", 5, "loading iter_0000005 instead"),
        ("5", 5, None),
        ("5\n", 5, None),
    ],
)
def test_the_tracker_is_followed_where_it_can_be(
    root: Path, content: str | None, iteration: int, message: str | None
) -> None:
    (root / TRACKER).unlink()
    if content is not None:
        (root / TRACKER).write_text(content)
    got, messages = loaded(root)
    assert got == iteration
    assert len(messages) == (message is not None) and (message or "") in "".join(messages)
    assert latest_iteration(root) == (5 if content in ("5", "5\n") else 10)


def test_older_ones_come_before_newer_ones_that_the_tracker_does_not_name(root: Path) -> None:
    save(root, 7, state_of(lone_mesh(), 7), lone_mesh())  # a run that went back to 5 and on from there
    truncate(root / "iter_0000007" / SHARD)
    assert loaded(root)[0] == 5
    shutil.rmtree(root / "iter_0000005")
    assert loaded(root)[0] == 10


def test_a_named_iteration_is_that_one_or_an_error(root: Path) -> None:
    assert loaded(root, iteration=5) == (5, ())
    with pytest.raises(UsageError, match=r"no checkpoint of iteration 6; it has \[5, 10\]"):
        loaded(root, iteration=6)
    truncate(root / "iter_0000010" / SHARD)
    with pytest.raises(UsageError, match="iter_0000010 is not whole"):
        loaded(root, iteration=10)


def test_nothing_there_is_none(tmp_path: Path) -> None:
    assert load(tmp_path, state_of(lone_mesh(), None), lone_mesh()) is None
    assert load(tmp_path / "absent", state_of(lone_mesh(), None), lone_mesh()) is None
    assert latest_iteration(tmp_path / "absent") is None


def test_nothing_is_unpickled(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a pickle was read")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    assert loaded(root) == (10, ())


def load_damaged(rank: int, world_size: int, root: str) -> tuple[int, tuple[str, ...], bool]:
    mesh = mesh_of(world_size, 2)
    for iteration in (5, 10):
        save(root, iteration, state_of(mesh, iteration), mesh)
    if rank == 0:
        flip(Path(root) / "iter_0000010" / "rank_00001.safetensors", -3)
    torch.distributed.barrier()
    state = state_of(mesh, None)
    report = load(root, state, mesh)
    assert report is not None
    return report.iteration, report.messages, same(state, mesh, 5)


def unreadable_on_one(rank: int, world_size: int, root: str) -> str:
    """The file is whole when it is checked and gone when rank 1 opens it; its error cannot even be pickled."""
    mesh = mesh_of(world_size, 2)
    save(root, 5, state_of(mesh, 5), mesh)
    error = OSError("gone")
    error.cause_of_trouble = lambda: None  # type: ignore[attr-defined]
    broken = mock.patch("megackpt.persist.load.open_file", side_effect=error)
    with broken if rank == 1 else nullcontext(), pytest.raises(CheckpointError) as caught:
        load(root, state_of(mesh, None), mesh)
    return str(caught.value)


def test_an_error_while_reading_reaches_all_ranks(tmp_path: Path) -> None:
    messages = run_distributed(unreadable_on_one, 2, str(tmp_path), timeout=30)
    assert messages == ["could not load: rank 1: OSError: gone"] * 2


def test_all_ranks_fall_back_to_the_same_checkpoint(tmp_path: Path) -> None:
    first, second = run_distributed(load_damaged, 2, str(tmp_path), timeout=30)
    assert first == second
    assert first[0] == 5 and first[2] and "rank_00001.safetensors has changed" in first[1][0]
