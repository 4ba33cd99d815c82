"""Several chunks on one stage: which mixture each gets, when their micro-batches in flight differ.

A stage of an interleaved schedule holds, at different moments, different numbers of micro-batches of each chunk: the
rows of `rows`.  Every row must fit.  With the fronts of all chunks the exact optimum is found by trying all points of
all chunks but the last and looking the last one up; where that is too much, a price per byte gives a start and the
chunks are improved in turn.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megackpt.plan.choose.knapsack import Front
from megackpt.plan.schedule import Action

MOST_TRIED = 2_000_000
Rows = NDArray[np.int64]


def rows_of(actions: Sequence[Action], chunks: int) -> Rows:
    """[rows, chunks]: micro-batches in flight of each chunk, at all moments at which no other has as many of every
    chunk.  A micro-batch leaves with its backward, or with its weight gradients where they come apart."""
    leaves = "W" if any(action.kind == "W" for action in actions) else "B"
    held = [0] * chunks
    seen = {tuple(held)}
    for action in actions:
        if action.kind == "F":
            held[action.chunk] += 1
            seen.add(tuple(held))
        elif action.kind == leaves:
            held[action.chunk] -= 1
    largest = [
        row for row in seen if not any(row != o and all(a <= b for a, b in zip(row, o, strict=True)) for o in seen)
    ]
    return np.array(sorted(largest), np.int64)


def _covered(row: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(a <= b for a, b in zip(row, other, strict=True))


def best_points(fronts: Sequence[Front], rows: Rows, room: Rows) -> list[int] | None:
    """One place per front, so that for every row its micro-batches times the kept bytes stay within its ``room``, and
    the sum of picoseconds is least (of equals: fewest bytes).  None if nothing fits.

    Exact while the product of all fronts but the longest is at most `MOST_TRIED`.
    """
    if any(len(front) == 0 for front in fronts):
        return None
    last = max(range(len(fronts)), key=lambda c: len(fronts[c]))
    order = [c for c in range(len(fronts)) if c != last] + [last]
    tried = int(np.prod([len(fronts[c]) for c in order[:-1]], dtype=object))
    search = _all if tried <= MOST_TRIED else _in_turn
    found = search([fronts[c] for c in order], rows[:, order], room)
    if found is None:
        return None
    return [place for _, place in sorted(zip(order, found, strict=True))]


def _all(fronts: Sequence[Front], rows: Rows, room: Rows) -> list[int] | None:
    grids = np.meshgrid(*(np.arange(len(front)) for front in fronts[:-1]), indexing="ij")
    places = [grid.ravel() for grid in grids]
    used = [front.bytes[place] for front, place in zip(fronts[:-1], places, strict=True)]
    spent = sum((front.ps[place] for front, place in zip(fronts[:-1], places, strict=True)), np.zeros(1, np.int64))
    held = sum(used, np.zeros(1, np.int64))
    final = fronts[-1]
    most = np.full(len(spent), final.bytes[-1])
    fits = np.ones(len(spent), bool)
    for row, limit in zip(rows, room, strict=True):
        left = limit - sum((int(count) * b for count, b in zip(row[:-1], used, strict=True)), np.zeros(1, np.int64))
        if row[-1]:
            most = np.minimum(most, left // row[-1])
        fits &= left >= 0
    place = np.searchsorted(final.bytes, most, side="right") - 1
    fits &= place >= 0
    if not fits.any():
        return None
    index = np.flatnonzero(fits)
    total_ps, total_bytes = (spent + final.ps[place])[index], (held + final.bytes[place])[index]
    best = index[np.lexsort((total_bytes, total_ps))[0]]
    return [int(p[best]) for p in places] + [int(place[best])]


def _in_turn(fronts: Sequence[Front], rows: Rows, room: Rows) -> list[int] | None:
    """From the leanest points, and from the fastest that one price per byte allows: improve pair by pair."""
    leanest = [0] * len(fronts)
    if not _fits(fronts, leanest, rows, room):
        return None
    weights = rows.max(axis=0)
    start = leanest
    for price in np.geomspace(1e-6, 1e6, 241):  # picoseconds per byte in flight
        point = [int(np.argmin(f.ps + price * w * f.bytes)) for f, w in zip(fronts, weights, strict=True)]
        if _fits(fronts, point, rows, room):
            start = point
            break
    best = min((_improved(fronts, s, rows, room) for s in (start, leanest)), key=lambda p: _spent(fronts, p))
    return best


def _improved(fronts: Sequence[Front], places: Sequence[int], rows: Rows, room: Rows) -> list[int]:
    current = list(places)
    while True:
        before = _spent(fronts, current)
        for a in range(len(fronts)):
            for b in range(a + 1, len(fronts)):
                others = [c for c in range(len(fronts)) if c not in (a, b)]
                taken = sum((rows[:, c] * fronts[c].bytes[current[c]] for c in others), np.zeros(len(rows), np.int64))
                found = _all([fronts[a], fronts[b]], rows[:, [a, b]], room - taken)
                if found is not None:
                    current[a], current[b] = found
        if _spent(fronts, current) >= before:
            return current


def _spent(fronts: Sequence[Front], places: Sequence[int]) -> tuple[int, int]:
    return (
        sum(int(front.ps[place]) for front, place in zip(fronts, places, strict=True)),
        sum(int(front.bytes[place]) for front, place in zip(fronts, places, strict=True)),
    )


def _fits(fronts: Sequence[Front], places: Sequence[int], rows: Rows, room: Rows) -> bool:
    held = np.array([front.bytes[place] for front, place in zip(fronts, places, strict=True)], np.int64)
    return bool((rows @ held <= room).all())
