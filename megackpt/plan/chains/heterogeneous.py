"""The least extra work for a chain of unequal stages under a byte budget.

Optimal among memory-persistent schedules (what is held stays held until its backward), by the dynamic programme of
Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova (2019).  Schedules that drop a state and make it again before its
backward can be better; none of the trees here is such a one.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd, inf
from typing import TypeVar

import numpy as np

from megackpt.plan.chains.least import LeastBytes
from megackpt.plan.chains.machine import run
from megackpt.plan.chains.replay_table import Costs, ReplayTable, cheapest
from megackpt.plan.chains.subchains import Ints
from megackpt.plan.chains.types import Chain, ChainPlan, InfeasibleBudget, Row

P = TypeVar("P")

_MOST_UNITS = 512
_FEWEST_UNITS = 64
_WORK = 1e9  # table entries looked at: some seconds


def heterogeneous(chain: Chain, budget: int, *, units: int | None = None) -> ChainPlan:
    """The plan with the least forward cost whose peak, chain input included, is at most ``budget`` bytes.

    ``units``: count bytes in about so many units of the budget, sizes rounded up.  Exact whenever a common divisor of
    all sizes is at least that unit; else the plan may be a little worse than the best, and never exceeds the budget.
    Default: 512, fewer for hundreds of stages that are all different.  Raises InfeasibleBudget.
    """
    everything = ChainPlan.keep_all(len(chain))
    most = run(chain, everything).peak_bytes
    if most <= budget:
        return everything
    free = budget - chain.input_bytes
    least = LeastBytes(chain) if free < 0 else None
    if least is None:
        unit = unit_for(chain, free, units)
        spine = _Spine(chain, unit, free // unit, spare_units(chain, unit, free))
        found = best_fitting(spine.plan, lambda plan: run(chain, plan).peak_bytes <= budget, free // unit, spine.most)
        if found is not None:
            return found
        least = LeastBytes(chain)
    if least.spine[0] > free:
        raise InfeasibleBudget(budget, chain.input_bytes + int(least.spine[0]))
    return least.plan(free)


def unit_for(chain: Chain, free: int, units: int | None) -> int:
    """Bytes per unit: the common divisor of all sizes where that gives few enough, else a share of ``free``."""
    if units is None:
        different = len(set(chain.stages))
        splits = len(chain) ** 2 * min(different, len(chain)) / 6
        units = int(min(_MOST_UNITS, max(_FEWEST_UNITS, _WORK / max(splits, 1))))
    if units < 1:
        raise ValueError(f"units={units}: bytes are counted in at least one unit")
    return max(size_divisor(chain), -(-free // units), 1)


def size_divisor(chain: Chain) -> int:
    """The largest number that divides every size of the chain."""
    sizes = [chain.input_gradient_bytes]
    for s in chain.stages:
        sizes += [s.output_bytes, s.tape_bytes, s.gradient_bytes]
        sizes += [s.forward_transient, s.tape_transient, s.backward_transient]
    return gcd(*sizes)


def spare_units(chain: Chain, unit: int, free: int) -> int:
    """Rounding up wastes bytes, up to a unit per stage: so many more units may be planned with, if the plan's real
    peak is looked at afterwards.  Nothing where units are exact."""
    return 0 if size_divisor(chain) % unit == 0 else min(len(chain), free // unit // 4)


def best_fitting(plan: Callable[[int], P | None], fits: Callable[[P], bool], certain: int, most: int) -> P | None:
    """The plan for the most units, between ``certain`` (whose plan, if there is one, fits) and ``most``, that still
    fits; by bisection."""
    best, low, high = plan(certain), certain + 1, most
    while low <= high:
        middle = (low + high) // 2
        found = plan(middle)
        if found is None:
            low = middle + 1
        elif fits(found):
            best, low = found, middle + 1
        else:
            high = middle - 1
    return best


class _Spine:
    """The forward pass: what it keeps and drops, replays priced by the table.  The loss comes after it, so there is no
    gradient yet, and its last stage is kept, being the first that the backward needs."""

    def __init__(self, chain: Chain, unit: int, units: int, spare: int) -> None:
        most = units + spare
        self.length, self.most = len(chain), most
        self.table = ReplayTable(chain, unit, most)
        self.costs: Costs = np.full((self.length, most + 1), inf)
        self._after: Costs = np.full((self.length, most + 1), inf)  # with the output before it held
        for s in reversed(range(self.length)):
            self._row(s)

    def _row(self, s: int) -> None:
        table, row = self.table, self.costs[s]
        if s == self.length - 1:
            need = np.maximum(table.needs.last[s], table.needs.taping[s])
            row[int(table.units(need)) :] = table.forward[s]
        else:
            tape, need = int(table.tape[s]), self._keep_need(s)
            if need <= self.most:
                row[need:] = table.forward[s] + self.costs[s + 1, need - tape : self.most + 1 - tape]
            left, right = table.subs.ids[s, s:-1], np.arange(s + 1, self.length)
            np.minimum(row, cheapest(table.dropped, left, self._after, right, self._least_to_run(s)), out=row)
        if s:
            output = int(table.output[s - 1])
            self._after[s, output:] = row[: max(0, self.most + 1 - output)]

    def _least_to_run(self, s: int) -> Ints:
        return self.table.units(self.table.needs.running_to(s, self.length - 2))

    def _keep_need(self, s: int) -> int:
        table = self.table
        need = max(table.needs.reverse[s], table.needs.taping[s])
        return max(int(table.units(need)), int(table.tape[s]))

    def _move(self, s: int, free: int) -> int:
        table = self.table
        if s == self.length - 1:
            return 0
        kept = inf
        if self._keep_need(s) <= free:
            kept = table.forward[s] + self.costs[s + 1, free - int(table.tape[s])]
        left = table.subs.ids[s, s:-1]
        rest = free - table.output[s:-1]
        drops: Costs = table.dropped[left, free] + self.costs[np.arange(s + 1, self.length), np.maximum(rest, 0)]
        drops[(rest < 0) | (self._least_to_run(s) > free)] = inf
        best = int(drops.argmin())
        return 0 if kept <= drops[best] else best + 1

    def plan(self, free: int) -> ChainPlan | None:
        """The best plan for so many units; None if there is none."""
        if self.costs[0, free] == inf:
            return None
        rows: list[Row] = []
        s = 0
        while s < self.length:
            k = self._move(s, free)
            if k:
                rows.append(Row(0, "drop", s, s + k - 1))
                rows += self.table.rows(s, s + k - 1, free, 1)
                s, free = s + k, free - int(self.table.output[s + k - 1])
            else:
                rows.append(Row(0, "keep", s, s))
                s, free = s + 1, free - int(self.table.tape[s])
        return ChainPlan.from_rows(rows)
