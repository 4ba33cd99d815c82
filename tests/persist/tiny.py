"""A model of a few tensors that has everything a checkpoint must cope with, on any mesh, without a model.

A tied table with padded rows (on the first and the last stage), a gated matrix sharded along dimension 1, a
row-parallel one, replicated vectors, bf16, a tensor without dimensions, and locals that are slices of one flat
buffer, as an optimizer's are.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from megackpt.config.parallel import ParallelConfig
from megackpt.mesh.device import DeviceSeam
from megackpt.mesh.layout import MeshShape
from megackpt.mesh.parameter import ParameterRecord
from megackpt.mesh.process_mesh import ProcessMesh, single_axis
from megackpt.persist import NamedShard, RunState


@dataclass(frozen=True)
class Row:
    name: str
    record: ParameterRecord
    stages: tuple[int, ...]  # 0 the first, -1 the last
    dtype: torch.dtype = torch.float32


def rows(table_rows: int = 8, valid: int = 7) -> list[Row]:
    table = ParameterRecord((table_rows, 4), shard_dim=0, tied=True, valid=valid)
    return [
        Row("embedding.word.weight", table, (0, -1)),
        Row("layers.0.attn.norm.weight", ParameterRecord((4,)), (0,)),
        Row("layers.0.mlp.up.weight", ParameterRecord((2, 6, 4), shard_dim=1), (0,)),
        Row("layers.1.mlp.down.weight", ParameterRecord((4, 6), shard_dim=1), (-1,), torch.bfloat16),
        Row("layers.1.mlp.scale", ParameterRecord(()), (-1,)),
    ]


def full(key: str, row: Row, seed: int) -> Tensor:
    """The whole tensor of `key`: the same on every layout; padding rows are zero."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{key}{seed}".encode()))
    shape, valid = list(row.record.global_shape), row.record.valid
    if valid is None:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(row.dtype)
    values = torch.randn([valid, *shape[1:]], generator=generator, dtype=torch.float64).to(row.dtype)
    return torch.cat([values, values.new_zeros(shape[0] - valid, *shape[1:])])


def shard(whole: Tensor, record: ParameterRecord, mesh: ProcessMesh) -> Tensor:
    return whole if record.shard_dim is None else whole.chunk(mesh.tp.size, record.shard_dim)[mesh.tp.index]


def expected(mesh: ProcessMesh, seed: int, table: list[Row] | None = None) -> list[tuple[str, Row, Tensor]]:
    """Key, row and this rank's part of every tensor that lives here."""
    here = {0} if mesh.pp.index == 0 else set()
    here |= {-1} if mesh.pp.index == mesh.pp.size - 1 else set()
    present = [row for row in table or rows() if here & set(row.stages)]
    keys = [(f"{kind}.{row.name}", row) for kind in ("model", "optimizer.exp_avg") for row in present]
    return [(key, row, shard(full(key, row, seed), row.record, mesh)) for key, row in keys]


def state_of(mesh: ProcessMesh, seed: int | None, table: list[Row] | None = None) -> RunState:
    """The state of this rank; `seed` None gives the same tensors filled with another value, to load into."""
    wanted = expected(mesh, seed or 0, table)
    flat = torch.full((sum(part.numel() for _, _, part in wanted),), -7.0)
    tensors, start = [], 0
    for key, row, part in wanted:
        view = flat[start : start + part.numel()].view(part.shape)
        start += part.numel()
        local = view if row.dtype == torch.float32 else view.to(row.dtype)
        if seed is not None:
            local.copy_(part)
        tensors.append(NamedShard(key, local, row.record))
    mark = -1 if seed is None else 1000 * seed + mesh.rank
    per_rank = {
        "stream.tensor": torch.tensor(mark),
        "default": torch.full((5,), mark % 251, dtype=torch.uint8),
    }
    return RunState(tensors, per_rank, {"iteration": seed, "loss": 0.1 + 0.2, "layers": [1, 2]})


def same(state: RunState, mesh: ProcessMesh, seed: int, table: list[Row] | None = None) -> bool:
    """Whether the tensors (not the per-rank items) hold the values of `seed`, bit for bit."""
    wanted = {key: part for key, _, part in expected(mesh, seed, table)}
    return len(wanted) == len(state.tensors) and all(
        torch.equal(t.local, wanted[t.key]) for t in state.tensors
    )


def lone_mesh() -> ProcessMesh:
    """The mesh of a process without any process group."""
    axis, shape = single_axis(), MeshShape()
    return ProcessMesh(shape, 0, shape.coordinates(0), *[axis] * (len(fields(ProcessMesh)) - 3))


def mesh_of(world_size: int, tp: int = 1, pp: int = 1) -> ProcessMesh:
    parallel = ParallelConfig(tensor=tp, pipeline=pp, world_size=world_size)
    return ProcessMesh.create(parallel, DeviceSeam("cpu", torch.device("cpu"), "gloo"))
