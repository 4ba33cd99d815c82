"""The least extra work for a module graph under a byte budget.

What a segment holds from its forward to its backward narrows all later segments; what it needs in its own turn does
not.  So each segment gets a table of the least cost by both, S(p, r): bytes free for its replays and its backward, and
bytes it may hold beside its boundary when its forward has ended.  One pass over the segments in order then spends the
budget, with e the bytes that segments hold so far beside their boundaries:

    V(i, e) = min over r of S_i(free_i - e, r) + V(i+1, e + r)

Joints being boundaries, this is exact (in units, sizes rounded up), so no search is needed; a graph without joints is
a chain and goes to the chain planner.
"""

from __future__ import annotations

from math import inf

import numpy as np

from megackpt.plan.chains.graph import GraphPlan, ModuleGraph, Segment, run_graph
from megackpt.plan.chains.heterogeneous import best_fitting, heterogeneous, size_divisor
from megackpt.plan.chains.replay_table import Costs, ReplayTable
from megackpt.plan.chains.types import ChainPlan, InfeasibleBudget, Row

_UNITS = 128
_MOST_UNITS = 512


def plan_graph(graph: ModuleGraph, budget: int, *, units: int | None = None) -> GraphPlan:
    """The plan with the least forward cost whose peak, data included, is at most ``budget`` bytes.

    ``units``: count bytes in about so many units of the budget (default 128 to 512, by the number of nodes); exact
    whenever a common divisor of all sizes is at least that unit.  Raises InfeasibleBudget with the least budget for
    which a plan was found.
    """
    everything = _keep_all(graph)
    most = run_graph(graph, everything).peak_bytes
    if most <= budget:
        return everything
    if len(graph.segments) == 1:
        return _as_chain(graph, budget)
    units = units or min(_MOST_UNITS, _UNITS + 2 * len(graph))
    planner = _Planner(graph, budget, units)
    found = best_fitting(
        lambda spare: planner.plan(budget + spare * planner.unit),
        lambda plan: run_graph(graph, plan).peak_bytes <= budget,
        0,
        planner.spare,
    )
    if found is not None:
        return found
    leanest = _leanest(graph, most, units)
    least = run_graph(graph, leanest).peak_bytes
    if least > budget:
        raise InfeasibleBudget(budget, least)
    return leanest


def _keep_all(graph: ModuleGraph) -> GraphPlan:
    return GraphPlan(tuple(ChainPlan.keep_all(len(s.chain)) for s in graph.segments))


def _as_chain(graph: ModuleGraph, budget: int) -> GraphPlan:
    chain = graph.segments[0].chain
    try:
        return GraphPlan((heterogeneous(chain, budget - graph.input_bytes),))
    except InfeasibleBudget as error:
        raise InfeasibleBudget(budget, graph.input_bytes + int(error.least)) from None


def _leanest(graph: ModuleGraph, peak: int, units: int) -> GraphPlan:
    """A plan with the least peak: bisect below the best peak so far, in ever finer units, while that helps."""
    best = _keep_all(graph)
    while True:
        planner, low, high, found = _Planner(graph, peak, units), graph.input_bytes, peak, None
        while high - low > 1:
            middle = (low + high) // 2
            plan = planner.plan(middle)
            if plan is None:
                low = middle
            else:
                high, found = min(middle, run_graph(graph, plan).peak_bytes), plan
        if found is None or high >= peak:
            return best
        best, peak = found, high


class _Planner:
    """Tables for budgets up to ``most`` bytes."""

    def __init__(self, graph: ModuleGraph, most: int, units: int) -> None:
        free = max(most - graph.input_bytes, 0)
        divisor = np.gcd.reduce([size_divisor(s.chain) for s in graph.segments])
        self.unit = max(int(divisor), -(-free // units), 1)
        self.spare = 0 if divisor % self.unit == 0 else min(len(graph), free // self.unit // 4)
        self.most = free // self.unit + self.spare
        self.segments = graph.segments
        outputs = [s.chain.stages[-1].output_bytes for s in self.segments]
        self.around = [  # bytes that are there whatever the plan, when a segment has its turn in backward
            graph.input_bytes + sum(outputs[:n]) + s.pending_gradient_bytes for n, s in enumerate(self.segments)
        ]
        made: dict[object, _SegmentTable] = {}  # equal segments are planned once
        self.tables: list[_SegmentTable] = []
        for segment in self.segments:
            key = (segment.chain, segment.pending_gradient_bytes)
            if key not in made:
                made[key] = _SegmentTable(segment, self.unit, self.most)
            self.tables.append(made[key])

    def plan(self, budget: int) -> GraphPlan | None:
        """The best plan for at most ``budget`` bytes, None if there is none."""
        free = [(budget - around) // self.unit for around in self.around]
        costs: Costs = np.full((len(free) + 1, self.most + 1), inf)
        costs[-1] = 0
        for n in reversed(range(len(free))):
            for used in range(min(free[n], self.most) + 1):
                costs[n, used] = self._choices(n, free[n], used, costs[n + 1]).min()
        if costs[0, 0] == inf:
            return None
        plans, used = [], 0
        for n, table in enumerate(self.tables):
            hold = int(self._choices(n, free[n], used, costs[n + 1]).argmin())
            plans.append(table.plan(free[n] - used, hold))
            used += hold
        return GraphPlan(tuple(plans))

    def _choices(self, n: int, free: int, used: int, later: Costs) -> Costs:
        """Cost of segment n and all later ones by the units that n may hold."""
        own: Costs = self.tables[n].costs[0, min(free - used, self.most), : self.most + 1 - used]
        return own + later[used:]


class _SegmentTable:
    """``costs[s, p, r]``: stages s ... of the segment with p units free for replays and backward, when they may hold
    r units beside the segment's output at the end of the forward."""

    def __init__(self, segment: Segment, unit: int, most: int) -> None:
        self.table = ReplayTable(segment.chain, unit, most)
        self.needs = self.table.needs
        self.end, self.most = len(segment.chain) - 1, most
        self.slack = segment.pending_gradient_bytes  # the forward has these bytes, the backward has not
        self.costs: Costs = np.full((self.end + 2, most + 1, most + 1), inf)
        self.costs[-1] = 0
        for s in reversed(range(self.end + 1)):
            for k in range(self.end - s + 2):
                self._try(s, k)

    def _try(self, s: int, k: int) -> None:
        """Into the table the move k at s: 0 keeps the stage, else k stages are dropped."""
        need, hold = self._needs(s, k)
        if need > self.most:
            return
        top = self.most + 1 - hold
        own = self.table.dropped[self.table.subs.ids[s, s + k - 1], need:, None] if k else self.table.forward[s]
        costs = self.costs[s, need:, hold:]
        np.minimum(costs, own + self.costs[s + max(k, 1), need - hold : top, :top], out=costs)

    def _needs(self, s: int, k: int) -> tuple[int, int]:
        """Units that a move needs at once, in replays and backward, and units that it holds from then on."""
        needs = self.needs
        last = s + max(k, 1) - 1
        if k:
            now, later, hold = needs.running_to(s, last)[-1], needs.output[last], needs.output[last]
        else:
            now, later, hold = needs.taping[s], needs.reverse[s], needs.tape[s]
        if last == self.end:  # the loss, or the reader, still has the output, which counts as the boundary
            later = np.maximum(later, hold + needs.gradient[last])
            hold = hold - needs.output[last]
        held = int(self.table.units(hold))
        return max(int(self.table.units(np.maximum(now - self.slack, later))), held), held

    def plan(self, free: int, hold: int) -> ChainPlan:
        rows: list[Row] = []
        s = 0
        while s <= self.end:
            k, held = self._best(s, free, hold)
            rows.append(Row(0, "drop", s, s + k - 1) if k else Row(0, "keep", s, s))
            if k:
                rows += self.table.rows(s, s + k - 1, free, 1)
            s, free, hold = s + max(k, 1), free - held, hold - held
        return ChainPlan.from_rows(rows)

    def _best(self, s: int, free: int, hold: int) -> tuple[int, int]:
        """The best move, and the units that it holds."""
        best = (inf, 0, 0)
        for k in range(self.end - s + 2):
            need, held = self._needs(s, k)
            if need <= free and held <= hold:
                own = self.table.dropped[self.table.subs.ids[s, s + k - 1], free] if k else self.table.forward[s]
                best = min(best, (float(own + self.costs[s + max(k, 1), free - held, hold - held]), k, held))
        return best[1], best[2]
