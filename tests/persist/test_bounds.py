"""What a save and a load cost a rank, as the operating system counts it: bytes read, and memory at the peak."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from megackpt.mesh.device import DeviceSeam
from megackpt.mesh.parameter import ParameterRecord
from megackpt.mesh.process_mesh import ProcessMesh
from megackpt.persist import HostCopy, NamedShard, RunState, Saver, load, save
from megackpt.persist.tensor_file import BLOCK
from tests.persist.tiny import lone_mesh, mesh_of
from tests.pool import run_distributed

ROWS, COLUMNS = 2048, 3072
TENSOR = ROWS * COLUMNS * 4  # 24 MiB
TABLES = {
    "by_rows": ParameterRecord((ROWS, COLUMNS), shard_dim=0),
    "by_columns": ParameterRecord((ROWS, COLUMNS), shard_dim=1),
    "copied": ParameterRecord((ROWS, COLUMNS)),
}
WHOLE = len(TABLES) * TENSOR
SLACK = 3 << 20  # Python's own objects, the manifest, exchanges with other ranks


def big(mesh: ProcessMesh, value: float) -> RunState:
    """Tensors of many blocks; every page of them is touched."""
    shapes = {name: record.local_shape(mesh.tp.size) for name, record in TABLES.items()}
    return RunState([NamedShard(f"model.{n}", torch.full(shapes[n], value), TABLES[n]) for n in TABLES])


def bytes_read() -> int:
    """Of all read calls of this process so far, from cache or disk."""
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["rchar"])


def forget_peak() -> int:
    """Start a new peak of resident memory; bytes resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(what: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) << 10


def costs(rank: int, world: int, root: str, tp: int, pp: int) -> tuple[int, int, int, bool]:
    """Bytes wanted, bytes read and bytes held by a load, and whether the values are right."""
    mesh = mesh_of(world, tp, pp)
    state = big(mesh, -1.0)
    load(root, state, mesh, want={"model"})  # modules that are imported late, page tables
    for shard in state.tensors:
        shard.local.fill_(-1.0)
    torch.distributed.barrier()
    before, held = bytes_read(), forget_peak()
    load(root, state, mesh, want={"model"})
    peak, read = resident("VmHWM"), bytes_read()
    wanted = sum(shard.local.numel() * 4 for shard in state.tensors)
    return wanted, read - before, peak - held, all(bool((s.local == 1.0).all()) for s in state.tensors)


def save_big(rank: int, world: int, root: str, tp: int) -> None:
    mesh = mesh_of(world, tp)
    save(root, 1, big(mesh, 1.0), mesh)


@pytest.mark.parametrize(("saved", "loaded"), [((1, 1), (2, 2)), ((2, 2), (4, 2)), ((2, 2), (1, 1))], ids=str)
def test_a_rank_reads_what_it_needs_and_its_share_of_the_check(
    tmp_path: Path, saved: tuple[int, int], loaded: tuple[int, int]
) -> None:
    run_distributed(save_big, saved[0], str(tmp_path), saved[1])
    files = {p.name: p.stat().st_size for p in (tmp_path / "iter_0000001").iterdir() if p.name != "manifest.json"}
    world, tp = loaded
    found = run_distributed(costs, world, str(tmp_path), tp, 1)
    for rank, (wanted, read, held, right) in enumerate(found):
        assert right
        checked = sum(files[name] for name in sorted(files)[rank::world])
        assert wanted <= read - checked <= wanted + (64 << 10), (rank, wanted, read, checked)
        assert held <= BLOCK + SLACK, held


def test_a_blocking_save_holds_a_block(tmp_path: Path) -> None:
    run_distributed(_blocking, 1, str(tmp_path))


def _blocking(rank: int, world: int, root: str) -> None:
    mesh = lone_mesh()
    state = big(mesh, 1.0)
    save(root, 1, state, mesh)
    held = forget_peak()
    save(root, 2, state, mesh)
    assert resident("VmHWM") - held <= BLOCK + SLACK


def test_a_background_save_holds_a_copy_of_what_it_writes_and_only_one(tmp_path: Path) -> None:
    run_distributed(_background, 1, str(tmp_path))


def _background(rank: int, world: int, root: str) -> None:
    mesh = lone_mesh()
    state = big(mesh, 1.0)
    save(root, 1, state, mesh)
    saver = Saver(root, mesh, host_copy=HostCopy(DeviceSeam("cpu", torch.device("cpu"), "gloo")))
    held = forget_peak()
    for iteration in (2, 3):
        saver.save(iteration, state)
    saver.finish()
    assert WHOLE <= resident("VmHWM") - held <= WHOLE + BLOCK + SLACK
    assert sorted(os.listdir(root))[:3] == ["iter_0000001", "iter_0000002", "iter_0000003"]
