"""The dynamic programme over sub-chains that are replayed (Beaumont et al. 2019, equation for persistent schedules).

T(s, t, m) is the least forward cost of reversing the stages s ... t when the input of s and the gradient of t's output
are there and m bytes are free, the input apart and the gradient included:

    keep s:        f_s + T(s+1, t, m - tape_s)
    drop s ... k-1:  f_s + ... + f_(k-1) + T(k, t, m - output_(k-1)) + T(s, k-1, m)

with T(s, s, m) = f_s where its tape fits.  Deviations: gradients and transients are counted as the abstract machine
counts them; the last stage of a replay ends at the last tensor it saves; equal sub-chains share one row; bytes are
counted in units, sizes rounded up and the budget down, so a plan never exceeds it.
"""

from __future__ import annotations

from math import inf

import numpy as np
from numpy.typing import NDArray

from megackpt.plan.chains.subchains import Ints, Needs, SubChains
from megackpt.plan.chains.types import Chain, Row

Costs = NDArray[np.float64]


class ReplayTable:
    """T of every sub-chain and every number of free units 0 ... ``most``."""

    def __init__(self, chain: Chain, unit: int, most: int) -> None:
        self.chain, self.unit, self.most = chain, unit, most
        self.needs = Needs(chain)
        self.subs = SubChains(chain)
        self.output = self.units(self.needs.output)
        self.tape = self.units(self.needs.tape)
        self.forward = np.array([s.forward_cost for s in chain.stages])
        self.tail = self.forward - np.array([s.spared_cost for s in chain.stages])
        self.table: Costs = np.full((self.subs.count, most + 1), inf)
        self.running: Costs = np.zeros(self.subs.count)  # cost of running the sub-chain once
        self._shifted: dict[tuple[int, int], int] = {}  # (sub-chain, units) -> row of _after
        self._after: list[Costs] = []
        self._fill()

    def units(self, sizes: Ints) -> Ints:
        return -(-sizes // self.unit)

    def _fill(self) -> None:
        ids, length = self.subs.ids, len(self.chain)
        after = np.full((length, length), -1, dtype=np.int64)  # row of _after that stands for T(k, t, m - output)
        pool = _Pool(self.most + 1)
        for distance, starts in self.subs.by_length():
            for start in starts.tolist():
                end = start + distance
                self.running[ids[start, end]] = self.forward[start : end + 1].sum()
                self._row(start, end, pool.rows, after)
            for k in range(1, length - distance):
                after[k, k + distance] = pool.shifted(self.table, int(ids[k, k + distance]), int(self.output[k - 1]))

    def _row(self, s: int, t: int, rows: Costs, after: Ints) -> None:
        row = self.table[self.subs.ids[s, t]]
        need = int(self.units(np.array(self.needs.keep(s, t))))
        if s == t:
            row[need:] = self.tail[s]
            return
        tape = int(self.tape[s])
        need = max(need, tape)
        if need <= self.most:
            row[need:] = self.forward[s] + self.table[self.subs.ids[s + 1, t], need - tape : self.most + 1 - tape]
        left = self.subs.ids[s, s:t]
        drops = self.table[left]
        drops += self.running[left, None]
        drops += rows[after[s + 1 : t + 1, t]]
        least = self.units(self.needs.running_to(s, t - 1) + self.needs.gradient[t])
        narrow = min(int(least[-1]), self.most + 1)
        drops[:, :narrow][np.arange(narrow) < least[:, None]] = inf
        np.minimum(row, drops.min(axis=0), out=row)

    def drop_costs(self, s: int, t: int, free: int) -> Costs:
        """Of dropping s ... k-1 in the replay of s ... t, element k - s - 1."""
        left, right = self.subs.ids[s, s:t], self.subs.ids[s + 1 : t + 1, t]
        rest = free - self.output[s:t]
        costs = self.running[left] + self.table[left, free] + self.table[right, np.maximum(rest, 0)]
        least = self.units(self.needs.running_to(s, t - 1) + self.needs.gradient[t])
        costs[(rest < 0) | (least > free)] = inf
        return costs

    def move(self, s: int, t: int, free: int) -> int:
        """How many stages the best plan of s ... t drops first; 0: it keeps stage s."""
        if s == t:
            return 0
        kept, rest = inf, free - int(self.tape[s])
        if rest >= 0 and self.units(np.array(self.needs.keep(s, t))) <= free:
            kept = self.forward[s] + self.table[self.subs.ids[s + 1, t], rest]
        drops = self.drop_costs(s, t, free)
        best = int(drops.argmin())
        return 0 if kept <= drops[best] else best + 1

    def rows(self, s: int, t: int, free: int, depth: int) -> list[Row]:
        """The lines of the best plan of s ... t with ``free`` units; there must be one."""
        rows: list[Row] = []
        work = [(s, t, free, depth)]
        while work:
            start, end, left, level = work.pop()
            k = self.move(start, end, left)
            if k:
                rows.append(Row(level, "drop", start, start + k - 1))
                work.append((start + k, end, left - int(self.output[start + k - 1]), level))
                work.append((start, start + k - 1, left, level + 1))
                continue
            rows.append(Row(level, "keep", start, start))
            if start < end:
                work.append((start + 1, end, left - int(self.tape[start]), level))
        return rows


class _Pool:
    """Rows of the table moved to the right, each made once; grows by doubling."""

    def __init__(self, width: int) -> None:
        self.rows: Costs = np.full((64, width), inf)
        self._known: dict[tuple[int, int], int] = {}

    def shifted(self, table: Costs, row: int, units: int) -> int:
        place = self._known.get((row, units))
        if place is None:
            place = self._known[row, units] = len(self._known)
            if place == len(self.rows):
                self.rows = np.concatenate([self.rows, np.full_like(self.rows, inf)])
            self.rows[place, units:] = table[row, : max(0, self.rows.shape[1] - units)]
        return place
