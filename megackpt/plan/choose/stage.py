"""The best choice for one stage, given what it may hold: mixtures of items, slots, host offload."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megackpt.plan.choose.chunks import best_points
from megackpt.plan.choose.knapsack import Front, Fronts, Table
from megackpt.plan.choose.pareto import Item
from megackpt.plan.choose.problem import Pick, Problem
from megackpt.plan.predict import RESIDENT

MOST_PAIRS = 200_000


def solve(problem: Problem, table: Table, stage: int, layers: tuple[int, ...], spare: int = 0) -> Pick | None:
    """The pick that replays least on ``stage`` with so many layers per chunk; None if nothing fits.  ``spare``: see
    `Problem.room`."""
    rows = problem.rows[stage]
    best: tuple[int, int, int, list[int]] | None = None
    for cap in table.caps(max(layers)):
        fronts = table.under(cap)
        room = problem.room(stage, sum(layers), cap, spare)
        chosen = [fronts[count] for count in layers]
        if len(layers) == 1:  # the common case without the generality
            place = chosen[0].find(int((room // rows[:, 0]).min())) if len(chosen[0]) else -1
            points = None if place < 0 else [place]
        else:
            points = best_points(chosen, rows, room)
        if points is None:
            continue
        ps = sum(int(front.ps[place]) for front, place in zip(chosen, points, strict=True))
        held = sum(int(front.bytes[place]) for front, place in zip(chosen, points, strict=True))
        if best is None or (ps, held) < best[:2]:
            best = (ps, held, cap, points)
    if best is None:
        return None
    _, _, cap, points = best
    fronts = table.under(cap)
    return Pick((tuple(tuple(fronts.mixture(k, place)) for k, place in zip(layers, points, strict=True)),))


def with_slots(problem: Problem, table: Table, stage: int, layers: int, spare: int = 0) -> Pick | None:
    """As `solve` for one chunk, but some of the micro-batches in flight may keep more than the others (Korthikanti et
    al. 2022, appendix C): two mixtures, a slot for each micro-batch in flight.  None if that gains nothing."""
    in_flight = int(problem.rows[stage].max())
    best: tuple[int, Pick] | None = None
    for cap in table.caps(layers):
        fronts = table.under(cap)
        room = int(problem.room(stage, layers, cap, spare)[0])
        found = _pair(fronts[layers], in_flight, room)
        if found is not None and (best is None or found[0] < best[0]):
            total, lean, rich, count = found
            mixtures = [tuple(fronts.mixture(layers, place)) for place in (rich, lean)]
            slots = [mixtures[0]] * count + [mixtures[1]] * (count < in_flight)
            best = (total, Pick(tuple((mixture,) for mixture in slots)))
    return best[1] if best else None


def _pair(front: Front, in_flight: int, room: int) -> tuple[int, int, int, int] | None:
    """(picoseconds of all slots, lean place, rich place, rich slots), least first."""
    lean_most = front.find(room // in_flight)
    if lean_most < 0 or lean_most == len(front) - 1:
        return None  # nothing fits, or everything fits in the fastest mixture
    places = front.hull if len(front) ** 2 > MOST_PAIRS else np.arange(len(front))
    lean, rich = (g.ravel() for g in np.meshgrid(places[places <= lean_most], places, indexing="ij"))
    lean, rich = lean[rich > lean], rich[rich > lean]
    if not len(lean):
        return None
    count = np.minimum((room - in_flight * front.bytes[lean]) // (front.bytes[rich] - front.bytes[lean]), in_flight)
    total = (in_flight - count) * front.ps[lean] + count * front.ps[rich]
    k = int(np.lexsort((lean, -rich, total))[0])
    if total[k] >= in_flight * front.ps[lean_most]:
        return None
    return int(total[k]), int(lean[k]), int(rich[k]), int(count[k])


def with_offload(problem: Problem, table: Table, stage: int, layers: int, spare: int = 0) -> Pick | None:
    """As `solve` for one chunk, but any number of layers may send what they keep to host memory.  Of those layers
    `RESIDENT` micro-batches are on the device, and what one micro-batch sends must pass within its period."""
    in_flight = int(problem.rows[stage].max())
    lane = int(problem.host_bytes_per_s * problem.period_seconds(stage, (layers,)))
    best: tuple[int, ...] | None = None
    for cap in table.caps(layers):
        fronts = table.under(cap)
        room = int(problem.room(stage, layers, cap, spare)[0])
        for away in range(layers + 1):
            found = _divided(fronts, layers, away, room, in_flight, lane)
            if found is not None and (best is None or found[:3] < best[:3]):
                best = (*found, cap, away)
    if best is None:
        return None
    gone, stay, cap, away = best[3:]
    fronts = table.under(cap)
    sent = [_offloaded(item) for item in fronts.mixture(away, gone)]
    return Pick(((tuple(fronts.mixture(layers - away, stay) + sent),),))


def _divided(
    fronts: Fronts, layers: int, away: int, room: int, in_flight: int, lane: int
) -> tuple[int, int, int, int, int] | None:
    """(picoseconds, bytes to the host, bytes kept, place of the layers sent away, place of those that stay)."""
    gone, stay = fronts[away], fronts[layers - away]
    if not len(gone) or not len(stay):
        return None
    usable = gone.bytes <= lane
    left = (room - min(RESIDENT, in_flight) * gone.bytes) // in_flight
    place = np.searchsorted(stay.bytes, left, side="right") - 1
    index = np.flatnonzero(usable & (place >= 0))
    if not len(index):
        return None
    ps = gone.ps[index] + stay.ps[place[index]]
    k = int(np.lexsort((gone.bytes[index], ps))[0])
    i = int(index[k])
    return int(ps[k]), int(gone.bytes[i]), int(stay.bytes[place[i]]), i, int(place[i])


def _offloaded(item: Item) -> Item:
    return replace(item, kept_bytes=0, host_bytes=item.kept_bytes)
