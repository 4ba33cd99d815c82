"""`--ckpt-format torch`: Megatron's folders, safe to read, and loadable at any layout."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from megackpt.persist import CheckpointError, RunState, Saver, load, save
from megackpt.persist.manifest import Manifest, digest_of
from tests.persist.tiny import lone_mesh, mesh_of, rows, same, state_of
from tests.pool import run_distributed


def save_on(rank: int, world: int, root: str, tp: int, pp: int) -> str:
    mesh = mesh_of(world, tp, pp)
    return str(Saver(root, mesh, form="torch").save(1, state_of(mesh, 1)))


def load_on(rank: int, world: int, root: str, tp: int, pp: int) -> tuple[bool, int, int]:
    mesh = mesh_of(world, tp, pp)
    state = state_of(mesh, None)
    report = load(root, state, mesh)
    assert report is not None and report.rng_loaded != bool(report.messages)
    return same(state, mesh, 1), int(state.per_rank["stream.tensor"]), mesh.rank


@pytest.mark.parametrize(
    ("world", "tp", "pp", "files"),
    [
        (1, 1, 1, ["mp_rank_00/model_optim_rng.pt"]),
        (4, 2, 1, ["mp_rank_00/model_optim_rng.pt", "mp_rank_01/model_optim_rng.pt"]),
        (4, 2, 2, [f"mp_rank_{t:02d}_{p:03d}/model_optim_rng.pt" for t in (0, 1) for p in (0, 1)]),
        (2, 1, 2, ["mp_rank_00_000/model_optim_rng.pt", "mp_rank_00_001/model_optim_rng.pt"]),
    ],
)
def test_one_file_per_model_parallel_rank_which_weights_only_reads(
    tmp_path: Path, world: int, tp: int, pp: int, files: list[str]
) -> None:
    directory = Path(run_distributed(save_on, world, str(tmp_path), tp, pp)[0])
    assert sorted(str(path.relative_to(directory)) for path in directory.rglob("*.pt")) == files
    ranks: list[str] = []
    for name in files:
        document = torch.load(directory / name, weights_only=True)
        assert set(document) == {"checkpoint_version", "iteration", "run", "model", "optimizer", "rng_state"}
        assert document["checkpoint_version"] == 3.0 and document["iteration"] == 1
        assert document["run"]["layers"] == [1, 2]
        assert set(document["optimizer"]) == {"exp_avg"}
        assert set(document["optimizer"]["exp_avg"]) == set(document["model"])
        for tensor in document["model"].values():  # CD-06: no view brings its buffer along
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
        ranks += document["rng_state"]
    assert sorted(ranks) == [f"rank_{rank:05d}" for rank in range(world)]
    for row in rows():
        if 0 in row.stages:
            part = torch.load(directory / files[0], weights_only=True)
            assert tuple(part["model"][row.name].shape) == row.record.local_shape(tp)


def test_every_rank_gets_its_own_random_states_back(tmp_path: Path) -> None:
    run_distributed(save_on, 4, str(tmp_path), 2, 1)
    assert run_distributed(load_on, 4, str(tmp_path), 2, 1) == [(True, 1000 + rank, rank) for rank in range(4)]


@pytest.mark.parametrize("saved", [(4, 2, 2), (4, 2, 1), (1, 1, 1)], ids=str)
def test_it_loads_at_any_layout_and_becomes_the_other_format(tmp_path: Path, saved: tuple[int, int, int]) -> None:
    run_distributed(save_on, saved[0], str(tmp_path / "torch"), *saved[1:])
    for world, tp, pp in [(1, 1, 1), (2, 2, 1), (2, 1, 2), (4, 2, 1)]:
        converted = str(tmp_path / f"converted-{world}-{tp}-{pp}")
        loaded = run_distributed(convert_on, world, str(tmp_path / "torch"), converted, tp, pp)
        assert loaded == [True] * world
        assert run_distributed(load_on, 1, converted, 1, 1)[0][0]


def convert_on(rank: int, world: int, source: str, target: str, tp: int, pp: int) -> bool:
    mesh = mesh_of(world, tp, pp)
    state = state_of(mesh, None)
    load(source, state, mesh, want={"model", "optimizer"})
    save(target, 1, state, mesh)
    return same(state, mesh, 1)


# -- what comes from elsewhere -----------------------------------------------------------------------------------------


class Hostile:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


def forged(root: Path, write: Any) -> Path:
    """A checkpoint whose file was exchanged, with a manifest that fits: digests are no protection against that."""
    directory = Saver(root, lone_mesh(), form="torch").save(1, state_of(lone_mesh(), 1))
    assert directory is not None
    file = directory / "mp_rank_00" / "model_optim_rng.pt"
    write(file)
    manifest = Manifest.read(directory)
    manifest.files["mp_rank_00/model_optim_rng.pt"] = digest_of(file)
    (directory / "manifest.json").write_bytes(manifest.to_bytes())
    return file


def without_unsafe_record(file: Path, record: bytes) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", record)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")


FILES = {
    "pickle-in-a-zip": lambda file, mark: torch.save({"model": Hostile(mark)}, file),
    "bare-pickle": lambda file, mark: file.write_bytes(pickle.dumps({"model": Hostile(mark)}) + b" " * 4096),
    "old-format": lambda file, mark: torch.save({"m": Hostile(mark)}, file, _use_new_zipfile_serialization=False),
    "no-pickle": lambda file, mark: file.write_bytes(b"PK\x03\x04" + b"\0" * 4096),
    "empty-zip": lambda file, mark: without_unsafe_record(file, b"\x80\x02" + b"N." * 2000),
    "other-tensors": lambda file, mark: torch.save({"model": {"a": torch.zeros(3000)}}, file),
    "not-a-dictionary": lambda file, mark: torch.save([torch.zeros(3000)], file),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_hostile_file_is_refused_by_name_and_runs_nothing(tmp_path: Path, kind: str) -> None:
    mark = tmp_path / "mark"
    forged(tmp_path / "root", lambda file: FILES[kind](file, mark))
    state = state_of(lone_mesh(), None)
    with pytest.raises(CheckpointError, match=r"mp_rank_00|model_optim_rng\.pt"):
        load(tmp_path / "root", state, lone_mesh())
    assert not mark.exists()


def test_a_transposed_tensor_and_one_without_dimensions(tmp_path: Path) -> None:
    source = torch.arange(6.0).view(2, 3).t()
    Saver(tmp_path, lone_mesh(), form="torch").save(1, RunState([], {"a": source, "b": torch.tensor(7)}))
    fresh = RunState([], {"a": torch.zeros(3, 2), "b": torch.tensor(0)})
    load(tmp_path, fresh, lone_mesh())
    assert torch.equal(fresh.per_rank["a"], source) and fresh.per_rank["b"].item() == 7
