"""Optimizer state that is sharded over data parallelism, in flat ranges, saves, loads and reshards exactly."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megackpt.mesh.parameter import ParameterRecord
from megackpt.mesh.process_mesh import ProcessMesh
from megackpt.persist import CheckpointError, NamedShard, RunState, load, save
from tests.persist.tiny import lone_mesh, mesh_of, rows, same, state_of
from tests.pool import run_distributed


def sharded(state: RunState, mesh: ProcessMesh, lead: int = 0) -> RunState:
    """The same state with the optimizer cut over dp as a flat buffer is: equal parts, wherever they fall.

    `lead`: elements before it in the buffer, so that copies on another stage are cut at other places.
    """
    whole = [shard for shard in state.tensors if shard.key.startswith("optimizer.")]
    rest = [shard for shard in state.tensors if not shard.key.startswith("optimizer.")]
    total = lead + sum(shard.local.numel() for shard in whole)
    share = -(-total // mesh.dp.size)
    first, last = mesh.dp.index * share, (mesh.dp.index + 1) * share
    at, pieces = lead, []
    for shard in whole:
        start, stop = max(0, first - at), min(shard.local.numel(), last - at)
        at += shard.local.numel()
        if start < stop:
            piece = shard.local.reshape(-1)[start:stop].clone()
            pieces.append(replace(shard, local=piece, flat_range=(start, stop)))
    return replace(state, tensors=rest + pieces)


def counted_once(state: RunState, mesh: ProcessMesh) -> RunState:
    """As the model's records say: the last stage's copy of a tied tensor does not count."""
    copy = mesh.pp.size > 1 and mesh.pp.index == mesh.pp.size - 1
    return replace(
        state,
        tensors=[
            replace(s, record=replace(s.record, counted=False)) if copy and s.record.tied else s for s in state.tensors
        ],
    )


def save_sharded(rank: int, world: int, root: str, tp: int, pp: int) -> list[tuple[int, int] | None]:
    mesh = mesh_of(world, tp, pp)
    state = sharded(counted_once(state_of(mesh, 1), mesh), mesh, lead=3 * mesh.pp.index)
    save(root, 1, state, mesh)
    return [shard.flat_range for shard in state.tensors]


def load_whole(rank: int, world: int, root: str, tp: int, pp: int) -> bool:
    mesh = mesh_of(world, tp, pp)
    state = state_of(mesh, None)
    load(root, state, mesh, want={"model", "optimizer"})
    return same(state, mesh, 1)


def load_sharded(rank: int, world: int, root: str, tp: int, pp: int) -> bool:
    mesh = mesh_of(world, tp, pp)
    wanted = sharded(state_of(mesh, 1), mesh, lead=5 * mesh.pp.index)
    state = sharded(state_of(mesh, None), mesh, lead=5 * mesh.pp.index)
    assert [s.flat_range for s in state.tensors] == [s.flat_range for s in wanted.tensors]
    load(root, state, mesh, want={"model", "optimizer"})
    return all(torch.equal(a.local, b.local) for a, b in zip(state.tensors, wanted.tensors, strict=True))


def save_whole(rank: int, world: int, root: str, tp: int, pp: int) -> None:
    mesh = mesh_of(world, tp, pp)
    save(root, 1, state_of(mesh, 1), mesh)


LAYOUTS = [(1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 1, 2), (4, 2, 1), (4, 1, 2), (4, 1, 1), (3, 1, 1)]


@pytest.mark.parametrize("saved", [(2, 1, 1), (4, 2, 1), (4, 1, 2), (3, 1, 1)], ids=str)
def test_a_sharded_optimizer_loads_at_any_layout_sharded_or_not(tmp_path: Path, saved: tuple[int, int, int]) -> None:
    ranges = run_distributed(save_sharded, saved[0], str(tmp_path), *saved[1:])
    # the cuts are where a buffer has them, not at rows
    assert any(flat and flat[0] for of_rank in ranges for flat in of_rank)
    for world, tp, pp in LAYOUTS:
        assert run_distributed(load_whole, world, str(tmp_path), tp, pp) == [True] * world
        assert run_distributed(load_sharded, world, str(tmp_path), tp, pp) == [True] * world


def test_a_whole_optimizer_loads_into_shards(tmp_path: Path) -> None:
    run_distributed(save_whole, 2, str(tmp_path), 2, 1)
    for world, tp, pp in LAYOUTS:
        assert run_distributed(load_sharded, world, str(tmp_path), tp, pp) == [True] * world


def test_shards_are_on_disk_once(tmp_path: Path) -> None:
    """Replicated tensors and tied copies, which each stage cuts differently, included."""
    run_distributed(save_sharded, 4, str(tmp_path), 1, 2)
    directory = tmp_path / "iter_0000001"
    manifest = json.loads((directory / "manifest.json").read_text())["manifest"]["tensors"]
    for row in rows():
        parts = manifest[f"optimizer.exp_avg.{row.name}"]["parts"]
        assert sum(torch.Size(shape).numel() for _, _, shape, _ in parts) == torch.Size(row.record.global_shape).numel()
    files = {}
    for path in directory.glob("*.safetensors"):
        header = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
        files[path.name] = set(header) - {"__metadata__"}
    named = {(file, entry or key) for key, tensor in manifest.items() for file, _, _, entry in tensor["parts"]}
    assert named == {(file, entry) for file, entries in files.items() for entry in entries}


def only_half(rank: int, world: int, root: str) -> str:
    mesh = mesh_of(world)
    piece = NamedShard("optimizer.exp_avg.w", torch.zeros(3), ParameterRecord((3, 2)), (0, 3))
    with pytest.raises(CheckpointError) as caught:
        save(root, 1, RunState([piece]), mesh)
    return str(caught.value)


def test_shards_that_leave_a_gap_are_refused(tmp_path: Path) -> None:
    for message in run_distributed(only_half, 2, str(tmp_path)):
        assert "overlap or leave gaps" in message and "optimizer.exp_avg.w" in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("local", "flat_range", "reason"),
    [
        (torch.zeros(3), (0, 4), r"range 0:4 needs 4 contiguous elements"),
        (torch.zeros(7), (0, 7), r"range 0:7 of a local tensor of shape \[3, 2\]"),
        (torch.zeros(4)[::2], (1, 3), r"needs 2 contiguous elements, not a tensor of shape \[2\] and strides \[2\]"),
    ],
)
def test_a_piece_that_is_not_its_range_is_refused(
    tmp_path: Path, local: torch.Tensor, flat_range: tuple[int, int], reason: str
) -> None:
    state = RunState([NamedShard("optimizer.exp_avg.w", local, ParameterRecord((3, 2)), flat_range)])
    with pytest.raises(CheckpointError, match=reason):
        save(tmp_path, 1, state, lone_mesh())
