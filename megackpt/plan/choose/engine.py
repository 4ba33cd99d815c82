"""The choice for a model on a machine: closed-form or measured profiles priced as our engine runs them.

`problem_of` bounds a stage's bytes from above (all that is kept, plus the most that any one layer adds for a moment).
The prediction walks the real lists and knows better: kept tensors go while backward rebuilds others.  So each stage is
given more than the bound allows, as long as its predicted bytes stay within the budget (`Chooser.refined`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from megackpt.plan.accelerators import Machine
from megackpt.plan.choose.choose import DEFAULTS, Choice, Chooser, Options, chunk_plans, ends_of
from megackpt.plan.choose.knapsack import Table
from megackpt.plan.choose.pareto import layer_items
from megackpt.plan.choose.prices import replay_seconds
from megackpt.plan.choose.problem import Counts, DoesNotFit, End, Pick, Problem
from megackpt.plan.chunk import ChunkModel, Spans
from megackpt.plan.decision import ChunkPlan, Group, Plan, SaveSet, Slots
from megackpt.plan.demand import present_steps
from megackpt.plan.kept import kept_bytes, records, replay
from megackpt.plan.live import Layer, backward_span, forward_span
from megackpt.plan.machine import needs_of
from megackpt.plan.numbers import Layout, ModelNumbers
from megackpt.plan.parameters import (
    embedding_parameters,
    filling_bytes,
    head_parameters,
    layer_parameters,
    state_bytes,
)
from megackpt.plan.policies import full_layer
from megackpt.plan.predict import Prediction, predict, predict_stage, short_lists
from megackpt.plan.profile import LayerProfile, Profile, profile
from megackpt.plan.seconds import StepClock
from megackpt.plan.simulate import Speed
from megackpt.plan.steps import BLOCK, BLOCK_NAMES, GATHERS

# Messages alive beside activations: one posted ahead per direction, one sent that has not left.
MESSAGES = 3


@dataclass(frozen=True)
class EnginePrices:
    """A layer's prices as our engine runs it (`LayerPricing`)."""

    made: Profile
    clock: StepClock
    shared_gathers: bool = True

    @property
    def block(self) -> LayerProfile:
        return self.made.block

    @cached_property
    def forward_seconds(self) -> float:
        return self.clock.layer_forward(self.block)

    @cached_property
    def backward_seconds(self) -> float:
        return self.clock.layer_backward(self.block)

    @cached_property
    def weight_seconds(self) -> float:
        return self.clock.layer_weights(self.block)

    @cached_property
    def absent(self) -> tuple[str, ...]:
        return tuple(name for name in BLOCK_NAMES if name not in self.block.names)

    @cached_property
    def _seconds(self) -> dict[str, float]:
        return {step.name: self.clock.forward(step) for step in self.block.steps}

    def kept_bytes(self, save_set: SaveSet) -> int:
        return kept_bytes(self.block, save_set)

    def transient_bytes(self, save_set: SaveSet) -> int:
        """Of the layer's backward with the gradient it starts from, or of its forward, whichever is more."""
        return _transient(self.block, save_set, self.made.boundary_bytes)

    def forward_transient_bytes(self) -> int:
        return 0  # counted by `transient_bytes`

    def replay_seconds(self, save_set: SaveSet) -> float:
        names = replay(self.block, save_set).steps
        host = self.clock.machine.overheads.span_s * records(self.block, save_set)
        return host + replay_seconds(present_steps(BLOCK, self.absent), self._seconds, names, self.shared_gathers)

    def group(self, layers: int) -> tuple[int, int, float]:
        """A group replayed at once keeps its gathered tensors, so its backward does not gather again."""
        sets = {f"layers.{k}": full_layer("layer-input") for k in range(layers)}
        plan = ChunkPlan(sets, (Group(0, layers - 1),))
        model = ChunkModel(self.made, plan, range(layers), first=False, last=False, t=self.clock.t)
        peak = max(model.forward().peak, model.backward().peak) + 2 * self.made.boundary_bytes
        spared = sum(self._seconds.get(name, 0.0) for name in ("mlp.down", "mlp.reduce", "mlp.residual"))
        gathers = sum(self._seconds.get(name, 0.0) for name in GATHERS)
        return self.block.input_bytes, peak, layers * (self.forward_seconds - gathers) - spared


def _transient(layer: LayerProfile, save_set: SaveSet, boundary: int) -> int:
    """Most bytes above what the layer keeps; the gradient it starts from, and one message more, included."""
    spans = Layer(layer, save_set)
    kept = kept_bytes(layer, save_set) - layer.input_bytes
    return max(forward_span(spans).peak - kept, backward_span(spans).peak + 2 * boundary)


def problem_of(
    model: ModelNumbers, layout: Layout, machine: Machine, budget_bytes: int, made: Profile | None = None
) -> Problem:
    """The numbers of ``layout`` on ``machine``.  The budget is all of a rank's memory: state, communicators, the
    driver's context and the margin are paid from it."""
    made = profile(model, layout) if made is None else made
    pricing = EnginePrices(made, StepClock(machine, layout.act_bytes, layout.t, layout.world))
    messages = MESSAGES * made.boundary_bytes * (layout.p > 1)
    own_matrix = not (model.tied and layout.p * layout.v == 1)
    states = [
        state_bytes(count.total, layout).total
        for count in (
            embedding_parameters(model, layout.t),
            head_parameters(model, layout.t, own_matrix=own_matrix),
            layer_parameters(model, layout.t),
        )
    ]
    return Problem(
        pricing,
        layers=sum(len(chunk) for stage in layout.pieces for chunk in stage),
        stages=layout.p,
        micro_batches=layout.n,
        budget_bytes=budget_bytes,
        chunks=layout.v,
        schedule=layout.schedule,
        counts=tuple(tuple(len(chunk) for chunk in stage) for stage in layout.pieces),
        first=_end(pricing, made.embedding, states[0]),
        last=_end(pricing, made.head, states[1]),
        layer_state_bytes=states[2] + 1,  # shards of the optimizer are rounded up, per stage and not per layer
        base_bytes=machine.communicator_bytes * layout.communicators
        + machine.context_bytes
        + machine.margin_bytes
        + filling_bytes(model, layout)
        + messages,
        message_bytes=messages,
        transfer_seconds=pricing.clock.send(made.boundary_bytes),
        host_bytes_per_s=machine.host_bytes_per_s,
        speed=stage_speed(machine, layout),
    )


def stage_speed(machine: Machine, layout: Layout) -> Speed | None:
    """Of a stage while several compute, where all ranks share one host's cores and caches."""
    slowdown = machine.company(layout.world).slowdown
    if not machine.shared_rates and slowdown == 1:
        return None
    ranks = layout.t * layout.c * layout.d  # of a stage, which compute together
    return lambda stages: machine.speed(stages * ranks) / slowdown


def _end(pricing: EnginePrices, layer: LayerProfile, state: int) -> End:
    save_set = ends_of(range(0)).save_sets[layer.kind]
    clock = pricing.clock
    tail = layer.steps[-1].held_bytes // 8 if layer.kind == "head" else 0  # which tokens count
    return End(
        kept_bytes=kept_bytes(layer, save_set) + tail,
        transient_bytes=_transient(layer, save_set, pricing.made.boundary_bytes) + layer.steps[-1].output_bytes,
        forward_seconds=clock.layer_forward(layer),
        backward_seconds=clock.layer_backward(layer),
        weight_seconds=clock.layer_weights(layer),
        state_bytes=state + 1,
    )


@dataclass(frozen=True)
class Chosen:
    """A choice, and what the predictor says of it."""

    choice: Choice
    layout: Layout  # with the layers as chosen
    prediction: Prediction


class Predictor:
    """The predicted bytes of picks; what they share is computed once."""

    def __init__(
        self,
        model: ModelNumbers,
        layout: Layout,
        machine: Machine,
        made: Profile,
        watched: bool = False,
        scales: Sequence[float] | None = None,
    ) -> None:
        self.model, self.layout, self.machine, self.made, self.watched = model, layout, machine, made, watched
        self.scales = scales
        self.lists = short_lists(layout)
        self.needs = needs_of(self.lists)
        self._spans: Spans = {}

    def placed(self, counts: Counts) -> Layout:
        """The layout with so many layers per stage and chunk."""
        return replace(self.layout, pieces=Layout.of_counts(counts).pieces)

    def stage_bytes(self, counts: Counts, stage: int, pick: Pick) -> int:
        """All bytes of a rank of ``stage`` at its peak."""
        empty: list[list[Slots]] = [[(ChunkPlan(),)] * self.layout.v for _ in counts]
        empty[stage] = list(chunk_plans(counts, stage, pick))
        plan = Plan.of_slots(empty)
        row = predict_stage(
            self.model,
            self.placed(counts),
            plan,
            stage,
            self.lists[stage],
            self.needs[stage],
            self.made,
            self.machine,
            self.watched,
            self._spans,
        )
        scale = self.scales[stage] if self.scales else 1.0
        return row.total_bytes + round((scale - 1) * row.activation_bytes)

    def __call__(self, choice: Choice) -> Prediction:
        placed = self.placed(choice.counts)
        return predict(
            self.model, placed, choice.plan, self.machine,
            made=self.made, lists=self.lists, watched=self.watched, needs=self.needs,
        )  # fmt: skip


def choose_for(
    model: ModelNumbers,
    layout: Layout,
    machine: Machine,
    budget_bytes: int | None = None,
    options: Options = DEFAULTS,
    made: Profile | None = None,
    watched: bool = False,
    scales: Sequence[float] | None = None,
) -> Chosen:
    """The fastest plan of a model within ``budget_bytes`` of each rank's memory (None: the machine's), its bytes as
    predicted (``watched``: see `predict`), activations of each stage times its ``scales``.  Raises DoesNotFit."""
    budget = machine.memory_bytes if budget_bytes is None else budget_bytes
    made = profile(model, layout) if made is None else made
    problem = problem_of(model, layout, machine, budget, made)
    chooser = Chooser(problem, options, Table(layer_items(problem.pricing, options.keep_gathered)))
    predictor = Predictor(model, layout, machine, made, watched, scales)
    chooser.far = scales is not None
    try:
        counts, picks, name = chooser.result(slots=False)
    except DoesNotFit:
        counts = problem.division
        picks, name = chooser.refined(counts, partial(predictor.stage_bytes, counts)), chooser.name
    else:
        refined = chooser.refined(counts, partial(predictor.stage_bytes, counts))
        slower = problem.step_seconds(counts, refined) > problem.step_seconds(counts, picks)
        if not slower or any(predictor.stage_bytes(counts, s, pick) > budget for s, pick in enumerate(picks)):
            picks, name = refined, chooser.name
    if options.ahead:
        picks = chooser.ahead(counts, picks, partial(predictor.stage_bytes, counts))
    choice = chooser.choice(counts, picks, name)
    return Chosen(choice, predictor.placed(counts), predictor(choice))


def least_bytes(
    model: ModelNumbers,
    layout: Layout,
    machine: Machine,
    options: Options = DEFAULTS,
    made: Profile | None = None,
    watched: bool = False,
    scales: Sequence[float] | None = None,
) -> int:
    """The least budget at which `choose_for` finds a plan on the layout's own division."""
    made = profile(model, layout) if made is None else made
    problem = problem_of(model, layout, machine, 0, made)
    chooser = Chooser(problem, options, Table(layer_items(problem.pricing, options.keep_gathered)))
    predicted = partial(Predictor(model, layout, machine, made, watched, scales).stage_bytes, problem.division)
    return max(chooser.leanest(stage, layers, predicted)[0] for stage, layers in enumerate(problem.division))
