"""Replay ahead, chosen: which stages rebuild while a gradient is on its way, for which bytes.

A gradient on its way up the pipeline passes one stage after the other, and every stage's replay stands in its way: at
the first backward of each stage, at the last ones, and wherever a slower stage lets the others wait.  What is rebuilt
ahead does not, but it is alive at once, and those bytes would spare a replay if they were kept.  Three things are
offered to every stage that replays:

* everything ahead while few forwards are in flight, as few as the budget has bytes for: the end of a step, which no
  stage can fill otherwise, costs nothing under 1F1B;
* in every backward the last layers of a chunk, as many as the budget has bytes for;
* less kept, and a share of every chunk's layers ahead in every backward, or all of them while fewer are in flight.

All stages take the same, or each the quickest with which it is no slower than the slowest one; then single stages
change as long as the simulated step gets shorter.  A stage that wins nothing by it is left as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from megackpt.plan.choose.pareto import Item
from megackpt.plan.choose.prices import PICO
from megackpt.plan.choose.problem import Counts, Pick, Problem
from megackpt.plan.choose.split import period_seconds

# Shares of the layers of a chunk, and of the forwards in flight within which they go ahead.
SHARES = ((1.0, 1.0), (0.5, 1.0), (1.0, 0.5))
MANY = 16  # chunks, for which the first share alone is tried
FEW = 8  # numbers of forwards in flight that are tried
HAIR = 5e-4  # of a step: what replay ahead must win
MOST_ACTIONS = 300_000  # simulated beside the few that any schedule gets: a fifth of a second

Ahead = Callable[[Pick], Pick]
"""The pick with something ahead."""
Leaner = Callable[[int, Ahead], Pick | None]
"""(stage, what is ahead) -> the best pick whose bytes are within the budget so, what is ahead included."""
Fits = Callable[[int, Pick], bool]


def most_units(mixture: Sequence[Item]) -> int:
    """How many of the last items can be rebuilt ahead: single layers, or one group that stands last."""
    count = 0
    for item in reversed(mixture):
        if item.save_set is None:
            return count or 1
        count += 1
    return count


def shared_out(problem: Problem, stage: int, pick: Pick, share: float, within: int = 0) -> Pick:
    """The pick with ``share`` of the items of each chunk ahead, as far as they replay anything."""
    return pick.with_ahead(
        [
            [
                _useful(mixture, math.ceil(share * most_units(mixture))) if _waits(problem, stage, chunk) else 0
                for chunk, mixture in enumerate(slot)
            ]
            for slot in pick.slots
        ],
        within,
    )


def at_the_end(problem: Problem, stage: int, pick: Pick, fits: Fits) -> Pick:
    """The pick with everything ahead, while as many forwards are in flight as the budget has bytes for."""
    most = max(problem.in_flight[stage].values())
    numbers = [0, *range(most, 0, -max(1, most // FEW))[::-1]]
    low, high = 0, len(numbers) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if fits(stage, shared_out(problem, stage, pick, 1.0, numbers[middle] % most)):
            low = middle
        else:
            high = middle - 1
    return shared_out(problem, stage, pick, 1.0, numbers[low] % most) if low else pick


def throughout(problem: Problem, stage: int, pick: Pick, fits: Fits) -> Pick:
    """The pick with as many of its last items ahead as the budget has bytes for in every backward.  Backwards do not
    overlap, so every slot and chunk has what is left for itself; slots that are alike are tried together."""
    everything = shared_out(problem, stage, pick, 1.0)
    found = [[0] * len(slot) for slot in pick.slots]
    wanted = {(pick.slots[s], c): units for s, row in enumerate(everything.ahead) for c, units in enumerate(row)}
    for (slot, chunk), high in wanted.items():
        low, places = 0, [s for s, other in enumerate(pick.slots) if other == slot]
        while low < high:
            middle = (low + high + 1) // 2
            alone = [[middle * (c == chunk and s in places) for c in range(len(slot))] for s in range(len(found))]
            if fits(stage, pick.with_ahead(alone)):
                low = middle
            else:
                high = middle - 1
        for place in places:
            found[place][chunk] = _useful(slot[chunk], low)
    return pick.with_ahead(found)


def with_ahead(
    problem: Problem, counts: Counts, picks: tuple[Pick, ...], fits: Fits, leaner: Leaner
) -> tuple[Pick, ...]:
    """The picks, with what replay ahead wins more than a `HAIR` of the simulated step with; else as they are."""
    if problem.stages == 1:
        return picks
    before = problem.step_seconds(counts, picks)
    everything = tuple(shared_out(problem, stage, pick, 1.0) for stage, pick in enumerate(picks))
    if problem.step_seconds(counts, everything) > before * (1 - HAIR):
        return picks  # not even with memory for all of it
    search = _Search(problem, counts, picks)
    stages = [stage for stage, pick in enumerate(everything) if pick.ahead]
    for offered in (at_the_end, throughout):
        search.offer_all({stage: offered(problem, stage, picks[stage], fits) for stage in stages})
    for share, part in SHARES[: 1 if problem.stages * problem.chunks > MANY else None]:
        for stage in stages:
            most = max(problem.in_flight[stage].values())
            within = math.ceil(part * most) % most
            search.offer(stage, leaner(stage, partial(shared_out, problem, stage, share=share, within=within)))
    search.take(search.quickest)
    search.improve()
    search.drop()
    return search.picks if search.seconds <= before * (1 - HAIR) else picks


class _Search:
    """The best picks so far, and what there is for every stage."""

    def __init__(self, problem: Problem, counts: Counts, picks: tuple[Pick, ...]) -> None:
        self.problem, self.counts, self.plain = problem, counts, picks
        self.picks, self.seconds = picks, problem.step_seconds(counts, picks)
        self.pace = max(self._period(stage, pick) for stage, pick in enumerate(picks))
        self.offers: list[list[Pick]] = [[pick] for pick in picks]
        self.left = MOST_ACTIONS // len(problem.order)

    def offer(self, stage: int, pick: Pick | None) -> None:
        if pick is not None and pick not in self.offers[stage]:
            self.offers[stage].append(pick)

    def offer_all(self, picks: Mapping[int, Pick]) -> None:
        """The same for some stages, and all of it at once."""
        for stage, pick in picks.items():
            self.offer(stage, pick)
        self.take(lambda stage: picks.get(stage, self.plain[stage]))

    def take(self, of: Callable[[int], Pick]) -> bool:
        """What ``of`` says for every stage, if that is quicker."""
        return self._try(tuple(of(stage) for stage in range(len(self.picks))))

    def quickest(self, stage: int) -> Pick:
        """Of the picks with which a stage is no slower than the slowest, the one that lets a gradient pass first."""
        allowed = [pick for pick in self.offers[stage] if self._period(stage, pick) <= self.pace]
        return min(allowed, key=lambda pick: (_in_the_way(pick), _spent(pick)), default=self.plain[stage])

    def improve(self) -> None:
        """Other picks for single stages, as long as one helps; some simulations are left for `drop`."""
        moved = True
        while moved:
            moved = False
            for stage, pick in self._others():
                if self.left <= len(self.picks):
                    return
                self.left -= 1
                moved = self._try(self._changed(stage, pick)) or moved

    def drop(self) -> None:
        """Leave as they were the stages that win nothing."""
        for stage, pick in enumerate(self.picks):
            if pick == self.plain[stage] or self.left <= 0:
                continue
            self.left -= 1
            tried = self._changed(stage, self.plain[stage])
            seconds = self.problem.step_seconds(self.counts, tried)
            if seconds <= self.seconds * (1 + HAIR / len(self.picks)):
                self.picks, self.seconds = tried, seconds

    def _others(self) -> Iterator[tuple[int, Pick]]:
        for stage, offers in enumerate(self.offers):
            for pick in offers:
                if pick != self.picks[stage]:
                    yield stage, pick

    def _changed(self, stage: int, pick: Pick) -> tuple[Pick, ...]:
        return (*self.picks[:stage], pick, *self.picks[stage + 1 :])

    def _try(self, picks: tuple[Pick, ...]) -> bool:
        seconds = self.problem.step_seconds(self.counts, picks)
        better = seconds < self.seconds * (1 - 1e-9)
        if better:
            self.picks, self.seconds = picks, seconds
        return better

    def _period(self, stage: int, pick: Pick) -> float:
        return period_seconds(self.problem, stage, self.counts[stage], pick)


def _waits(problem: Problem, stage: int, chunk: int) -> bool:
    """Whether a backward of the chunk waits for a gradient of another stage."""
    return (stage, chunk) != (problem.stages - 1, problem.chunks - 1)


def _useful(mixture: Sequence[Item], units: int) -> int:
    """At most ``units``: none beyond the first that has anything to replay."""
    while units and not mixture[-units].replay_ps:
        units -= 1
    return units


def _spent(pick: Pick) -> float:
    """Mean seconds of replay of a micro-batch."""
    return sum(map(sum, pick.replay_ps)) / len(pick.slots) / PICO


def _in_the_way(pick: Pick) -> float:
    """What of it most gradients wait for."""
    early = 0 if pick.within else sum(map(sum, pick.ahead_ps)) / len(pick.slots) / PICO
    return _spent(pick) - early
