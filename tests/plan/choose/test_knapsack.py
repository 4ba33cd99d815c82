"""The knapsack is exact: against brute force, and against HiGHS where that is installed."""

from __future__ import annotations

import random

import numpy as np
import pytest

from megackpt.plan.choose.chunks import best_points, rows_of
from megackpt.plan.choose.knapsack import Fronts, Table
from megackpt.plan.choose.pareto import Item, layer_items
from megackpt.plan.choose.problem import End
from megackpt.plan.choose.stage import solve
from megackpt.plan.schedule import most_in_flight, schedule_lists
from tests.plan.choose.layer import brute_force, small_prices, small_problem


def random_items(draw: random.Random, count: int) -> list[Item]:
    return [Item(draw.randint(1, 40), draw.randint(0, 60), draw.randint(0, 9), 1) for _ in range(count)]


def test_every_budget_against_brute_force() -> None:
    draw = random.Random(7)
    for trial in range(6):
        items = random_items(draw, 5)
        table = Table(items)
        for budget in range(11, 190, 3):
            problem = small_problem(budget, layers=4, stages=1, first=End(), last=End())
            found = solve(problem, table, 0, (4,))
            expected = brute_force(items, 4, budget - problem.base_bytes)
            assert (None if found is None else found.replay_ps[0][0]) == expected, (trial, budget)


def test_what_backward_rebuilds_counts() -> None:
    """Leaner items that rebuild much fit only where the rest leaves room for what they rebuild."""
    table = Table([Item(1, 5, 50), Item(20, 9, 0), Item(30, 0, 0)])
    for room, ps in ((53, None), (54, 20), (79, 20), (80, 20), (83, 15), (109, 15), (110, 9), (119, 9), (120, 0)):
        problem = small_problem(11 + room, layers=4, stages=1, first=End(), last=End())
        found = solve(problem, table, 0, (4,))
        assert (None if found is None else found.replay_ps[0][0]) == ps, room


def test_ends_are_paid_first() -> None:
    table = Table([Item(1, 5, 0), Item(2, 0, 0)])
    for room, ps in ((7 + 9 + 3, None), (7 + 9 + 4, 20), (7 + 9 + 8, 0)):
        found = solve(small_problem(11 + room, layers=4, stages=1), table, 0, (4,))
        assert (None if found is None else found.replay_ps[0][0]) == ps


def test_mixtures_are_what_the_front_says_and_leanest_first() -> None:
    fronts = Fronts(layer_items(small_prices()))
    for layers in (1, 3, 7):
        front = fronts[layers]
        assert (np.diff(front.bytes) > 0).all() and (np.diff(front.ps) < 0).all()
        for place in range(0, len(front), 5):
            mixture = fronts.mixture(layers, place)
            assert len(mixture) == layers
            assert sum(i.kept_bytes for i in mixture) == front.bytes[place]
            assert sum(i.replay_ps for i in mixture) == front.ps[place]
            assert [i.transient_bytes for i in mixture] == sorted((i.transient_bytes for i in mixture), reverse=True)


def test_groups_of_layers_are_items_too() -> None:
    fronts = Fronts([Item(10, 3, 0), Item(4, 9, 0, layers=2), Item(5, 20, 0, layers=3)])
    assert list(zip(fronts[3].bytes.tolist(), fronts[3].ps.tolist(), strict=True)) == [(5, 20), (14, 12), (30, 9)]
    assert [i.layers for i in fronts.mixture(3, 1)] in ([1, 2], [2, 1])
    assert len(Fronts([Item(4, 9, 0, layers=2)])[3]) == 0


def test_a_thinned_front_still_holds_real_mixtures() -> None:
    items = layer_items(small_prices())
    full, thin = Fronts(items), Fronts(items, limit=20)
    exact = dict(zip(full[6].bytes.tolist(), full[6].ps.tolist(), strict=True))
    assert len(thin[6]) <= 20 < len(full[6])
    strip = (int(full[6].bytes[-1]) - int(full[6].bytes[0])) / 18
    for held, ps in zip(thin[6].bytes.tolist(), thin[6].ps.tolist(), strict=True):
        assert min(value for key, value in exact.items() if key <= held) <= ps
        assert ps <= min(value for key, value in exact.items() if key <= max(held - 6 * strip, min(exact)))


def test_rows_are_the_largest_moments() -> None:
    lists = schedule_lists("interleaved", 4, 8, 3)
    for rank, actions in enumerate(lists):
        rows = rows_of(actions, 3)
        assert rows.sum(axis=1).max() == most_in_flight("interleaved", 4, rank, 8, 3)
    assert rows_of(schedule_lists("zb-h1", 3, 5)[2], 1).tolist() == [[3]]


@pytest.mark.parametrize("chunks", [2, 3])
def test_chunks_against_brute_force(chunks: int) -> None:
    draw = random.Random(chunks)
    for _ in range(8):
        fronts = [Fronts(random_items(draw, 4))[2] for _ in range(chunks)]
        rows = np.array([[draw.randint(0, 5) for _ in range(chunks)] for _ in range(3)])
        room = np.array([draw.randint(10, 500) for _ in range(3)])
        best = None
        for places in np.ndindex(*(len(front) for front in fronts)):
            held = np.array([front.bytes[place] for front, place in zip(fronts, places, strict=True)])
            if (rows @ held <= room).all():
                ps = sum(int(front.ps[place]) for front, place in zip(fronts, places, strict=True))
                best = ps if best is None else min(best, ps)
        found = best_points(fronts, rows, room)
        ps = None if found is None else sum(int(f.ps[k]) for f, k in zip(fronts, found, strict=True))
        assert ps == best


def test_chunks_too_many_to_try_are_close(monkeypatch: pytest.MonkeyPatch) -> None:
    fronts = [Fronts(layer_items(small_prices()))[3] for _ in range(3)]
    rows = rows_of(schedule_lists("interleaved", 4, 8, 3)[0], 3)
    for room in (600, 900, 1500, 2200):
        limits = np.full(len(rows), room)
        monkeypatch.setattr("megackpt.plan.choose.chunks.MOST_TRIED", 2_000_000)
        exact = best_points(fronts, rows, limits)
        monkeypatch.setattr("megackpt.plan.choose.chunks.MOST_TRIED", 0)
        close = best_points(fronts, rows, limits)
        assert exact is not None and close is not None
        ps = [sum(int(f.ps[k]) for f, k in zip(fronts, found, strict=True)) for found in (exact, close)]
        assert ps[0] <= ps[1] <= 1.01 * ps[0]


def test_a_stage_of_three_chunks_against_highs() -> None:
    highspy = pytest.importorskip("highspy", reason="the mixed-integer oracle needs highspy")
    items = [i for i in layer_items(small_prices()) if i.transient_bytes <= 30]
    table = Table(items)
    for budget in (700, 1000, 1600):
        problem = small_problem(budget, chunks=3, layers=24, stages=4, micro_batches=8)
        for stage in (0, 3):
            found = solve(problem, table, stage, (2, 2, 2))
            best = None
            for cap in table.caps(2):
                value = _highs(highspy, [i for i in items if i.transient_bytes <= cap], problem, stage, cap)
                best = value if best is None or (value is not None and value < best) else best
            assert (None if found is None else sum(found.replay_ps[0]) / 1e6) == pytest.approx(best)


def _highs(highspy: object, items: list[Item], problem: object, stage: int, cap: int) -> float | None:
    """Least microseconds by a mixed-integer programme: how many of each chunk's layers get each item."""
    model = highspy.Highs()  # type: ignore[attr-defined]
    model.setOptionValue("output_flag", False)
    model.setOptionValue("mip_rel_gap", 0.0)
    rows, room = problem.rows[stage], problem.room(stage, 6, cap)  # type: ignore[attr-defined]
    counts = [[model.addIntegral(lb=0, ub=2) for _ in items] for _ in range(3)]
    for chunk in counts:
        model.addConstr(sum(chunk) == 2)
    for row, limit in zip(rows, room, strict=True):
        held = [
            int(row[c]) * i.kept_bytes * x for c, chunk in enumerate(counts) for i, x in zip(items, chunk, strict=True)
        ]
        model.addConstr(sum(held) <= int(limit))
    model.minimize(sum(i.replay_ps / 1e6 * x for chunk in counts for i, x in zip(items, chunk, strict=True)))
    if model.getModelStatus() != highspy.HighsModelStatus.kOptimal:  # type: ignore[attr-defined]
        return None
    return float(model.getObjectiveValue())
