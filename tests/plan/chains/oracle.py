"""Slow and simple planners that share nothing with the fast ones: all trees, and all sequences of actions."""
from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Iterable
from functools import cache
from math import inf
from random import Random
from typing import Any

from megackpt.plan.chains.graph import GraphPlan, ModuleGraph, run_graph
from megackpt.plan.chains.machine import run
from megackpt.plan.chains.types import Chain, ChainPlan, Drop, Keep, Move, Stage
from tests.pool import ROOT


def figures() -> dict[str, Any]:
    data: dict[str, Any] = json.loads((ROOT / "tests/data/schedules.json").read_text())
    return data


@cache
def all_moves(length: int) -> tuple[tuple[Move, ...], ...]:
    """Every plan of a chain whose last stage is kept at the top (1, 2, 6, 22, 90, ... of them)."""
    if length == 1:
        return ((Keep(),),)
    plans: list[tuple[Move, ...]] = [(Keep(), *rest) for rest in all_moves(length - 1)]
    for k in range(1, length):
        plans += [(Drop(k, inner), *rest) for inner in all_moves(k) for rest in all_moves(length - k)]
    return tuple(plans)


@cache
def all_segment_moves(length: int) -> tuple[tuple[Move, ...], ...]:
    """The same, and the plans that end with a dropped segment."""
    if length == 0:
        return ((),)
    plans: list[tuple[Move, ...]] = [(Keep(), *rest) for rest in all_segment_moves(length - 1)]
    for k in range(1, length + 1):
        plans += [(Drop(k, inner), *rest) for inner in all_moves(k) for rest in all_segment_moves(length - k)]
    return tuple(plans)


Front = list[tuple[int, float]]


def front_of(found: Iterable[tuple[int, float]]) -> Front:
    """(peak, forward cost) of the plans that no other plan beats in both, the leanest first."""
    front: Front = []
    for peak, cost in sorted(found):
        if not front or cost < front[-1][1] - 1e-9:
            front.append((peak, cost))
    return front


def best_costs(chain: Chain) -> Front:
    reports = (run(chain, ChainPlan(moves)) for moves in all_moves(len(chain)))
    return front_of((r.peak_bytes, r.forward_cost) for r in reports)


def best_graph_costs(graph: ModuleGraph) -> Front:
    """The same for a graph: every combination of every plan of every segment."""
    choices = []
    for segment in graph.segments:
        plans: dict[tuple[float, ...], ChainPlan] = {}
        for moves in all_segment_moves(len(segment.chain)):
            r = run(segment.chain, ChainPlan(moves))
            plans[r.forward_peak_bytes, r.backward_peak_bytes, r.held_bytes, r.forward_cost] = ChainPlan(moves)
        # more of everything is never better
        beaten = {a for a in plans for b in plans if a != b and all(y <= x for x, y in zip(a, b, strict=True))}
        choices.append([plan for numbers, plan in plans.items() if numbers not in beaten])
    reports = (run_graph(graph, GraphPlan(plans)) for plans in itertools.product(*choices))
    return front_of((r.peak_bytes, r.forward_cost) for r in reports)


def cost_at(front: Front, budget: int) -> float:
    return min((cost for peak, cost in front if peak <= budget), default=inf)


def least_cost(length: int, ram: int, disk: int = 0, transfer: float = 0.0) -> float:
    """Extra advances and transfers of the best sequence of actions whatsoever on a uniform chain with slots in two
    tiers: shortest path over (working state, states held in RAM and on disk, next backward)."""
    start = (0, frozenset[int](), frozenset[int](), length)
    costs: dict[Any, float] = {start: 0.0}
    order = itertools.count()
    work: list[Any] = [(0.0, next(order), start)]
    while work:
        cost, _, here = heapq.heappop(work)
        if cost > costs[here]:
            continue
        at, fast, slow, end = here
        if end == 0:
            return cost
        steps: list[tuple[float, Any]] = []
        if at == end - 1:
            steps.append((0.0, (-1, fast, slow, end - 1)))  # tape it and run its backward
        elif at >= 0:
            steps.append((1.0, (at + 1, fast, slow, end)))
        if at >= 0 and at not in fast and len(fast) < ram:
            steps.append((0.0, (at, fast | {at}, slow, end)))
        if at >= 0 and at not in slow and len(slow) < disk:
            steps.append((transfer, (at, fast, slow | {at}, end)))
        steps += [(0.0, (state, fast, slow, end)) for state in fast if state != at]
        steps += [(transfer, (state, fast, slow, end)) for state in slow if state != at]
        steps += [(0.0, (at, fast - {state}, slow, end)) for state in fast]
        steps += [(0.0, (at, fast, slow - {state}, end)) for state in slow]
        for price, there in steps:
            if cost + price < costs.get(there, inf):
                costs[there] = cost + price
                heapq.heappush(work, (cost + price, next(order), there))
    return inf


def random_stage(random: Random) -> Stage:
    """Small uneven numbers, every field in use."""
    output = random.randint(1, 4)
    return Stage(
        output_bytes=output,
        tape_bytes=output + random.randint(0, 8),
        forward_cost=(cost := random.randint(1, 6)),
        backward_cost=2.0 * cost,
        spared_cost=random.choice([0, 0, cost / 2]),
        gradient_bytes=random.choice([0, output]),
        reads_output=random.random() < 0.5,
        forward_transient=random.choice([0, 0, 3, 9, 15]),
        tape_transient=random.choice([0, 0, 2, 12]),
        backward_transient=random.choice([-2, 0, 4]),
    )


def random_chain(random: Random, length: int) -> Chain:
    return Chain(tuple(random_stage(random) for _ in range(length)), random.randint(0, 3), random.randint(0, 2))
