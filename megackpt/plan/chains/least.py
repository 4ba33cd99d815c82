"""The least bytes with which a chain can be reversed at all, and a plan that needs no more.

The same recursion as the cost table's, with the larger of two needs in the place of their sum; exact in bytes.
"""

from __future__ import annotations

import numpy as np

from megackpt.plan.chains.subchains import Ints, Needs, SubChains
from megackpt.plan.chains.types import Chain, ChainPlan, Row


def least_budget(chain: Chain) -> int:
    """The smallest budget, chain input included, for which there is a plan."""
    return chain.input_bytes + int(LeastBytes(chain).spine[0])


class LeastBytes:
    def __init__(self, chain: Chain) -> None:
        self.length = len(chain)
        self.needs = Needs(chain)
        self.subs = SubChains(chain)
        self.table: Ints = np.zeros(self.subs.count, dtype=np.int64)
        for distance, starts in self.subs.by_length():
            for s in starts.tolist():
                self.table[self.subs.ids[s, s + distance]] = self._moves(s, s + distance).min()
        self.spine: Ints = np.zeros(self.length, dtype=np.int64)
        for s in reversed(range(self.length)):
            self.spine[s] = self._first_moves(s).min()

    def _moves(self, s: int, t: int) -> Ints:
        """Bytes of replaying s ... t beginning with each move: keep s, drop 1, 2, ... stages."""
        keep = self.needs.keep(s, t)
        if s == t:
            return np.array([keep])
        rest = self.needs.tape[s] + self.table[self.subs.ids[s + 1, t]]
        running = self.needs.running_to(s, t - 1) + self.needs.gradient[t]
        after = self.needs.output[s:t] + self.table[self.subs.ids[s + 1 : t + 1, t]]
        drops = np.maximum(np.maximum(running, after), self.table[self.subs.ids[s, s:t]])
        return np.concatenate([[max(keep, rest)], drops])

    def _first_moves(self, s: int) -> Ints:
        """The same for the forward pass, from s to the end."""
        if s == self.length - 1:
            return np.array([max(self.needs.last[s], self.needs.taping[s])])
        keep = max(self.needs.reverse[s], self.needs.taping[s], self.needs.tape[s] + self.spine[s + 1])
        after = self.needs.output[s:-1] + self.spine[s + 1 :]
        running = self.needs.running_to(s, self.length - 2)
        drops = np.maximum(np.maximum(running, after), self.table[self.subs.ids[s, s:-1]])
        return np.concatenate([[keep], drops])

    def plan(self, free: int) -> ChainPlan:
        """A plan that needs at most ``free`` bytes beside the input (at least ``spine[0]``); it keeps what it can."""
        rows: list[Row] = []
        end = self.length - 1
        work = [(0, end, free, 0)]
        while work:
            s, t, left, depth = work.pop()
            moves = self._first_moves(s) if t == end and depth == 0 else self._moves(s, t)
            fitting = np.flatnonzero(moves <= left)
            k = int(fitting[len(fitting) // 2]) if fitting[0] else 0  # about half: the fewest replays of each
            if k:
                rows.append(Row(depth, "drop", s, s + k - 1))
                work.append((s + k, t, left - int(self.needs.output[s + k - 1]), depth))
                work.append((s, s + k - 1, left, depth + 1))
                continue
            rows.append(Row(depth, "keep", s, s))
            if s < t:
                work.append((s + 1, t, left - int(self.needs.tape[s]), depth))
        return ChainPlan.from_rows(rows)
