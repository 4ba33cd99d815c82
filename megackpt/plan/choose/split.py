"""How many layers each stage gets, when they need not be equal.

For a given period every stage can take so many layers and no more: with more of them it has more work, more state and
less room, so it replays more.  The least period at which all layers find a place is found by bisection.  From there,
and from the even division, single layers move away from the slowest stages as long as the simulated step gets
shorter.  The result is never worse than the even division; large vocabularies weigh as much as their product does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from megackpt.plan.choose.prices import PICO
from megackpt.plan.choose.problem import Counts, Pick, Problem

Solver = Callable[[int, tuple[int, ...]], Pick | None]
"""(stage, layers per chunk) -> the best pick; None if nothing fits."""

MOST_PERIOD = 1.5  # of the even division's work: replaying everything adds a third to it
MOST_ACTIONS = 1_000_000  # simulated while layers move: about a second


def period_seconds(problem: Problem, stage: int, layers: tuple[int, ...], pick: Pick) -> float:
    """Seconds of one micro-batch on a stage, replay included (the mean over its slots)."""
    replay = sum(map(sum, pick.replay_ps)) / len(pick.replay_ps) / PICO
    return problem.period_seconds(stage, layers) + replay


def chunked(layers: int, chunks: int) -> tuple[int, ...]:
    """Layers of one stage over its chunks; the later ones, of which fewer micro-batches are in flight, take more."""
    base, rest = divmod(layers, chunks)
    return tuple(base + (chunk >= chunks - rest) for chunk in range(chunks))


def least_period(problem: Problem, solver: Solver) -> Counts | None:
    """The division with the least period of the slowest stage; None if the layers do not fit at all."""
    most = problem.layers - (problem.stages - 1) * problem.chunks
    longest = MOST_PERIOD * max(problem.period_seconds(s, layers) for s, layers in enumerate(problem.division))
    periods: list[dict[int, float]] = []
    for stage in range(problem.stages):
        own: dict[int, float] = {}
        for layers in range(problem.chunks, most + 1):
            pieces = chunked(layers, problem.chunks)
            pick = None if problem.period_seconds(stage, pieces) > longest else solver(stage, pieces)
            if pick is None:
                break
            own[layers] = period_seconds(problem, stage, pieces, pick)
        if not own:
            return None
        periods.append(own)
    limits = sorted({seconds for own in periods for seconds in own.values()})
    low, high = 0, len(limits) - 1
    if _most_layers(periods, limits[high]) < problem.layers:
        return None
    while low < high:
        middle = (low + high) // 2
        if _most_layers(periods, limits[middle]) >= problem.layers:
            high = middle
        else:
            low = middle + 1
    return tuple(chunked(layers, problem.chunks) for layers in _shared_out(periods, limits[low], problem))


def _within(own: dict[int, float], limit: float) -> list[int]:
    return [layers for layers, seconds in own.items() if seconds <= limit]


def _most_layers(periods: Sequence[dict[int, float]], limit: float) -> int:
    if any(not _within(own, limit) for own in periods):
        return -1
    return sum(max(_within(own, limit)) for own in periods)


def _shared_out(periods: Sequence[dict[int, float]], limit: float, problem: Problem) -> list[int]:
    """All stages as full as the limit allows, less the layers too many: each taken from the slowest stage left, of
    equals the first (it holds most)."""
    counts = [max(_within(own, limit)) for own in periods]
    while sum(counts) > problem.layers:
        loaded = [s for s in range(problem.stages) if counts[s] > problem.chunks]
        slowest = max(loaded, key=lambda s: (periods[s][counts[s]], -s))
        counts[slowest] -= 1
    return counts


def improved(problem: Problem, solver: Solver, counts: Counts) -> tuple[Counts, float]:
    """Move single layers between stages while the simulated step gets shorter."""
    current, best = counts, _step(problem, solver, counts)
    tries = MOST_ACTIONS // len(problem.order)
    moved = True
    while moved and tries > 0:
        moved = False
        for candidate in _neighbours(problem, solver, current):
            tries -= 1
            seconds = _step(problem, solver, candidate)
            if seconds < best:
                current, best, moved = candidate, seconds, True
                break
            if tries <= 0:
                break
    return current, best


def _neighbours(problem: Problem, solver: Solver, counts: Counts) -> Iterator[Counts]:
    """One layer from one of the slowest stages to any other, from slow to fast stages."""
    totals = [sum(stage) for stage in counts]

    def slowness(stage: int) -> tuple[float, int]:
        pick = solver(stage, counts[stage])
        return (float("inf") if pick is None else period_seconds(problem, stage, counts[stage], pick), -stage)

    by_period = sorted(range(problem.stages), key=slowness, reverse=True)
    for giver in by_period[:4]:
        if totals[giver] <= problem.chunks:
            continue
        for taker in reversed(by_period):
            if taker != giver:
                new = [*counts]
                new[giver] = chunked(totals[giver] - 1, problem.chunks)
                new[taker] = chunked(totals[taker] + 1, problem.chunks)
                yield tuple(new)


def _step(problem: Problem, solver: Solver, counts: Counts) -> float:
    picks = [solver(stage, layers) for stage, layers in enumerate(counts)]
    if any(pick is None for pick in picks):
        return float("inf")
    return problem.step_seconds(counts, [pick for pick in picks if pick is not None])


def imbalance(problem: Problem, counts: Counts | None = None) -> tuple[float, ...]:
    """By stage: its work per micro-batch, without replay, over the mean of all stages.  An embedding-heavy head on
    an even division shows here."""
    division = counts or problem.division
    seconds = [problem.period_seconds(stage, layers) for stage, layers in enumerate(division)]
    mean = sum(seconds) / len(seconds)
    return tuple(s / mean for s in seconds)
