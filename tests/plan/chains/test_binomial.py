"""Binomial schedules against the table, the recursion, every sequence of actions, and the machine."""
from __future__ import annotations

import math
from functools import cache

import pytest

from megackpt.plan.chains import Chain, InfeasibleBudget, beta, binomial, extra_advances, run
from megackpt.plan.chains.binomial import repetitions, split
from tests.plan.chains.oracle import figures, least_cost

TABLE = figures()["binomial"]


def test_the_table_by_formula() -> None:
    for length, row in TABLE["rows"].items():
        assert [extra_advances(int(length), s) for s in TABLE["slots"]] == row
    for entry in TABLE["long"]:
        assert extra_advances(entry["length"], entry["slots"]) == entry["extra"]


@pytest.mark.parametrize("length", [int(length) for length in TABLE["rows"]])
def test_the_table_by_plan_and_machine(length: int) -> None:
    for s, extra in zip(TABLE["slots"], TABLE["rows"][str(length)], strict=True):
        report = run(Chain.uniform(length), binomial(length, s))
        assert (report.extra_forwards, report.slots) == (extra, min(s, report.slots))
        assert max(report.forwards) <= repetitions(length, s) + 1  # each advanced at most r times, and taped once


def test_the_long_chains_by_plan_and_machine() -> None:
    for entry in TABLE["long"]:
        length, s = entry["length"], entry["slots"]
        report = run(Chain.uniform(length), binomial(length, s))
        assert (report.extra_forwards, report.slots) == (entry["extra"], s)
        assert report.peak_bytes == s + 2  # the slots, the state before the taped stage, and its tape


@cache
def recursion(length: int, slots: int) -> float:
    if length == 1:
        return 0
    if slots == 0:
        return math.inf
    return min(k + recursion(length - k, slots - 1) + recursion(k, slots) for k in range(1, length))


def test_formula_and_split_are_those_of_the_recursion() -> None:
    for length in range(1, 60):
        for s in range(1, 9):
            assert extra_advances(length, s) == recursion(length, s)
            if length > 1:
                k = split(length, s)
                assert k + recursion(length - k, s - 1) + recursion(k, s) == recursion(length, s)


@pytest.mark.parametrize(("length", "slots"), [(n, s) for n in (2, 3, 5, 7) for s in (1, 2, 3)] + [(10, 2)])
def test_no_sequence_of_actions_is_better(length: int, slots: int) -> None:
    assert least_cost(length, slots) == extra_advances(length, slots)


def test_beta_is_the_longest_chain() -> None:
    for s in range(1, 7):
        for r in range(1, 7):
            assert (repetitions(beta(s, r), s), repetitions(beta(s, r) + 1, s)) == (r, r + 1)
            assert run(Chain.uniform(beta(s, r)), binomial(beta(s, r), s)).slots == s
    assert (beta(3, -1), beta(-1, 3), beta(0, 5)) == (0, 0, 1)


def test_slots_and_repetitions_both_grow_with_the_logarithm() -> None:
    assert [repetitions(2**n, n // 2) for n in (8, 10, 12, 16)] == [7, 8, 9, 11]
    # 1,024 stages in 10 slots: 3.67 extra forwards per stage, and with B = 2F 2.2 times the time of a plain step
    per_stage = extra_advances(1024, 10) / 1024
    assert (round(per_stage, 2), round((3 + per_stage) / 3, 1)) == (3.67, 2.2)


def test_without_slots() -> None:
    assert run(Chain.uniform(1), binomial(1, 0)).extra_forwards == 0
    with pytest.raises(InfeasibleBudget, match="no plan fits 0 slots; the least feasible budget is 1 slots") as caught:
        binomial(2, 0)
    assert (caught.value.budget, caught.value.least) == (0, 1)
    with pytest.raises(ValueError, match="a chain of 0 stages"):
        binomial(0, 3)
