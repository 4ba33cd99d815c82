"""Binomial schedules: the least extra work for a uniform chain and a number of slots (Griewank & Walther 2000).

A chain of l steps is reversed with s slots, of which its input takes one, so that l = beta(s, r) = C(s+r, s) is the
longest chain in which no step is advanced more than r times without taping.  Extra advances, the l taped runs not
counted, are t(l, s) = r l - C(s+r, s+1) with the least such r.  Slots hold states that a replay starts from; the state
that is just being worked on needs none.
"""

from __future__ import annotations

from bisect import bisect_left
from math import comb

from megackpt.plan.chains.types import ChainPlan, InfeasibleBudget, Row


def beta(slots: int, repetitions: int) -> int:
    """The longest chain reversible with so many slots and advances per step."""
    return comb(slots + repetitions, slots) if slots >= 0 and repetitions >= 0 else 0


def repetitions(length: int, slots: int) -> int:
    """The least r with ``length`` <= beta(slots, r).  Raises InfeasibleBudget without slots (unless one stage)."""
    if length < 1 or slots < 0:
        raise ValueError(f"a chain of {length} stages with {slots} slots")
    if slots == 0 and length > 1:
        raise InfeasibleBudget(0, 1, "slots")
    if length == 1:
        return 0
    return bisect_left(range(length), length, key=lambda r: beta(slots, r))  # r = length - 1 is enough for one slot


def extra_advances(length: int, slots: int) -> int:
    """t(length, slots): stage executions beyond the one per stage that tapes it."""
    r = repetitions(length, slots)
    return r * length - comb(slots + r, slots + 1)


def split(length: int, slots: int) -> int:
    """How far to advance from the input before the next state is held; optimal for ``length`` >= 2.

    With r = repetitions(length, slots): every k with beta(s,r-2) <= k <= beta(s,r-1) and
    beta(s-1,r-1) <= length-k <= beta(s-1,r) is; this is the largest."""
    r = repetitions(length, slots)
    return max(1, min(beta(slots, r - 1), length - beta(slots - 1, r - 1)))


def binomial_rows(length: int, slots: int, first: int = 0, depth: int = 0) -> list[Row]:
    """The plan's lines for stages ``first`` ..., to be set into a larger plan at ``depth``."""
    rows: list[Row] = []
    work = [(first, length, slots, depth)]
    while work:
        start, left, free, level = work.pop()
        if left == 1:
            rows.append(Row(level, "keep", start, start))
            continue
        k = split(left, free)
        rows.append(Row(level, "drop", start, start + k - 1))
        work.append((start + k, left - k, free - 1, level))
        work.append((start, k, free, level + 1))
    return rows


def binomial(length: int, slots: int) -> ChainPlan:
    """The plan with extra_advances(length, slots).  Raises InfeasibleBudget without slots (unless one stage)."""
    return ChainPlan.from_rows(binomial_rows(length, slots))
