"""The process mesh: the axes that this rank lives on, as values handed to constructors.

Groups are few. An axis of size 1 has none (every function that takes an axis is then the identity, without a
collective), an axis that spans all ranks is the default group, and axes over the same ranks share one. Each rank
builds only the groups it belongs to; all ranks build them in the same order of axes, so nobody waits in a circle.
torch names such a group after its ranks and the number of groups that the process has already, so all ranks must
build equally many.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from megackpt.config.errors import UsageError
from megackpt.config.parallel import ParallelConfig
from megackpt.mesh.device import DeviceSeam
from megackpt.mesh.layout import Coordinates, MeshShape


@dataclass(frozen=True)
class Axis:
    """One axis as one rank sees it. `group` is None exactly when `size` is 1."""

    size: int = 1
    index: int = 0  # of this rank, in `ranks`
    ranks: tuple[int, ...] = (0,)  # global ranks, ascending
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if self.size != len(self.ranks) or not 0 <= self.index < self.size:
            raise ValueError(f"axis of size {self.size} with index {self.index} over ranks {self.ranks}")
        if (self.group is None) != (self.size == 1):
            raise ValueError(f"an axis of size {self.size} {'needs a' if self.size > 1 else 'has no'} group")


@dataclass(frozen=True)
class ProcessMesh:
    """All axes of this rank."""

    shape: MeshShape
    rank: int
    coordinates: Coordinates
    tp: Axis
    cp: Axis
    dp: Axis
    pp: Axis
    model: Axis  # tp x pp: the ranks that hold one copy of the model
    world: Axis
    embedding: Axis  # first and last stage, which share a tied weight; size 1 on the stages between
    pp_forward: Axis  # the pp ranks again, for activations only ...
    pp_backward: (
        Axis  # ... and for gradients only: sends that cross never wait for each other in one communicator
    )
    wrap_forward: Axis  # the same once more, from the last stage round to the first: they differ from the two ...
    wrap_backward: Axis  # ... above only where stages have several chunks

    @property
    def world_size(self) -> int:
        return self.shape.world_size

    @staticmethod
    def create(parallel: ParallelConfig, seam: DeviceSeam) -> ProcessMesh:
        """Build the groups of this rank. The default process group must exist; a collective call of all ranks.

        Raises UsageError if the default group has not the size that `parallel` asks for.
        """
        shape = MeshShape(tp=parallel.tensor, cp=parallel.context, dp=parallel.data, pp=parallel.pipeline)
        world_size, rank = dist.get_world_size(), dist.get_rank()
        if shape.world_size != world_size:
            raise UsageError(
                f"a mesh of tp {shape.tp} x cp {shape.cp} x dp {shape.dp} x pp {shape.pp} has {shape.world_size}"
                f" ranks, but {world_size} processes were started"
            )
        builder = _GroupBuilder(rank, world_size, seam.backend, timedelta(minutes=parallel.timeout_minutes))
        return _assemble(shape, rank, builder, parallel.interleaves)


class _GroupBuilder:
    def __init__(self, rank: int, world_size: int, backend: str, timeout: timedelta) -> None:
        self._rank, self._world_size, self._backend, self._timeout = rank, world_size, backend, timeout
        self._known: dict[tuple[int, ...], Axis] = {}

    def shared(self, ranks: tuple[int, ...]) -> Axis:
        """An axis for collectives: one group for one set of ranks."""
        if ranks not in self._known:
            whole = len(ranks) == self._world_size > 1
            self._known[ranks] = self._axis(ranks, dist.group.WORLD) if whole else self.own(ranks)
        return self._known[ranks]

    def own(self, ranks: tuple[int, ...]) -> Axis:
        """An axis with a group that no other axis uses."""
        if len(ranks) == 1:
            return self._axis(ranks, None)
        group = dist.new_group(
            list(ranks), timeout=self._timeout, backend=self._backend, use_local_synchronization=True
        )
        return self._axis(ranks, group)

    def keep_step(self) -> None:
        """Build a group of this rank alone, where others build one that this rank has no part in."""
        dist.new_group(
            [self._rank], timeout=self._timeout, backend=self._backend, use_local_synchronization=True
        )

    def _axis(self, ranks: tuple[int, ...], group: dist.ProcessGroup | None) -> Axis:
        return Axis(len(ranks), ranks.index(self._rank), ranks, group)


def _assemble(shape: MeshShape, rank: int, builder: _GroupBuilder, wraps: bool) -> ProcessMesh:
    shared, own = builder.shared, builder.own
    stages = shape.group_of(rank, "pp")
    at_end = rank in (stages[0], stages[-1])
    if not at_end:
        builder.keep_step()
    embedding = shared(tuple(sorted({stages[0], stages[-1]})) if at_end else (rank,))
    return ProcessMesh(
        shape=shape,
        rank=rank,
        coordinates=shape.coordinates(rank),
        tp=shared(shape.group_of(rank, "tp")),
        cp=shared(shape.group_of(rank, "cp")),
        dp=shared(shape.group_of(rank, "dp")),
        pp=shared(stages),
        model=shared(shape.group_of(rank, "tp", "pp")),
        world=shared(tuple(range(shape.world_size))),
        embedding=embedding,
        pp_forward=(forward := own(stages)),
        pp_backward=(backward := own(stages)),
        wrap_forward=own(stages) if wraps else forward,
        wrap_backward=own(stages) if wraps else backward,
    )


def single_axis(rank: int = 0) -> Axis:
    """The axis of a rank that is alone on it."""
    return Axis(1, 0, (rank,), None)
