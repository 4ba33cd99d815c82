"""Slots in two tiers: c in RAM, d on a slower one where a write or a read costs as much as some forwards.

The recursion of H-Revolve (Herrmann & Pallez 2020).  With the segment's input in working memory:

    best(l, d) = min(ram(l), write + on_disk(l, d))             ram(l) = t(l, c), binomial
    on_disk(l, d) = min(ram(l), min over k of k + best(l-k, d-1) + read + on_disk(k, d))

A segment that leaves the disk for RAM does not come back to it, so all c slots are free for it.  Where several k cost
the same, the largest is taken: how a cost splits into advances and transfers depends on that.
"""

from __future__ import annotations

from math import inf

import numpy as np
from numpy.typing import NDArray

from megackpt.plan.chains.binomial import binomial_rows, extra_advances
from megackpt.plan.chains.types import DISK, ChainPlan, InfeasibleBudget, Row

Costs = NDArray[np.float64]


def two_level(length: int, ram: int, disk: int, write_cost: float, read_cost: float | None = None) -> ChainPlan:
    """The plan with the least advances + transfers for a uniform chain of unit forward cost whose input is nowhere yet
    but in working memory.  ``read_cost`` default: as ``write_cost``.  Raises InfeasibleBudget without any slot."""
    if ram < 0 or disk < 0 or write_cost < 0 or (read_cost or 0) < 0:
        raise ValueError(f"ram={ram}, disk={disk}, write_cost={write_cost}, read_cost={read_cost}: negative")
    if ram + disk == 0 and length > 1:
        raise InfeasibleBudget(0, 1, "slots")
    table = _TwoLevel(length, ram, disk, write_cost, write_cost if read_cost is None else read_cost)
    return ChainPlan.from_rows(table.rows())


class _TwoLevel:
    """Tables by [disk slots left, length]."""

    def __init__(self, length: int, ram: int, disk: int, write: float, read: float) -> None:
        self.length, self.ram_slots, self.disk = length, ram, disk
        self.ram: Costs = np.full(length + 1, inf)
        for n in range(1, length + 1):
            self.ram[n] = extra_advances(n, ram) if ram or n == 1 else inf
        shape = (disk + 1, length + 1)
        self.best: Costs = np.tile(self.ram, (disk + 1, 1))
        self.written = np.zeros(shape, dtype=bool)
        self.split = np.zeros(shape, dtype=np.int64)  # first advance of an input on disk; 0: it goes on in RAM
        for d in range(1, disk + 1):
            self._fill(d, write, read)

    def _fill(self, d: int, write: float, read: float) -> None:
        on_disk: Costs = self.ram.copy()
        for n in range(2, self.length + 1):
            k = np.arange(n - 1, 0, -1)
            costs = k + self.best[d - 1, n - k] + read + on_disk[k]
            place = int(_rounded(costs).argmin())
            if _rounded(costs[place]) < _rounded(on_disk[n]):
                on_disk[n], self.split[d, n] = costs[place], k[place]
        self.best[d] = np.minimum(self.ram, write + on_disk)
        self.written[d] = _rounded(write + on_disk) < _rounded(self.ram)

    def rows(self) -> list[Row]:
        rows: list[Row] = []
        work = [(0, self.length, self.disk, 0, False)]  # start, length, disk slots, depth, input on disk
        while work:
            start, n, d, depth, on_disk = work.pop()
            k = int(self.split[d, n]) if on_disk or self.written[d, n] else 0
            if not k:
                rows += binomial_rows(n, self.ram_slots, start, depth)
                continue
            rows.append(Row(depth, "drop", start, start + k - 1, DISK))
            work.append((start + k, n - k, d - 1, depth, False))
            work.append((start, k, d, depth + 1, True))
        return rows


def _rounded(costs: Costs) -> Costs:
    """Sums of the same costs in another order are equal."""
    return np.round(costs, 9)
