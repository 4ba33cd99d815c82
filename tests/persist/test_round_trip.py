"""What was saved comes back, on the same and on any other layout, and lies on disk once."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader

from megackpt.mesh.parameter import ParameterRecord
from megackpt.persist import NamedShard, RunState, coordination_group, latest_iteration, load, save
from tests.persist.tiny import Row, full, lone_mesh, mesh_of, rows, same, state_of
from tests.pool import run_distributed


def save_on(rank: int, world_size: int, root: str, tp: int, pp: int, seed: int = 1) -> str:
    mesh = mesh_of(world_size, tp, pp)
    return str(save(root, seed, state_of(mesh, seed), mesh))


def load_on(
    rank: int, world_size: int, root: str, tp: int, pp: int
) -> tuple[bool, list[int], bool, tuple[str, ...]]:
    mesh = mesh_of(world_size, tp, pp)
    state = state_of(mesh, None)
    report = load(root, state, mesh)
    assert report is not None
    marks = [int(state.per_rank["stream.tensor"]), int(state.per_rank["default"][4])]
    return same(state, mesh, 1), marks, report.rng_loaded, report.messages


def test_one_process_without_a_group_gets_everything_back_bit_for_bit(tmp_path: Path) -> None:
    mesh = lone_mesh()
    where = save(tmp_path, 10, state_of(mesh, 3), mesh)
    assert where == tmp_path / "iter_0000010"
    assert sorted(p.name for p in where.iterdir()) == ["manifest.json", "rank_00000.safetensors", "run.json"]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "10"
    assert latest_iteration(tmp_path) == 10
    state = state_of(mesh, None)
    report = load(tmp_path, state, mesh)
    assert report is not None and report.iteration == 10 and report.messages == () and report.rng_loaded
    assert report.extra == {"iteration": 3, "loss": 0.1 + 0.2, "layers": [1, 2]}
    assert same(state, mesh, 3)
    assert int(state.per_rank["stream.tensor"]) == 3000


def with_a_group(rank: int, world_size: int, root: str) -> tuple[bool, bool]:
    mesh, group = mesh_of(world_size, 2), torch.distributed.new_group(backend="gloo")
    state = state_of(mesh, None)
    save(root, 1, state_of(mesh, 1), mesh, group)
    load(root, state, mesh, group=group)
    return same(state, mesh, 1), coordination_group(timedelta(seconds=30)) is None


def test_exchanges_can_go_through_a_group_of_their_own(tmp_path: Path) -> None:
    """As where the default group is NCCL's; with gloo as default none is made."""
    assert run_distributed(with_a_group, 2, str(tmp_path)) == [(True, True)] * 2


def test_parameters_that_require_grad_are_filled_in_place(tmp_path: Path) -> None:
    mesh, record = lone_mesh(), ParameterRecord((3,))
    saved = torch.nn.Parameter(torch.tensor([1.0, 2.0, float("nan")]))
    save(tmp_path, 1, RunState([NamedShard("model.w", saved, record)]), mesh)
    fresh = torch.nn.Parameter(torch.zeros(3))
    load(tmp_path, RunState([NamedShard("model.w", fresh, record)]), mesh)
    assert torch.equal(fresh.detach().view(torch.int32), saved.detach().view(torch.int32))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, 2, 1), (1, 1, 1)),
        ((2, 1, 1), (1, 1, 1)),
        ((1, 1, 1), (2, 2, 1)),
        ((2, 1, 2), (2, 2, 1)),
        ((4, 2, 2), (4, 1, 2)),
    ],
    ids=["tp2-to-1", "dp2-to-1", "1-to-tp2", "pp2-to-tp2", "tp2pp2-to-dp2pp2"],
)
def test_any_layout_loads_what_another_saved(
    tmp_path: Path, before: tuple[int, int, int], after: tuple[int, int, int]
) -> None:
    run_distributed(save_on, before[0], str(tmp_path), *before[1:])
    for whole, marks, rng_loaded, messages in run_distributed(load_on, after[0], str(tmp_path), *after[1:]):
        assert whole
        assert (
            marks == [-1, 250] and not rng_loaded
        )  # another layout's streams are left alone, and that is said
        assert len(messages) == 1 and messages[0].startswith("RNG states are those of tp=")


def test_every_rank_gets_its_own_rng_states_back(tmp_path: Path) -> None:
    run_distributed(save_on, 4, str(tmp_path), 2, 1)
    loaded = run_distributed(load_on, 4, str(tmp_path), 2, 1)
    assert [marks for _, marks, _, _ in loaded] == [[1000 + rank, (1000 + rank) % 251] for rank in range(4)]
    assert all(whole and rng and not messages for whole, _, rng, messages in loaded)


@pytest.mark.parametrize(("world", "tp", "pp"), [(4, 2, 1), (4, 2, 2), (2, 1, 1)])
def test_replicas_and_tied_copies_are_on_disk_once(tmp_path: Path, world: int, tp: int, pp: int) -> None:
    directory = Path(run_distributed(save_on, world, str(tmp_path), tp, pp)[0])
    manifest = json.loads((directory / "manifest.json").read_text())["manifest"]
    for kind in ("model", "optimizer.exp_avg"):
        for row in rows():
            entry = manifest["tensors"][f"{kind}.{row.name}"]
            assert tuple(entry["shape"]) == row.record.global_shape
            assert len(entry["parts"]) == (1 if row.record.shard_dim is None else tp)
            assert entry.get("valid") == row.record.valid
    assert sum(key.startswith("rng.") for key in manifest["tensors"]) == 2 * world
    data = sum(size - header_bytes(directory / name) for name, size in tensor_files(directory).items())
    per_kind = 8 * 4 * 4 + 4 * 4 + 2 * 6 * 4 * 4 + 4 * 6 * 2 + 4
    assert data == 2 * per_kind + world * (8 + 5)


def tensor_files(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in directory.glob("*.safetensors")}


def header_bytes(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def save_t0(rank: int, world_size: int, root: str) -> int:
    """T0's shapes at tp 2, every local a slice of one flat buffer; returns the bytes of the tensors."""
    mesh, h, f = mesh_of(world_size, 2), 96, 336
    shapes: dict[str, tuple[tuple[int, ...], int | None]] = {
        "embedding": ((512, h), 0),
        "position": ((40, h), None),
    }
    for i in range(4):
        shapes |= {f"{i}.qkv": ((3 * h, h), 0), f"{i}.qkv.bias": ((3 * h,), 0), f"{i}.proj": ((h, h), 1)}
        shapes |= {f"{i}.up": ((f, h), 0), f"{i}.up.bias": ((f,), 0), f"{i}.down": ((h, f), 1)}
        shapes |= {
            f"{i}.{name}": ((h,), None)
            for name in ("norm", "norm.bias", "proj.bias", "norm2", "norm2.bias", "down.bias")
        }
    kinds = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
    flat, tensors, start = torch.randn(3_000_000), [], 0
    for kind in kinds:
        for name, (shape, dim) in shapes.items():
            record = ParameterRecord(shape, shard_dim=dim)
            local = record.local_shape(2)
            count = torch.Size(local).numel()
            tensors.append(
                NamedShard(f"{kind}.layers.{name}.weight", flat[start : start + count].view(local), record)
            )
            start += count
    save(root, 1, RunState(tensors), mesh)
    return len(kinds) * sum(torch.Size(shape).numel() * 4 for shape, _ in shapes.values())


def test_bytes_on_disk_are_those_of_the_tensors(tmp_path: Path) -> None:
    tensor_bytes = run_distributed(save_t0, 2, str(tmp_path))[0]
    disk = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert tensor_bytes < disk <= 1.05 * tensor_bytes


def test_a_table_with_other_padding_keeps_its_valid_rows(tmp_path: Path) -> None:
    mesh = lone_mesh()
    for there, here in ((8, 12), (12, 8)):
        save(tmp_path, there, state_of(mesh, 1, rows(there)), mesh)
        state = state_of(mesh, None, rows(here))
        assert load(tmp_path, state, mesh) is not None
        assert same(state, mesh, 1, rows(here))  # including zeros in all padding rows


def test_torchs_own_reader_and_safetensors_read_our_files(tmp_path: Path) -> None:
    directory = run_distributed(save_on, 2, str(tmp_path), 2, 1)[0]
    row = rows()[2]
    wanted = {"model.layers.0.mlp.up.weight": torch.zeros(row.record.global_shape)}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(wanted, storage_reader=HuggingFaceStorageReader(directory))
    assert torch.equal(wanted["model.layers.0.mlp.up.weight"], full("model.layers.0.mlp.up.weight", row, 1))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.float8_e4m3fn, torch.int32, torch.bool]
)
def test_types_and_empty_and_transposed_tensors(tmp_path: Path, dtype: torch.dtype) -> None:
    mesh = lone_mesh()
    source = torch.tensor([[0.0, 1.0, 0.0], [1.0, 1.0, 0.0]]).to(dtype).t()
    state = RunState([], {"a": source, "empty": torch.zeros(0, 3, dtype=dtype), "long": torch.arange(6)[::2]})
    save(tmp_path, 1, state, mesh)
    fresh = RunState([], {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in state.per_rank.items()})
    load(tmp_path, fresh, mesh)
    assert torch.equal(fresh.per_rank["a"].float(), source.float())
    assert fresh.per_rank["long"].tolist() == [0, 2, 4]


def test_a_row_of_the_table_is_what_the_helper_says() -> None:
    """The oracle itself: a value of one tensor differs by key and seed, and not by layout."""
    row = Row("w", ParameterRecord((4,)), (0,))
    assert not torch.equal(full("model.w", row, 1), full("model.w", row, 2))
    assert not torch.equal(full("model.w", row, 1), full("optimizer.exp_avg.w", row, 1))
