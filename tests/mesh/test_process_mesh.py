"""Axes and groups on real processes."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megackpt.config.parallel import ParallelConfig
from megackpt.mesh.device import DeviceSeam
from megackpt.mesh.launch import LaunchEnvironment
from megackpt.mesh.layout import MeshShape
from megackpt.mesh.process_mesh import Axis, ProcessMesh
from megackpt.mesh.rendezvous import init_process_group, shutdown
from tests.pool import run_distributed

AXES = ("tp", "cp", "dp", "pp", "model", "world", "embedding", "pp_forward", "pp_backward")
TRANSFERS = ("pp_forward", "pp_backward", "wrap_forward", "wrap_backward")


def _make(tensor: int, pipeline: int, world_size: int) -> ProcessMesh:
    parallel = ParallelConfig(tensor=tensor, pipeline=pipeline, world_size=world_size, timeout_minutes=0.5)
    return ProcessMesh.create(parallel, DeviceSeam.create("cpu"))


def _describe(rank: int, world_size: int, tensor: int, pipeline: int) -> dict[str, Any]:
    made = []
    real = dist.new_group

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(args[0])
        return real(*args, **kwargs)

    dist.new_group = counted
    begun = time.perf_counter()
    mesh = _make(tensor, pipeline, world_size)
    seconds = time.perf_counter() - begun
    dist.new_group = real
    sums = {}
    for name in AXES:
        axis = getattr(mesh, name)
        value = torch.tensor([rank])
        if axis.group is not None:
            dist.all_reduce(value, group=axis.group)
        sums[name] = value.item()
    shared = mesh.pp_forward.group is not None and mesh.pp_forward.group is mesh.pp_backward.group
    ranks = {name: getattr(mesh, name).ranks for name in AXES}
    indices = {name: getattr(mesh, name).index for name in AXES}
    return {
        "ranks": ranks,
        "indices": indices,
        "sums": sums,
        "made": made,
        "shared": shared,
        "seconds": seconds,
    }


@pytest.mark.parametrize(
    ("tensor", "pipeline", "world_size"), [(2, 2, 4), (1, 4, 4), (4, 1, 4), (1, 2, 4), (1, 1, 1)]
)
def test_axes_of_every_rank(tensor: int, pipeline: int, world_size: int) -> None:
    shape = MeshShape(tp=tensor, dp=world_size // tensor // pipeline, pp=pipeline)
    results = run_distributed(_describe, world_size, tensor, pipeline)
    for rank, result in enumerate(results):
        stages = shape.group_of(rank, "pp")
        at_end = pipeline > 1 and rank in (stages[0], stages[-1])
        expected = {
            "tp": shape.group_of(rank, "tp"),
            "cp": (rank,),
            "dp": shape.group_of(rank, "dp"),
            "pp": stages,
            "model": shape.group_of(rank, "tp", "pp"),
            "world": tuple(range(world_size)),
            "embedding": (stages[0], stages[-1]) if at_end else (rank,),
            "pp_forward": stages,
            "pp_backward": stages,
        }
        assert result["ranks"] == expected
        assert result["indices"] == {name: ranks.index(rank) for name, ranks in expected.items()}
        assert result["sums"] == {name: sum(ranks) for name, ranks in expected.items()}
        assert not result["shared"]
        # one group per distinct set of ranks between one and all, and two more for point to point; the stages that
        # have no part in the embedding group build one of their own, so that all ranks build equally many
        sets = {ranks for name, ranks in expected.items() if 1 < len(ranks) < world_size}
        alone = pipeline > 2 and not at_end
        assert len(result["made"]) == len(sets) + (2 if pipeline > 1 else 0) + alone
        assert result["seconds"] < 1
    assert len({len(result["made"]) for result in results}) == 1


def _wrong_size(rank: int, world_size: int) -> str:
    with pytest.raises(ValueError, match="has 4 ranks, but 2 processes were started") as refusal:
        _make(2, 2, 4)
    return str(refusal.value)


def _transfer_groups(rank: int, world_size: int, chunks: int | None, layers: int | None) -> list[int]:
    parallel = ParallelConfig(pipeline=world_size, world_size=world_size, chunks=chunks, layers_per_chunk=layers)
    mesh = ProcessMesh.create(parallel, DeviceSeam.create("cpu"))
    groups = [getattr(mesh, name).group for name in TRANSFERS]
    assert all(getattr(mesh, name).ranks == mesh.pp.ranks for name in TRANSFERS)
    return [groups.index(group) for group in groups]


@pytest.mark.parametrize(("chunks", "layers", "kinds"), [(None, None, 2), (1, None, 2), (3, None, 4), (None, 2, 4)])
def test_messages_round_the_ring_have_groups_of_their_own(chunks: int | None, layers: int | None, kinds: int) -> None:
    """On two stages F messages go both ways once stages have several chunks: four kinds, none behind another."""
    for found in run_distributed(_transfer_groups, 2, chunks, layers):
        assert found == ([0, 1, 2, 3] if kinds == 4 else [0, 1, 0, 1])


def test_a_world_of_another_size_is_refused() -> None:
    assert len(run_distributed(_wrong_size, 2)) == 2


def test_an_axis_has_a_group_exactly_if_it_has_peers() -> None:
    with pytest.raises(ValueError, match="size 2 needs a group"):
        Axis(2, 0, (0, 1), None)
    with pytest.raises(ValueError, match="index 1 over ranks"):
        Axis(1, 1, (0,), None)


def _meet(rank: int, world_size: int, environment: dict[str, str]) -> tuple[str, float]:
    """Leave the group of the test, and join another as if this process had been launched with `environment`."""
    launch = LaunchEnvironment.detect({name: value.format(rank=rank) for name, value in environment.items()})
    parallel = ParallelConfig(tensor=world_size, world_size=world_size, timeout_minutes=0.5)
    seam = DeviceSeam.create("cpu", launch.local_rank)
    shutdown()
    shutdown()  # a second time does nothing
    init_process_group(parallel, launch, seam)
    mesh = ProcessMesh.create(parallel, seam)
    value = torch.tensor([mesh.rank + 1.0])
    if mesh.tp.group is not None:
        dist.all_reduce(value, group=mesh.tp.group)
    return launch.source, value.item()


def test_a_bare_process_meets_itself() -> None:
    assert run_distributed(_meet, 1, {}) == [("single", 1.0)]


def test_tasks_of_srun_meet_on_the_first_host() -> None:
    task = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "localhost,n[1-2]",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "3",
        "SLURM_PROCID": "{rank}",
        "SLURM_LOCALID": "{rank}",
    }
    assert run_distributed(_meet, 3, task) == [("srun", 6.0)] * 3
