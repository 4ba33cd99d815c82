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
_BLOCK = 1 << 15  # numbers


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
        self.dropped: Costs = np.full((self.subs.count, most + 1), inf)  # running it once, and T
        self._fill()

    def units(self, sizes: Ints) -> Ints:
        return -(-sizes // self.unit)

    def _fill(self) -> None:
        ids, length = self.subs.ids, len(self.chain)
        after = np.full((length, length), -1, dtype=np.int64)  # row of the pool that stands for T(k, t, m - output)
        pool = _Pool(self.most + 1)
        for distance, starts in self.subs.by_length():
            for s in starts.tolist():
                t = s + distance
                row = self.table[ids[s, t]]
                self._keep(s, t, row)
                if distance:
                    np.minimum(row, cheapest(self.dropped, ids[s, s:t], pool.rows, after[s + 1 : t + 1, t],
                                             self.least_to_run(s, t)), out=row)  # fmt: skip
                self.dropped[ids[s, t]] = row + self.forward[s : t + 1].sum()
            ends = np.arange(1 + distance, length)
            after[ends - distance, ends] = pool.shifted(
                self.table, ids[ends - distance, ends], self.output[ends - distance - 1]
            )

    def _keep(self, s: int, t: int, row: Costs) -> None:
        need = int(self.units(np.array(self.needs.keep(s, t))))
        if s == t:
            row[need:] = self.tail[s]
            return
        tape = int(self.tape[s])
        need = max(need, tape)
        if need <= self.most:
            row[need:] = self.forward[s] + self.table[self.subs.ids[s + 1, t], need - tape : self.most + 1 - tape]

    def least_to_run(self, s: int, t: int) -> Ints:
        """Units that running s ... k-1 needs while the gradient of t's output is there; element k - s - 1."""
        return self.units(self.needs.running_to(s, t - 1) + self.needs.gradient[t])

    def drop_costs(self, s: int, t: int, free: int) -> Costs:
        """Of dropping s ... k-1 in the replay of s ... t, element k - s - 1."""
        left, right = self.subs.ids[s, s:t], self.subs.ids[s + 1 : t + 1, t]
        rest = free - self.output[s:t]
        costs: Costs = self.dropped[left, free] + self.table[right, np.maximum(rest, 0)]
        costs[(rest < 0) | (self.least_to_run(s, t) > free)] = inf
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


def cheapest(dropped: Costs, left: Ints, after: Costs, right: Ints, least: Ints) -> Costs:
    """Over all ways to drop first, the least cost for every number of units: ``dropped[left[i]] + after[right[i]]``
    where there are ``least[i]`` (never falling) units.  In blocks that fit a cache."""
    width = dropped.shape[1]
    best: Costs = np.full(width, inf)
    block = max(1, _BLOCK // width)
    for at in range(0, len(left), block):
        costs = dropped.take(left[at : at + block], axis=0)
        costs += after.take(right[at : at + block], axis=0)
        needed = least[at : at + block]
        narrow = min(int(needed[-1]), width)
        costs[:, :narrow][np.arange(narrow) < needed[:, None]] = inf
        np.minimum(best, costs.min(axis=0), out=best)
    return best


class _Pool:
    """Rows of a table moved to the right, each made once; grows by doubling."""

    def __init__(self, width: int) -> None:
        self.rows: Costs = np.full((64, width), inf)
        self._used = 0

    def shifted(self, table: Costs, rows: Ints, units: Ints) -> Ints:
        """Places of the given rows moved by so many units.  A row is asked for in one call only (equal sub-chains are
        equally long)."""
        keys, inverse = np.unique(np.stack([rows, units]), axis=1, return_inverse=True)
        start, self._used = self._used, self._used + keys.shape[1]
        while self._used > len(self.rows):
            self.rows = np.concatenate([self.rows, np.full_like(self.rows, inf)])
        for place, (row, shift) in enumerate(keys.T.tolist(), start):
            self.rows[place, shift:] = table[row, : max(0, self.rows.shape[1] - shift)]
        return start + inverse.reshape(-1)
