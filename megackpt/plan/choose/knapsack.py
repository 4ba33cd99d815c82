"""The best mixture of items for any number of layers and any budget: an exact multiple-choice knapsack.

Layers of one class are alike, so what counts is how many get which item.  `Fronts` holds, for every number of layers
up to the largest stage, all mixtures that no other beats in bytes and seconds::

    front(0) = {(0, 0)},   front(k) = the unbeaten ones of  front(k - item.layers) + item  over all items

One such table answers every stage and every budget by a binary search.  Compared with a table over bytes it needs no
rounding of bytes: what it returns is exact to the byte and optimal.  (Only a front longer than ``limit`` is thinned,
to real mixtures within 1/limit of its range; this starts at about a hundred layers in one stage.)

Backward of one layer also holds what it rebuilds, so mixtures are solved once per cap on that: `Table`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megackpt.plan.choose.pareto import Item, prune

LIMIT = 20_000
Whole = NDArray[np.int64]


@dataclass(frozen=True)
class Front:
    """Unbeaten mixtures for one number of layers: bytes strictly ascending, picoseconds strictly descending."""

    bytes: Whole
    ps: Whole
    before: NDArray[np.int64]  # place in the smaller front that it was made from
    item: NDArray[np.int64]  # place of the item that was added

    def __len__(self) -> int:
        return len(self.bytes)

    def find(self, room: int) -> int:
        """Place of the fastest mixture of at most ``room`` bytes; -1 if there is none."""
        return int(np.searchsorted(self.bytes, room, side="right")) - 1


    @cached_property
    def hull(self) -> NDArray[np.int64]:
        """Places on the lower convex hull."""
        held, spent = self.bytes.tolist(), self.ps.tolist()
        hull: list[int] = []
        for k in range(len(held)):
            while len(hull) > 1:
                a, b = hull[-2], hull[-1]
                if (spent[b] - spent[a]) * (held[k] - held[a]) < (spent[k] - spent[a]) * (held[b] - held[a]):
                    break
                hull.pop()
            hull.append(k)
        return np.array(hull)


class Fronts:
    """The fronts of all numbers of layers over one list of items; a longer one is made when first asked for."""

    def __init__(self, items: Sequence[Item], limit: int = LIMIT) -> None:
        self.items = tuple(items)
        zero = np.zeros(1, np.int64)
        self._fronts: list[Front] = [Front(zero, zero, zero, zero - 1)]
        self._limit = limit

    def __getitem__(self, layers: int) -> Front:
        while len(self._fronts) <= layers:
            self._fronts.append(self._extended(len(self._fronts)))
        return self._fronts[layers]

    def _extended(self, k: int) -> Front:
        parts: list[tuple[Any, ...]] = []
        for place, item in enumerate(self.items):
            if item.layers <= k:
                front = self._fronts[k - item.layers]
                size = len(front)
                parts.append(
                    (front.bytes + item.kept_bytes, front.ps + item.replay_ps, np.arange(size), np.full(size, place))
                )
        if not parts:
            empty = np.zeros(0, np.int64)
            return Front(empty, empty, empty, empty)
        held, ps, before, item_of = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.lexsort((ps, held))
        faster = np.ones(len(order), bool)
        faster[1:] = ps[order][1:] < np.minimum.accumulate(ps[order])[:-1]
        order = self._thinned(order[faster], held)
        return Front(held[order], ps[order], before[order], item_of[order])

    def _thinned(self, order: Whole, held: Whole) -> Whole:
        """At most ``limit`` of the places: the leanest, and the richest in each of equal strips of bytes."""
        if len(order) <= self._limit:
            return order
        low, high = int(held[order[0]]), int(held[order[-1]])
        strip = (held[order] - low) * (self._limit - 2) // (high - low)
        last = np.ones(len(order), bool)
        last[:-1] = strip[1:] != strip[:-1]
        last[0] = True
        return order[last]

    def mixture(self, layers: int, place: int) -> list[Item]:
        """The items of one point of a front, those that rebuild most first: backward comes to them last, when
        least else is left."""
        chosen = []
        while layers > 0:
            front = self._fronts[layers]
            item = self.items[front.item[place]]
            chosen.append(item)
            layers, place = layers - item.layers, int(front.before[place])
        return sorted(chosen, key=lambda item: (-item.transient_bytes, item.rank))


class Table:
    """`Fronts` for every cap on what one layer's backward may rebuild; made when first asked for."""

    def __init__(self, items: Sequence[Item], limit: int = LIMIT) -> None:
        self.items = prune(items)
        self._limit = limit
        self._fronts: dict[int, Fronts] = {}

    def caps(self, layers: int) -> list[int]:
        """The bytes that matter as caps for pieces of at most ``layers`` layers, descending; 0 where there are none."""
        return sorted({item.transient_bytes for item in self.items if item.layers <= layers}, reverse=True) or [0]

    def under(self, cap: int) -> Fronts:
        """Fronts of the items that rebuild at most ``cap`` bytes."""
        if cap not in self._fronts:
            allowed = prune([item for item in self.items if item.transient_bytes <= cap], transient=False)
            self._fronts[cap] = Fronts(allowed, self._limit)
        return self._fronts[cap]
