"""Rank arithmetic against enumeration."""

from __future__ import annotations

from itertools import product

import pytest

from megackpt.mesh.layout import AXES, Coordinates, MeshShape

SHAPE = MeshShape(tp=2, cp=3, dp=2, pp=4)


def test_rank_order_is_tp_then_cp_then_dp_then_pp() -> None:
    expected = [
        Coordinates(tp=tp, cp=cp, dp=dp, pp=pp)
        for pp, dp, cp, tp in product(range(4), range(2), range(3), range(2))
    ]
    assert [SHAPE.coordinates(rank) for rank in range(48)] == expected
    for rank, here in enumerate(expected):
        assert SHAPE.rank_of(tp=here.tp, cp=here.cp, dp=here.dp, pp=here.pp) == rank


def test_groups_of_a_known_mesh() -> None:
    shape = MeshShape(tp=2, dp=2, pp=2)
    assert shape.groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert shape.groups("dp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert shape.groups("pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert shape.groups("tp", "pp") == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert shape.groups(*AXES) == [tuple(range(8))]
    assert shape.groups() == [(rank,) for rank in range(8)]


@pytest.mark.parametrize(
    "axes", [("tp",), ("cp",), ("dp",), ("pp",), ("tp", "pp"), ("dp", "cp"), ("cp", "tp", "pp")]
)
def test_groups_partition_the_ranks_and_vary_along_their_axes_only(axes: tuple[str, ...]) -> None:
    groups = SHAPE.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(48))
    for group in groups:
        assert list(group) == sorted(group)
        places = [SHAPE.coordinates(rank) for rank in group]
        for name in AXES:
            seen = {getattr(place, name) for place in places}
            assert len(seen) == (getattr(SHAPE, name) if name in axes else 1)
        for rank in group:
            assert SHAPE.group_of(rank, *axes) == group


def test_what_is_outside_the_mesh_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 48 is not in a mesh of 48 ranks"):
        SHAPE.coordinates(48)
    with pytest.raises(ValueError, match="cp=3 is not in a mesh of cp size 3"):
        SHAPE.rank_of(cp=3)
    with pytest.raises(ValueError, match="axis dp has size 0"):
        MeshShape(dp=0)
    with pytest.raises(ValueError, match="unknown axes \\['ep'\\]"):
        SHAPE.groups("ep")
