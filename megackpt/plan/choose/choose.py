"""Chooses what to keep for a whole training step, and says what that costs.

Stages are solved one by one, exactly; then the schedule's real lists are simulated with the result.  No replay is
left that a stage's room would spare: of all mixtures that fit, `stage.solve` takes the one that replays least, also
on stages that do not set the pace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from megackpt.plan.choose.ahead import Ahead, with_ahead
from megackpt.plan.choose.flags import best_policy, flag_policies
from megackpt.plan.choose.knapsack import Table
from megackpt.plan.choose.pareto import Item, group_items, layer_items
from megackpt.plan.choose.problem import Counts, DoesNotFit, Pick, Problem
from megackpt.plan.choose.split import improved, least_period
from megackpt.plan.choose.stage import solve, with_offload, with_slots
from megackpt.plan.decision import (
    KEEP,
    OFFLOAD_HOST,
    ChunkPlan,
    Decision,
    Group,
    Plan,
    SaveSet,
    Slots,
)
from megackpt.plan.policies import chunk_plan, full_layer
from megackpt.plan.simulate import Timeline


@dataclass(frozen=True)
class Options:
    """What the choice may use.  Everything is off that the trainer may be unable to run."""

    split: bool = False  # other numbers of layers per stage
    slots: bool = False  # keep more for some of the micro-batches in flight
    ahead: bool = False  # rebuild while a gradient is on its way
    offload: bool = False  # host memory
    groups: bool = True  # groups of layers replayed as one, where nothing else fits
    keep_gathered: bool = True


DEFAULTS = Options()
# How finely a stage's last bytes are spent: parts of what the bound of a stage may count too much.
GRAINS, GRAINS_OF_CHUNKS = 64, 16
COARSER = 4  # where those bytes are for replay ahead
MOST_FAR = 3  # budgets that are tried where predictions are known to be wrong
MOST_SIMULATED = 2_000_000  # actions, to decide stage by stage: two seconds


@dataclass(frozen=True)
class Choice:
    """The outcome: what each stage keeps, the simulated step, and the same step without any replay."""

    problem: Problem
    counts: Counts
    picks: tuple[Pick, ...]
    timeline: Timeline
    baseline_seconds: float  # of the problem's own division, keeping everything whether it fits or not
    name: str

    @property
    def step_seconds(self) -> float:
        return self.timeline.step_seconds

    @property
    def overhead(self) -> float:
        """Step time over the baseline, less one."""
        return self.step_seconds / self.baseline_seconds - 1

    @cached_property
    def plan(self) -> Plan:
        return plan_of(self.counts, self.picks, self.name)


def choose(problem: Problem, options: Options = DEFAULTS, items: Sequence[Item] | Table | None = None) -> Choice:
    """The fastest plan within the budget.  ``items``: the ways to treat a layer, or a table of them that
    was used before; None takes all Pareto save-sets.

    Never slower than the best of the recompute flags on all stages alike.  Raises DoesNotFit.
    """
    chooser = Chooser(problem, options, items)
    counts, picks, name = chooser.result()
    if options.ahead:

        def bound(stage: int, pick: Pick) -> int:
            tried = (*picks[:stage], pick, *picks[stage + 1 :])
            return problem.timeline(counts, tried).peak_bytes[stage]

        picks = chooser.ahead(counts, picks, bound)
    return chooser.choice(counts, picks, name)


Predicted = Callable[[int, Pick], int]
"""(stage, pick) -> bytes at the stage's peak, all of them."""


class Chooser:
    """One choice; what its parts share is computed once."""

    def __init__(self, problem: Problem, options: Options, items: Sequence[Item] | Table | None) -> None:
        self.problem, self.options = problem, options
        if items is None:
            items = layer_items(problem.pricing, options.keep_gathered)
        self.table = items if isinstance(items, Table) else Table(items)
        self.far = False  # predictions may be far from the bound of `Problem.room`
        self.solved: dict[tuple[int, tuple[int, ...], int], Pick | None] = {}

    @cached_property
    def grouped(self) -> Table:
        """The items and groups of layers; made where no save-sets fit."""
        largest = 2 * max(count for stage in self.problem.division for count in stage)
        return Table([*self.table.items, *group_items(self.problem.pricing, range(2, largest + 1))])

    def result(self, slots: bool = True) -> tuple[Counts, tuple[Pick, ...], str]:
        """By the bound of `Problem.room` alone; ``slots``: try them too, where the options allow it."""
        counts = self.problem.division
        if self.options.split:
            counts = self._divided() or counts
        picks = self._picks(counts)
        name = self.name
        best = self.problem.step_seconds(counts, picks)
        if slots and self.options.slots and self.problem.chunks == 1:
            picks = self._better(counts, picks, [self.slotted(stage, row, 0) for stage, row in enumerate(counts)])
            best = self.problem.step_seconds(counts, picks)
        policies = flag_policies(self.problem.pricing, max(map(max, counts)), groups=False)
        flags = best_policy(self.problem, policies, counts)
        if flags is not None and flags.step_seconds < best:
            return counts, flags.picks, f"flags: {flags.name}"
        return counts, picks, name

    def choice(self, counts: Counts, picks: tuple[Pick, ...], name: str) -> Choice:
        """The picks, simulated."""
        problem = self.problem
        timeline = problem.timeline(counts, picks)
        name += ", other layers per stage" * (counts != problem.division)
        name += ", slots" * any(len(pick.slots) > 1 for pick in picks)
        name += ", ahead" * any(pick.ahead for pick in picks)
        name += ", host memory" * any(pick.host_bytes for pick in picks)
        return Choice(problem, counts, picks, timeline, problem.step_seconds(problem.division, None), name)

    @property
    def name(self) -> str:
        return "per stage and chunk" if self.problem.chunks > 1 else "per stage"

    def solve(self, stage: int, layers: tuple[int, ...], spare: int = 0) -> Pick | None:
        """The best pick of one stage; groups of layers only where no save-sets fit."""
        key = (stage, layers, spare)
        if key not in self.solved:
            pick = solve(self.problem, self.table, stage, layers, spare)
            if self.options.offload and len(layers) == 1:
                away = with_offload(self.problem, self.table, stage, layers[0], spare)
                pick = away if away is not None and (pick is None or _total(away) < _total(pick)) else pick
            if pick is None and self.options.groups:
                pick = solve(self.problem, self.grouped, stage, layers, spare)
            self.solved[key] = pick
        return self.solved[key]

    def refined(self, counts: Counts, predicted: Predicted) -> tuple[Pick, ...]:
        """For every stage the best pick whose ``predicted`` bytes are within the budget.  Raises DoesNotFit."""
        picks, short = [], []
        for stage, layers in enumerate(counts):
            pick = self._refined(stage, layers, predicted, self.solve)
            if pick is None:
                least, pick = self.leanest(stage, layers, predicted)
                if least > self.problem.budget_bytes:
                    short.append((least, self._needs(stage, layers, least)))
            picks.append(pick)
        if short:
            least, said = max(short)
            raise DoesNotFit(said, least)
        if not self.options.slots or self.problem.chunks > 1:
            return tuple(picks)
        slotted = [self._refined(stage, layers, predicted, self.slotted) for stage, layers in enumerate(counts)]
        return self._better(counts, tuple(picks), slotted)

    def ahead(self, counts: Counts, picks: tuple[Pick, ...], predicted: Predicted) -> tuple[Pick, ...]:
        """The picks with replay ahead, where ``predicted`` bytes allow it and it makes the simulated step shorter."""
        problem = self.problem
        grains = (GRAINS if problem.chunks == 1 else GRAINS_OF_CHUNKS) // COARSER

        def leaner(stage: int, ahead: Ahead) -> Pick | None:
            def bytes_of(stage: int, pick: Pick) -> int:
                return predicted(stage, ahead(pick))

            pick = self._refined(stage, counts[stage], bytes_of, self.slotted, grains, max(counts[stage]))
            return pick and ahead(pick)

        return with_ahead(problem, counts, picks, lambda s, pick: predicted(s, pick) <= problem.budget_bytes, leaner)

    def _refined(
        self, stage: int, layers: tuple[int, ...], predicted: Predicted, solve: Callable[..., Pick | None],
        grains: int = 0, more: int = 1,
    ) -> Pick | None:  # fmt: skip
        """What the bound of `Problem.room` allows at some budget near the given one.  Candidates stand on a grid that
        does not depend on the budget, and are tried by halving: so more memory never gives a slower pick.  ``more``:
        so many layers may be rebuilt at once."""
        budget, slack = self.problem.budget_bytes, self.problem.slack_bytes(stage)
        grain = max(1, slack // (grains or (GRAINS if len(layers) == 1 else GRAINS_OF_CHUNKS)))
        near = more * slack
        near = budget if self.problem.split_backward or self.far else near  # weight gradients wait beyond the bound
        slack = MOST_FAR * budget if self.far else slack
        best, low, high = None, 0, 1 << 50
        while high - low > 1:
            middle = (low + high) // 2
            at = middle * grain
            if at > budget + slack:
                high = middle
                continue
            if at > budget - near:
                pick = solve(stage, layers, at - budget)
                if pick is not None and predicted(stage, pick) > budget:
                    high = middle
                    continue
                best = pick or best
            low = middle
        if best is None and (pick := solve(stage, layers, 0)) is not None:
            best = pick if predicted(stage, pick) <= budget else None
        return best

    def slotted(self, stage: int, layers: tuple[int, ...], spare: int) -> Pick | None:
        """As `solve`, with slots where they are wanted and gain something."""
        pick = self.solve(stage, layers, spare)
        if pick is None or not self.options.slots or len(layers) > 1 or pick.host_bytes or not _total(pick):
            return pick
        return with_slots(self.problem, self.table, stage, layers[0], spare) or pick

    def _picks(self, counts: Counts) -> tuple[Pick, ...]:
        picks = []
        for stage, layers in enumerate(counts):
            pick = self.solve(stage, layers)
            if pick is None:
                least = self._least_bound(stage, layers)
                raise DoesNotFit(self._needs(stage, layers, least), least)
            picks.append(pick)
        return tuple(picks)

    def _needs(self, stage: int, layers: tuple[int, ...], least: int) -> str:
        state = self.problem.state_bytes(stage, sum(layers))
        return (
            f"stage {stage} needs at least {least:,} bytes with {sum(layers)} layers ({state:,} of them state), "
            f"the budget is {self.problem.budget_bytes:,}"
        )

    def _least_bound(self, stage: int, layers: tuple[int, ...]) -> int:
        """The least budget at which the bound of `Problem.room` lets anything fit."""
        problem = self.problem
        table = self.grouped if self.options.groups else self.table
        needs = []
        for cap in table.caps(max(layers)):
            fronts = table.under(cap)
            if all(len(fronts[count]) for count in layers):
                lean = [int(fronts[count].bytes[0]) for count in layers]
                held = int((problem.rows[stage] @ lean - problem.room(stage, sum(layers), cap)).max())
                needs.append(held + problem.budget_bytes)
        return min(needs)

    def leanest(self, stage: int, layers: tuple[int, ...], predicted: Predicted) -> tuple[int, Pick]:
        """(predicted bytes, pick) of the leanest way to run a stage."""
        pick = self.solve(stage, layers, self._least_bound(stage, layers) - self.problem.budget_bytes)
        assert pick is not None
        return predicted(stage, pick), pick

    def _divided(self) -> Counts | None:
        """The better of what the even division and the least period lead to; None if neither fits."""
        starts = [self.problem.division, least_period(self.problem, self.solve)]
        ends = [improved(self.problem, self.solve, start) for start in starts if start is not None]
        counts, seconds = min(ends, key=lambda end: end[1])
        return counts if seconds < float("inf") else None

    def _better(self, counts: Counts, picks: tuple[Pick, ...], others: Sequence[Pick | None]) -> tuple[Pick, ...]:
        """``picks`` with those of the ``others`` that make the simulated step shorter; on the largest schedules all of
        them or none."""
        problem = self.problem
        best = problem.step_seconds(counts, picks)
        new = [stage for stage, pick in enumerate(others) if pick is not None and pick != picks[stage]]
        each = len(problem.order) * len(new) <= MOST_SIMULATED
        for some in [[stage] for stage in new] if each else [new]:
            tried = tuple(others[s] or pick if s in some else pick for s, pick in enumerate(picks))
            seconds = problem.step_seconds(counts, tried)
            if seconds < best:
                picks, best = tried, seconds
        return picks


def _total(pick: Pick) -> int:
    return sum(map(sum, pick.replay_ps))


def plan_of(counts: Counts, picks: Sequence[Pick], name: str) -> Plan:
    """The plan for one pick per stage; layers are numbered through the model."""
    return Plan.of_slots([chunk_plans(counts, stage, pick) for stage, pick in enumerate(picks)], name)


def chunk_plans(counts: Counts, stage: int, pick: Pick) -> tuple[Slots, ...]:
    """The plans of one stage by [chunk][slot]."""
    sizes = [layers[chunk] for chunk in range(len(counts[0])) for layers in counts]
    made = []
    for chunk, layers in enumerate(counts[stage]):
        first = sum(sizes[: chunk * len(counts) + stage])
        made.append(
            tuple(
                _chunk_plan(range(first, first + layers), slot[chunk], pick.units_ahead(number, chunk), pick.within)
                for number, slot in enumerate(pick.slots)
            )
        )
    return tuple(made)


def ends_of(layers: range) -> ChunkPlan:
    """What every chosen plan says of embedding and head: masks are redrawn, gathers and chunks of logits replayed."""
    return chunk_plan(layers, granularity="free", chunked_loss=True)


def _chunk_plan(layers: range, items: Sequence[Item], ahead: int, within: int) -> ChunkPlan:
    sets = dict(ends_of(layers).save_sets)
    groups = []
    place = layers.start
    for item in items:
        if item.save_set is None:
            groups.append(Group(place, place + item.layers - 1))
        save_set = item.save_set or full_layer("layer-input")
        for layer in range(place, place + item.layers):
            sets[f"layers.{layer}"] = _away(save_set) if item.host_bytes else save_set
        place += item.layers
    return ChunkPlan(sets, tuple(groups), ahead, within if ahead else 0)


def _away(save_set: SaveSet) -> SaveSet:
    """The same, in host memory."""

    def moved(decision: Decision) -> Decision:
        output = OFFLOAD_HOST if decision.output == KEEP else decision.output
        internals = OFFLOAD_HOST if decision.internals == KEEP else decision.internals
        return Decision(output, internals, decision.masks)

    return SaveSet({name: moved(d) for name, d in save_set.decisions.items()}, moved(save_set.default))
