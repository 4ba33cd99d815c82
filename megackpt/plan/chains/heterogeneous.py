"""The least extra work for a chain of unequal stages under a byte budget.

Optimal among memory-persistent schedules (what is held stays held until its backward), by the dynamic programme of
Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova (2019).  Schedules that drop a state and make it again before its
backward can be better; none of the trees here is such a one.
"""

from __future__ import annotations

from math import gcd, inf

import numpy as np

from megackpt.plan.chains.least import LeastBytes
from megackpt.plan.chains.machine import run
from megackpt.plan.chains.replay_table import Costs, ReplayTable
from megackpt.plan.chains.types import Chain, ChainPlan, InfeasibleBudget, Row

_MOST_UNITS = 512
_FEWEST_UNITS = 32
_WORK = 2e9  # table entries looked at, in tens of seconds


def heterogeneous(chain: Chain, budget: int, *, units: int | None = None) -> ChainPlan:
    """The plan with the least forward cost whose peak, chain input included, is at most ``budget`` bytes.

    ``units``: count bytes in at most so many units of the budget, sizes rounded up.  Exact whenever a common divisor
    of all sizes is at least that unit; else the plan may be a little worse than the best, and never exceeds the
    budget.  Default: 512, fewer for hundreds of stages that are all different.  Raises InfeasibleBudget.
    """
    everything = ChainPlan.keep_all(len(chain))
    most = run(chain, everything).peak_bytes
    if most <= budget:
        return everything
    free = budget - chain.input_bytes
    least = LeastBytes(chain) if free < 0 else None
    if least is None:
        unit = unit_for(chain, free, units)
        spine = _Spine(chain, unit, free // unit)
        if spine.costs[0, -1] < inf:
            return spine.plan()
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


class _Spine:
    """The forward pass: what it keeps and drops, replays priced by the table.  The loss comes after it, so there is no
    gradient yet, and its last stage is kept, being the first that the backward needs."""

    def __init__(self, chain: Chain, unit: int, most: int) -> None:
        self.length, self.most = len(chain), most
        self.table = ReplayTable(chain, unit, most)
        self.costs: Costs = np.full((self.length, most + 1), inf)
        for s in reversed(range(self.length)):
            self._row(s)

    def _row(self, s: int) -> None:
        table, row = self.table, self.costs[s]
        if s == self.length - 1:
            row[int(table.units(table.needs.last[s])) :] = table.forward[s]
            return
        tape, need = int(table.tape[s]), self._keep_need(s)
        if need <= self.most:
            row[need:] = table.forward[s] + self.costs[s + 1, need - tape : self.most + 1 - tape]
        least = table.units(table.needs.running_to(s, self.length - 2))
        for k in range(s + 1, self.length):
            output = int(table.output[k - 1])
            start = max(int(least[k - 1 - s]), output)
            if start <= self.most:
                left = int(table.subs.ids[s, k - 1])
                drop = table.running[left] + table.table[left, start:]
                drop += self.costs[k, start - output : self.most + 1 - output]
                np.minimum(row[start:], drop, out=row[start:])

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
        drops = table.running[left] + table.table[left, free]
        drops += self.costs[np.arange(s + 1, self.length), np.maximum(rest, 0)]
        drops[(rest < 0) | (table.units(table.needs.running_to(s, self.length - 2)) > free)] = inf
        best = int(drops.argmin())
        return 0 if kept <= drops[best] else best + 1

    def plan(self) -> ChainPlan:
        rows: list[Row] = []
        s, free = 0, self.most
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
