"""Unequal stages under a byte budget: against the table, all trees, and the machine."""
from __future__ import annotations

from random import Random
from typing import Any

import pytest

from megackpt.plan.chains import (
    Chain,
    ChainPlan,
    InfeasibleBudget,
    Stage,
    binomial,
    extra_advances,
    heterogeneous,
    least_budget,
    run,
)
from megackpt.plan.chains.heterogeneous import size_divisor
from tests.plan.chains.oracle import best_costs, cost_at, figures, random_chain

TABLE: list[dict[str, Any]] = figures()["heterogeneous"]["rows"]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row['length']} layers")
def test_the_table(row: dict[str, Any]) -> None:
    chain = Chain.uniform(row["length"], tape_bytes=row["tape"])
    for first, last, executions in row["executions"]:
        for budget in range(first + 1, last + 2):  # the input is one unit
            report = run(chain, heterogeneous(chain, budget))
            assert sum(report.forwards) == executions
            assert report.peak_bytes <= budget


def test_no_tree_is_better() -> None:
    """Every field of a stage in use, every budget: cost, bound and least budget as all trees say."""
    random, budgets = Random(7), 0
    for _ in range(25):
        chain = random_chain(random, random.randint(1, 6))
        front = best_costs(chain)
        assert least_budget(chain) == front[0][0]
        for budget in range(front[0][0], front[-1][0] + 2):
            report = run(chain, heterogeneous(chain, budget))
            assert report.peak_bytes <= budget
            assert report.forward_cost == pytest.approx(cost_at(front, budget), abs=1e-9)
            budgets += 1
        with pytest.raises(InfeasibleBudget) as caught:
            heterogeneous(chain, front[0][0] - 1)
        assert caught.value.least == front[0][0]
    assert budgets > 250


def test_equal_stages_and_tapes_of_one_state_are_binomial() -> None:
    """Slots are then bytes: s slots, the state before the taped stage, and its tape."""
    for length, s in [(12, 3), (24, 2), (30, 5), (30, 1)]:
        found = run(Chain.uniform(length), heterogeneous(Chain.uniform(length), s + 2))
        assert found.extra_forwards <= extra_advances(length, s)
        assert run(Chain.uniform(length), binomial(length, s)).peak_bytes == s + 2


def test_units_never_exceed_the_budget_and_cost_little() -> None:
    random, mb = Random(5), 1 << 20
    stages = tuple(
        Stage(o, o + random.randint(1, 30 * mb), random.uniform(1, 3), gradient_bytes=o)
        for o in (random.randint(1, 2 * mb) for _ in range(14))
    )
    chain = Chain(stages, mb)
    assert size_divisor(chain) == 1
    low, high = least_budget(chain), run(chain, ChainPlan.keep_all(14)).peak_bytes
    for budget in range(low, high, (high - low) // 7):
        fine = run(chain, heterogeneous(chain, budget, units=4000))
        for units in (1, 7, 40, 512):
            coarse = run(chain, heterogeneous(chain, budget, units=units))
            assert coarse.peak_bytes <= budget
            assert coarse.forward_cost >= fine.forward_cost - 1e-9
        assert coarse.forward_cost <= 1.05 * fine.forward_cost


def test_a_budget_between_units_is_still_found() -> None:
    """The least budget itself, whatever the rounding."""
    random = Random(11)
    for _ in range(10):
        chain = random_chain(random, 12)
        for units in (1, 3, None):
            assert run(chain, heterogeneous(chain, least_budget(chain), units=units)).peak_bytes == least_budget(chain)


def test_everything_fits() -> None:
    chain = Chain.uniform(9, tape_bytes=5)
    assert heterogeneous(chain, 46) == heterogeneous(chain, 10**9) == ChainPlan.keep_all(9)
    assert heterogeneous(chain, 45) != ChainPlan.keep_all(9)


def test_more_bytes_never_cost_more() -> None:
    chain = random_chain(Random(2), 14)
    low, high = least_budget(chain), run(chain, ChainPlan.keep_all(14)).peak_bytes
    costs = [run(chain, heterogeneous(chain, budget)).forward_cost for budget in range(low, high + 1)]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == sum(s.forward_cost for s in chain.stages)


def test_long_chains() -> None:
    """300 equal layers between two other ends: equal parts are planned once."""
    layer = Stage(2, 34, gradient_bytes=2)
    chain = Chain((Stage(2, 3), *[layer] * 300, Stage(4, 200, forward_cost=5.0)), 1)
    report = run(chain, heterogeneous(chain, 400))
    assert (report.peak_bytes, report.forward_cost) == (400, 602.0)  # 306 without recompute


def test_refusals() -> None:
    chain = Chain.uniform(12, tape_bytes=17)
    with pytest.raises(InfeasibleBudget, match="no plan fits 18 bytes; the least feasible budget is 19 bytes"):
        heterogeneous(chain, 18)
    with pytest.raises(InfeasibleBudget, match="the least feasible budget is 19 bytes"):
        heterogeneous(chain, -3)
    with pytest.raises(ValueError, match="units=0"):
        heterogeneous(chain, 30, units=0)
