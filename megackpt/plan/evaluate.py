"""Evaluates plans: bytes from the prediction, seconds and the memory curve from the simulator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from megackpt.plan.accelerators import Machine
from megackpt.plan.choose.engine import EnginePrices, stage_speed
from megackpt.plan.decision import SHARD, ChunkPlan, Group, Plan, SaveSet, group_at
from megackpt.plan.evaluation import FIXED, Evaluation, StageSeconds
from megackpt.plan.flops import ModelShape, layer_forward, logits_forward, model_flops
from megackpt.plan.kept import replay
from megackpt.plan.machine import needs_of
from megackpt.plan.numbers import Layout, ModelNumbers
from megackpt.plan.predict import Prediction, StageWalk, predict, short_lists
from megackpt.plan.profile import Profile, StepCost, profile
from megackpt.plan.schedule import Action, destination, schedule_lists, source
from megackpt.plan.seconds import StepClock
from megackpt.plan.simulate import Cost, Order, Speed, Timeline
from megackpt.plan.slots import in_flight_of, slots_of
from megackpt.plan.step_end import slowest, step_end
from megackpt.plan.steps import BLOCK_NAMES


class Evaluator:
    """Evaluates plans of one model on one machine; what they share is computed once."""

    def __init__(self, model: ModelNumbers, layout: Layout, machine: Machine, made: Profile | None = None) -> None:
        self.model, self.layout, self.machine = model, layout, machine
        self.made = profile(model, layout) if made is None else made
        self.clock = StepClock(machine, layout.act_bytes, layout.t, layout.world)
        self.prices = EnginePrices(self.made, self.clock)
        self.lists = schedule_lists(layout.schedule, layout.p, layout.n, layout.v)
        self.short_lists = short_lists(layout)
        self.needs = needs_of(self.short_lists)
        self._replays: dict[SaveSet, tuple[float, tuple[str, ...]]] = {}

    @cached_property
    def order(self) -> Order:
        return Order(self.lists)

    @cached_property
    def speed(self) -> Speed | None:
        return stage_speed(self.machine, self.layout)

    def __call__(self, plan: Plan, layout: Layout | None = None) -> Evaluation:
        """``layout``: the same with its layers divided otherwise."""
        layout = layout or self.layout
        prediction = predict(
            self.model, layout, plan, self.machine, made=self.made, lists=self.short_lists, needs=self.needs
        )
        work = [
            [[self._work(layout, sets, stage, chunk) for sets in plan.slots(stage, chunk)] for chunk in range(layout.v)]
            for stage in range(layout.p)
        ]
        full = self.order.durations(lambda stage, action: self._seconds(work, stage, action))
        bare = self.order.durations(lambda stage, action: self._seconds(work, stage, action, replays=False))
        replays = [self._mean_replay(row, stage) for stage, row in enumerate(work)]
        transfer = self.clock.send(self.made.boundary_bytes)
        stages = tuple(
            StageSeconds(sum(w[0].forward for w in row), sum(w[0].backward for w in row), replay)
            for row, replay in zip(work, replays, strict=True)
        )
        return Evaluation(
            model=self.model,
            layout=layout,
            machine=self.machine,
            plan=plan,
            prediction=prediction,
            simulated=partial(self._timeline, layout, plan, prediction, work, transfer),
            pipeline_seconds=self.order.step_seconds(full, transfer, self._ahead(work), self.speed),
            stages=stages,
            replay_of=lambda stage, action: self._of(work, stage, action).replay if action.kind == "B" else 0.0,
            slot_of=lambda stage, action: self.slots[stage][action.micro_batch, action.chunk],
            bare_seconds=self.order.step_seconds(bare, transfer, speed=self.speed),
            end=slowest(
                [
                    step_end(layout, self.machine, row, stage.forward, stage.backward, self._tied_bytes(row.stage))
                    for row, stage in zip(prediction.stages, stages, strict=True)
                ]
            ),
            model_flops=model_flops(self._shape, self._sequences),
            replayed_flops=self._replayed_flops(layout, plan),
        )

    def _tied_bytes(self, stage: int) -> int:
        """Of the gradient of an embedding that is on two stages."""
        model, layout = self.model, self.layout
        if not model.tied or layout.p == 1 or stage not in (0, layout.p - 1):
            return 0
        return model.padded_vocab // layout.t * model.hidden * layout.grad_bytes

    def _ahead(self, work: Works) -> list[float] | None:
        """What each action may do before its message is there; None: no plan wants anything ahead."""
        if not any(slot.ahead for stage in work for chunk in stage for slot in chunk):
            return None
        return self.order.durations(partial(self._early, work))

    def _early(self, work: Works, stage: int, action: Action) -> float:
        if action.kind != "B" or not (own := self._of(work, stage, action)).ahead:
            return 0.0
        return own.ahead if own.plan.goes_ahead(self.in_flight[stage][action]) else 0.0

    # -- seconds --------------------------------------------------------------------------------------------------

    @cached_property
    def slots(self) -> Sequence[Mapping[tuple[int, int], int]]:
        """By stage, see `plan.slots`."""
        return [slots_of(actions) for actions in self.lists]

    @cached_property
    def in_flight(self) -> Sequence[Mapping[Action, int]]:
        """By stage, of every backward."""
        return [in_flight_of(actions) for actions in self.lists]

    def _of(self, work: Works, stage: int, action: Action) -> _Work:
        """The work of a micro-batch in its slot."""
        slots = work[stage][action.chunk]
        if len(slots) == 1:
            return slots[0]
        return slots[min(self.slots[stage][action.micro_batch, action.chunk], len(slots) - 1)]

    def _seconds(self, work: Works, stage: int, action: Action, replays: bool = True) -> float:
        """What an action takes of its stage's processor, its messages' share included."""
        return _seconds(self._of(work, stage, action), action, replays) + self._exchanged(stage, action)

    def _exchanged(self, stage: int, action: Action) -> float:
        """What a stage's own processor takes for the messages of an action."""
        p, v = self.layout.p, self.layout.v
        if p == 1:
            return 0.0
        if not (each := self.clock.message(self.made.boundary_bytes)):
            return 0.0
        messages = (source(action, stage, p, v) is not None) + (destination(action, stage, p, v) is not None)
        return messages * each

    def _mean_replay(self, row: Sequence[Sequence[_Work]], stage: int) -> float:
        """Of one micro-batch through all chunks of a stage."""
        if all(len(slots) == 1 for slots in row):
            return sum(slots[0].replay for slots in row)
        backwards = [action for action in self.lists[stage] if action.kind == "B"]
        taken = self.slots[stage]
        replays = (row[a.chunk][min(taken[a.micro_batch, a.chunk], len(row[a.chunk]) - 1)].replay for a in backwards)
        return sum(replays) / self.layout.n

    def _work(self, layout: Layout, sets: ChunkPlan, stage: int, chunk: int) -> _Work:
        block, layers = self.made.block, layout.pieces[stage][chunk]
        ends = [self.made.embedding] * layout.is_first(stage, chunk) + [self.made.head] * layout.is_last(stage, chunk)
        clock, host = self.clock, self.machine.overheads
        forward, backward = host.action_s + host.batch_s * bool(ends), host.action_s
        return _Work(
            plan=sets,
            forward=forward + len(layers) * clock.layer_forward(block) + sum(map(clock.layer_forward, ends)),
            backward=backward + len(layers) * clock.layer_backward(block) + sum(map(clock.layer_backward, ends)),
            weights=len(layers) * clock.layer_weights(block),
            replay=sum(seconds for seconds, _ in self._replayed(layout, sets, stage, chunk)),
            ahead=self._ahead_seconds(layout, sets, stage, chunk),
            split=any(action.kind == "W" for action in self.lists[stage]),
        )

    def _ahead_seconds(self, layout: Layout, sets: ChunkPlan, stage: int, chunk: int) -> float:
        if layout.is_last(stage, chunk):
            return 0.0
        units = sets.units_ahead(layout.pieces[stage][chunk])
        layers = range(units[-1].start, units[0].stop) if units else range(0)
        return sum(seconds for seconds, _ in self._replayed_layers(layers, sets.groups, sets.save_sets))

    def _replayed(
        self, layout: Layout, sets: ChunkPlan, stage: int, chunk: int
    ) -> Iterator[tuple[float, dict[int, tuple[str, ...]]]]:
        """(seconds, steps by layer) of everything that one backward of a chunk replays."""
        yield from self._replayed_layers(layout.pieces[stage][chunk], sets.groups, sets.save_sets)
        if layout.is_last(stage, chunk):
            names = replay(self.made.head, sets.save_set("head")).steps
            again = [step for step in self.made.head.steps if step.name in names and not step.name.endswith(".gather")]
            yield sum(self.clock.forward(step) for step in again), {}

    def _replayed_layers(
        self, layers: range, groups: Sequence[Group], sets: Any
    ) -> Iterator[tuple[float, dict[int, tuple[str, ...]]]]:
        waiting = [(layers.start, layers.stop, groups)]  # a list, as a tree may be deep; what is inside comes first
        while waiting:
            place, stop, groups = waiting.pop()
            while place < stop:
                group = group_at(groups, place)
                if group is None:
                    save_set = sets.get(f"layers.{place}", SaveSet())
                    seconds, names = self._layer(save_set)
                    yield seconds + self._gather_seconds(save_set["mlp.residual"].output), {place: names}
                    place += 1
                    continue
                members = range(group.first, group.last + 1)
                steps = dict.fromkeys(members, BLOCK_NAMES) | {group.last: _but_the_last_product(BLOCK_NAMES)}
                yield self.prices.group(len(members))[2] + self._gather_seconds(group.output), steps
                place = members.stop
                if group.inner is not None:
                    waiting += [(place, stop, groups), (members.start, members.stop, group.inner)]
                    break

    def _layer(self, save_set: SaveSet) -> tuple[float, tuple[str, ...]]:
        if save_set not in self._replays:
            self._replays[save_set] = self.prices.replay_seconds(save_set), replay(self.made.block, save_set).steps
        return self._replays[save_set]

    def _gather_seconds(self, choice: str) -> float:
        """Of a boundary that was kept in shards."""
        size = self.made.boundary_bytes
        step = StepCost("boundary.gather", collective="all_gather", collective_bytes=size, bytes_moved=size)
        return self.clock.forward(step) if choice == SHARD else 0.0

    # -- FLOPs ----------------------------------------------------------------------------------------------------

    @cached_property
    def _shape(self) -> ModelShape:
        m = self.model
        return ModelShape(m.layers, m.hidden, m.heads, m.kv_heads, m.head_size, m.ffn, m.padded_vocab, m.seq, m.gated)

    @property
    def _sequences(self) -> int:
        return self.layout.micro_batch * self.layout.n * self.layout.d

    def _replayed_flops(self, layout: Layout, plan: Plan) -> int:
        """Of one step on all ranks: every micro-batch by the plan of its slot."""
        total = 0
        for stage in range(layout.p):
            for chunk in range(layout.v):
                slots = plan.slots(stage, chunk)
                for slot, sequences in enumerate(self._sequences_by_slot(stage, chunk, len(slots))):
                    layer = layer_forward(self._shape, sequences)
                    for _, layers in self._replayed(layout, slots[slot], stage, chunk):
                        total += sum(layer.of(name) for names in layers.values() for name in names)
                    logits = self.model.loss_chunk and layout.is_last(stage, chunk)
                    if logits and replay(self.made.head, slots[slot].save_set("head")).flops:
                        total += logits_forward(self._shape, sequences)
        return total

    def _sequences_by_slot(self, stage: int, chunk: int, slots: int) -> list[int]:
        """Sequences of a step on all ranks, by the slot of their micro-batch."""
        if slots == 1:
            return [self._sequences]
        counts = [0] * slots
        for (_, own), slot in self.slots[stage].items():
            if own == chunk:
                counts[min(slot, slots - 1)] += 1
        return [count * self.layout.micro_batch * self.layout.d for count in counts]

    # -- bytes over time ------------------------------------------------------------------------------------------

    def _timeline(self, layout: Layout, plan: Plan, prediction: Prediction, work: Works, transfer: float) -> Timeline:
        walks = [_Recorded(self.made, layout, plan, stage) for stage in range(layout.p)]
        for walk, actions, needs in zip(walks, self.lists, needs_of(self.lists), strict=True):
            walk.run(actions, needs)

        def cost(stage: int, action: Action) -> Cost:
            before, peak, after = walks[stage].marks[action]
            early = self._early(work, stage, action)
            return Cost(self._seconds(work, stage, action), after - before, peak - before, early)

        held = [sum(row.terms.get(name, 0) for name in FIXED) for row in prediction.stages]
        return self.order.run(cost, transfer, held, self.made.boundary_bytes, self.speed)


def _but_the_last_product(names: Sequence[str]) -> tuple[str, ...]:
    """A group's replay ends before what nobody saves."""
    return tuple(name for name in names if name not in ("mlp.down", "mlp.reduce", "mlp.residual"))


@dataclass(frozen=True)
class _Work:
    """Seconds of one chunk and micro-batch."""

    plan: ChunkPlan
    forward: float
    backward: float
    weights: float
    replay: float
    ahead: float  # of the replay, what needs no gradient
    split: bool  # weight gradients are actions of their own


Works = Sequence[Sequence[Sequence[_Work]]]
"""By [stage][chunk][slot]."""


def _seconds(work: _Work, action: Action, replays: bool = True) -> float:
    if action.kind == "F":
        return work.forward
    if action.kind == "W":
        return work.weights
    return work.backward - work.weights * work.split + work.replay * replays


class _Recorded(StageWalk):
    """The prediction's walk, with the bytes before, at most during, and after every action."""

    def __init__(self, made: Profile, layout: Layout, plan: Plan, stage: int) -> None:
        super().__init__(made, layout, plan, stage)
        self.marks: dict[Action, tuple[int, int, int]] = {}
        self._most: dict[Action, int] = {}
        self._after: dict[Action, int] = {}

    def run(self, actions: Sequence[Action], needs: Mapping[Action, int] | None = None) -> None:
        super().run(actions, needs)
        before = 0
        for action in actions:
            after = self._after[action]
            self.marks[action] = (before, max(before, after, self._most.get(action, 0)), after)
            before = after

    def _forward(self, action: Action) -> None:
        super()._forward(action)
        self._after[action] = self._now

    def _backward(self, action: Action) -> None:
        super()._backward(action)
        self._after[action] = self._now

    def _weight(self, action: Action) -> None:
        super()._weight(action)
        self._after[action] = self._now

    def _note(self, action: Action, at: str, extra: int) -> None:
        super()._note(action, at, extra)
        now = self.live + extra + self.sent + sum(self.posted.values())
        self._most[action] = max(self._most.get(action, 0), now)

    @property
    def _now(self) -> int:
        return self.live + self.sent + sum(self.posted.values())
