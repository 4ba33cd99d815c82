"""Rank arithmetic of the mesh: which rank sits where, and who belongs to whose group. Needs no torch.

Ranks count the tp axis fastest, then cp, dp and pp (Megatron's order), so a tensor-parallel group is a run of
neighbouring ranks inside one node and pipeline stages lie far apart:

    rank = tp + t * (cp + c * (dp + d * pp))
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

AXES = ("tp", "cp", "dp", "pp")  # fastest first


@dataclass(frozen=True)
class Coordinates:
    """Position of one rank on the four axes, each from 0."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the four axes."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for name, size in zip(AXES, self.sizes, strict=True):
            if size < 1:
                raise ValueError(f"axis {name} has size {size}; the least is 1")

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Sizes in rank order, fastest first."""
        return (self.tp, self.cp, self.dp, self.pp)

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` sits. Raises ValueError for a rank outside the mesh."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in a mesh of {self.world_size} ranks")
        place = []
        for size in self.sizes:
            rank, index = divmod(rank, size)
            place.append(index)
        return Coordinates(*place)

    def rank_of(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The rank at these coordinates. Raises ValueError for coordinates outside the mesh."""
        for name, index, size in zip(AXES, (tp, cp, dp, pp), self.sizes, strict=True):
            if not 0 <= index < size:
                raise ValueError(f"{name}={index} is not in a mesh of {name} size {size}")
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """The groups that vary along `axes` and agree on all others, each in ascending order of rank.

        `groups("tp")` are the tensor-parallel groups, `groups("tp", "pp")` the model replicas.
        """
        _refuse_unknown(axes)
        spans = [range(size) if name in axes else None for name, size in zip(AXES, self.sizes, strict=True)]
        fixed = [range(size) if span is None else (0,) for span, size in zip(spans, self.sizes, strict=True)]
        found = []
        for base in product(
            *reversed(fixed)
        ):  # slowest axis outermost: groups come in order of their first rank
            here = dict(zip(reversed(AXES), base, strict=True))
            choices = [
                span if span is not None else (here[name],) for name, span in zip(AXES, spans, strict=True)
            ]
            ranks = [self.rank_of(**dict(zip(AXES, place, strict=True))) for place in product(*choices)]
            found.append(tuple(sorted(ranks)))
        return found

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The one of `groups(*axes)` that `rank` belongs to, without listing the others."""
        _refuse_unknown(axes)
        here = self.coordinates(rank)
        choices = [
            range(size) if name in axes else (getattr(here, name),)
            for name, size in zip(AXES, self.sizes, strict=True)
        ]
        return tuple(
            sorted(self.rank_of(**dict(zip(AXES, place, strict=True))) for place in product(*choices))
        )


def _refuse_unknown(axes: Iterable[str]) -> None:
    unknown = [name for name in axes if name not in AXES]
    if unknown:
        raise ValueError(f"unknown axes {unknown}; the mesh has {list(AXES)}")
