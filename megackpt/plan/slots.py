"""Which slot a micro-batch takes: where plans differ between the micro-batches in flight, it decides what is kept.

A slot is a place among the micro-batches of one chunk that are in flight on a stage.  A micro-batch takes the lowest
free one at its forward and leaves it when its backward is done (what weight gradients wait with is no part of its
plan).  It follows from the stage's list alone, so simulator and trainer agree, and ranks of one tensor-parallel group.

p = 3, stage 0 under 1F1B::

    F0 F1 F2 B0 F3 B1 F4 B2 ...        slots 0 1 2   0   1
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from megackpt.plan.schedule import Action


def slots_of(actions: Sequence[Action]) -> Mapping[tuple[int, int], int]:
    """(micro-batch, chunk) -> slot, for every forward in a stage's list.  Forward-only lists hold nothing: slot 0."""
    free: dict[int, list[int]] = {}
    most: dict[int, int] = {}
    slots: dict[tuple[int, int], int] = {}
    holds = any(action.kind == "B" for action in actions)
    for action in actions:
        place = (action.micro_batch, action.chunk)
        if not holds:
            slots[place] = 0
        elif action.kind == "F":
            waiting = free.setdefault(action.chunk, [])
            if not waiting:
                most[action.chunk] = most.get(action.chunk, 0) + 1
                waiting.append(most[action.chunk] - 1)
            slots[place] = heapq.heappop(waiting)
        elif action.kind == "B":
            heapq.heappush(free[action.chunk], slots[place])
    return slots


def in_flight_of(actions: Sequence[Action]) -> Mapping[Action, int]:
    """By backward: the forwards of all chunks in flight on the stage when it comes, its own included."""
    held, found = 0, {}
    for action in actions:
        if action.kind == "F":
            held += 1
        elif action.kind == "B":
            found[action] = held
            held -= 1
    return found
