"""A training step in the numbers that a choice needs, and what each action costs under a choice.

Bytes that do not depend on the choice (state of layers and ends, everything else in ``base_bytes``) are subtracted
from the budget first; the rest of a stage is for activations: its *room*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from megackpt.plan.choose.chunks import Rows, rows_of
from megackpt.plan.choose.pareto import Item
from megackpt.plan.choose.prices import PICO, LayerPricing
from megackpt.plan.policies import full_layer
from megackpt.plan.predict import RESIDENT
from megackpt.plan.schedule import Action, schedule_lists
from megackpt.plan.simulate import Cost, Order, Speed, Timeline
from megackpt.plan.slots import in_flight_of, slots_of
from megackpt.plan.split import split_layers

Counts = tuple[tuple[int, ...], ...]
"""Layers by [stage][chunk]."""


class DoesNotFit(ValueError):
    """Not even the leanest choice fits; the message names the stage and the bytes.  ``least_bytes``: the least budget
    that would do."""

    def __init__(self, said: str, least_bytes: int) -> None:
        super().__init__(said)
        self.least_bytes = least_bytes


@dataclass(frozen=True)
class End:
    """What the embedding, or the head with its loss, adds to the piece that owns it."""

    kept_bytes: int = 0  # per micro-batch in flight
    transient_bytes: int = 0  # most bytes above what is kept, in its forward or its backward
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    weight_seconds: float = 0.0  # the part of backward_seconds that a split backward puts off
    state_bytes: int = 0  # weights, gradients, optimizer


@dataclass(frozen=True)
class Pick:
    """The choice for one stage.

    ``slots``: mixtures by [slot][chunk]; slots beyond the last have its mixtures (usually there is one, for all).
    ``ahead``: by [slot][chunk], how many of a mixture's last items are rebuilt while a gradient is under way; (): none.
    ``within``: only while at most so many forwards are in flight on the stage; 0: always.
    """

    slots: tuple[tuple[tuple[Item, ...], ...], ...]
    ahead: tuple[tuple[int, ...], ...] = ()
    within: int = 0

    @property
    def transient_bytes(self) -> int:
        return max((self.rebuilt(s, c, 1) for s, slot in enumerate(self.slots) for c in range(len(slot))), default=0)

    def rebuilt(self, slot: int, chunk: int, in_flight: int) -> int:
        """Most bytes of one backward beside what is kept: of what is ahead all at once, of the rest one by one."""
        sizes = [item.transient_bytes for item in self.slots[slot][chunk]]
        early = len(sizes) - self.units_ahead(slot, chunk) * self.goes_ahead(in_flight)
        return max([*sizes[:early], sum(sizes[early:])], default=0)

    def goes_ahead(self, in_flight: int) -> bool:
        """As of the chunk plans that are made of it."""
        return bool(self.ahead) and (not self.within or in_flight <= self.within)

    def units_ahead(self, slot: int, chunk: int) -> int:
        return self.ahead[slot][chunk] if self.ahead else 0

    @property
    def ahead_ps(self) -> tuple[tuple[int, ...], ...]:
        """Of `replay_ps`, what waits for no gradient."""
        return tuple(
            tuple(sum(i.replay_ps for i in m[len(m) - self.units_ahead(s, c) :]) for c, m in enumerate(slot))
            for s, slot in enumerate(self.slots)
        )

    def with_ahead(self, ahead: Sequence[Sequence[int]], within: int = 0) -> Pick:
        """The same with so many of the last items ahead."""
        rows = tuple(map(tuple, ahead))
        return replace(self, ahead=rows, within=within) if any(map(any, rows)) else replace(self, ahead=(), within=0)

    @property
    def replay_ps(self) -> tuple[tuple[int, ...], ...]:
        """By [slot][chunk]."""
        return tuple(tuple(sum(i.replay_ps for i in mixture) for mixture in slot) for slot in self.slots)

    @property
    def kept_bytes(self) -> tuple[tuple[int, ...], ...]:
        """By [slot][chunk], on the device for every micro-batch in flight."""
        return tuple(tuple(sum(i.kept_bytes for i in m) for m in slot) for slot in self.slots)

    @property
    def host_bytes(self) -> int:
        """Of one micro-batch, gone to host memory and back."""
        return sum(i.host_bytes for mixture in self.slots[0] for i in mixture)


@dataclass(frozen=True)
class Problem:
    """One step of a pipeline of equal layers.  Stages have ``counts`` layers; None divides ``layers`` as the trainer
    does."""

    pricing: LayerPricing
    layers: int
    stages: int
    micro_batches: int
    budget_bytes: int
    chunks: int = 1
    schedule: str = "1f1b"
    counts: Counts | None = None
    first: End = End()
    last: End = End()
    layer_state_bytes: int = 0
    base_bytes: int = 0
    message_bytes: int = 0  # of base_bytes, between stages
    piece_bytes: int = 0  # kept per micro-batch in flight and chunk besides layers and ends
    transfer_seconds: float = 0.0
    host_bytes_per_s: float = 0.0  # in each direction, while computing
    speed: Speed | None = field(default=None, compare=False)  # where stages share processors

    def __post_init__(self) -> None:
        if self.counts is None:
            object.__setattr__(self, "counts", even_counts(self.layers, self.stages, self.chunks))
        total = sum(map(sum, self.division))
        if total != self.layers or len(self.division) != self.stages:
            raise ValueError(f"counts {self.counts} do not divide {self.layers} layers over {self.stages} stages")

    @property
    def division(self) -> Counts:
        assert self.counts is not None
        return self.counts

    @cached_property
    def order(self) -> Order:
        """The schedule's lists; the same for every choice and division."""
        return Order(schedule_lists(self.schedule, self.stages, self.micro_batches, self.chunks))

    @cached_property
    def rows(self) -> tuple[Rows, ...]:
        """By stage: the micro-batches in flight per chunk at every moment that counts."""
        return tuple(rows_of(actions, self.chunks) for actions in self.order.lists)

    def slot(self, stage: int, action: Action, slots: int) -> int:
        """Of ``slots`` that differ the one that the action's micro-batch takes."""
        return 0 if slots == 1 else min(self._taken[stage][action.micro_batch, action.chunk], slots - 1)

    @cached_property
    def _taken(self) -> tuple[Mapping[tuple[int, int], int], ...]:
        return tuple(slots_of(actions) for actions in self.order.lists)

    @cached_property
    def in_flight(self) -> tuple[Mapping[Action, int], ...]:
        """By stage, of every backward: the forwards in flight then."""
        return tuple(in_flight_of(actions) for actions in self.order.lists)

    @cached_property
    def split_backward(self) -> bool:
        return any(action.kind == "W" for action in self.order.lists[0])

    def ends(self, stage: int, chunk: int) -> tuple[End, ...]:
        """The ends that a piece owns."""
        first = (self.first,) if stage == chunk == 0 else ()
        last = (self.last,) if (stage, chunk) == (self.stages - 1, self.chunks - 1) else ()
        return first + last

    def stage_ends(self, stage: int) -> tuple[End, ...]:
        return tuple(end for chunk in range(self.chunks) for end in self.ends(stage, chunk))

    def state_bytes(self, stage: int, layers: int) -> int:
        """What ``stage`` holds before the step when it has so many layers."""
        ends = sum(end.state_bytes for end in self.stage_ends(stage))
        return self.base_bytes + ends + layers * self.layer_state_bytes

    def room(self, stage: int, layers: int, transient: int, spare: int = 0) -> Rows:
        """By row: bytes for what the stage's layers keep, when the largest thing rebuilt is ``transient`` and the
        stage may have ``spare`` bytes more than the budget by this bound."""
        free = self.budget_bytes + spare - self.state_bytes(stage, layers)
        free -= max(
            [transient, self.pricing.forward_transient_bytes(), *(e.transient_bytes for e in self.stage_ends(stage))]
        )
        fixed = [self.piece_bytes + sum(e.kept_bytes for e in self.ends(stage, c)) for c in range(self.chunks)]
        return free - self.rows[stage] @ np.array(fixed, np.int64)

    # -- seconds --------------------------------------------------------------------------------------------------

    def work(self, stage: int, chunk: int, layers: int) -> dict[str, float]:
        """Seconds by action kind, without replay."""
        price, ends = self.pricing, self.ends(stage, chunk)
        weight = layers * price.weight_seconds + sum(end.weight_seconds for end in ends)
        backward = layers * price.backward_seconds + sum(end.backward_seconds for end in ends)
        return {
            "F": layers * price.forward_seconds + sum(end.forward_seconds for end in ends),
            "B": backward - weight if self.split_backward else backward,
            "W": weight,
        }

    def period_seconds(self, stage: int, layers: Sequence[int]) -> float:
        """Seconds of one micro-batch on a stage that replays nothing."""
        kinds = "FBW" if self.split_backward else "FB"
        return sum(self.work(stage, c, count)[kind] for c, count in enumerate(layers) for kind in kinds)

    def durations(self, counts: Counts, picks: Sequence[Pick] | None) -> list[float]:
        """For `Order.clock`; no picks: nothing is replayed."""
        result: list[float] = []
        for stage, actions in enumerate(self.order.lists):
            work = [self.work(stage, chunk, counts[stage][chunk]) for chunk in range(self.chunks)]
            replay = picks[stage].replay_ps if picks else ((0,) * self.chunks,)
            seconds = {
                (kind, chunk, slot): work[chunk][kind] + (replay[slot][chunk] / PICO if kind == "B" else 0.0)
                for kind in "FBW" for chunk in range(self.chunks) for slot in range(len(replay))
            }  # fmt: skip
            count = len(replay)
            result += [seconds[a.kind, a.chunk, self.slot(stage, a, count)] for a in actions]
        return result

    def early(self, picks: Sequence[Pick] | None) -> list[float] | None:
        """What each action may do before its message is there, for `Order.clock`; None: nothing."""
        if not any(pick.ahead for pick in picks or ()):
            return None
        result: list[float] = []
        for stage, (actions, pick) in enumerate(zip(self.order.lists, picks or (), strict=True)):
            if not pick.ahead:
                result += [0.0] * len(actions)
                continue
            ahead, count, flying = pick.ahead_ps, len(pick.slots), self.in_flight[stage]
            result += [
                ahead[self.slot(stage, a, count)][a.chunk] / PICO
                if a.kind == "B" and pick.goes_ahead(flying[a])
                else 0.0
                for a in actions
            ]
        return result

    def step_seconds(self, counts: Counts, picks: Sequence[Pick] | None) -> float:
        durations = self.durations(counts, picks)
        return self.order.step_seconds(durations, self.transfer_seconds, self.early(picks), self.speed)

    def timeline(self, counts: Counts, picks: Sequence[Pick]) -> Timeline:
        """The simulated step, with every stage's bytes over time (state included)."""
        durations = self.durations(counts, picks)
        seconds = iter(zip(durations, self.early(picks) or [0.0] * len(durations), strict=True))
        table = [{action: next(seconds) for action in actions} for actions in self.order.lists]
        leaves = "W" if self.split_backward else "B"

        def cost(stage: int, action: Action) -> Cost:
            pick, ends = picks[stage], self.ends(stage, action.chunk)
            slot = self.slot(stage, action, len(pick.slots))
            mixture = pick.slots[slot][action.chunk]
            whole, early = table[stage][action]
            kept = self.piece_bytes + sum(i.kept_bytes for i in mixture) + sum(e.kept_bytes for e in ends)
            if action.kind == "F":
                extra = max([self.pricing.forward_transient_bytes(), *(e.transient_bytes for e in ends)])
                return Cost(whole, kept, kept + extra)
            if action.kind == "W":
                return Cost(whole, -kept)
            rebuilt = pick.rebuilt(slot, action.chunk, self.in_flight[stage][action])
            rebuilt = max([rebuilt, *(e.transient_bytes for e in ends)])
            return Cost(whole, -kept * (action.kind == leaves), rebuilt, early)

        held = [
            self.state_bytes(stage, sum(counts[stage])) + self.lane_bytes(stage, pick)
            for stage, pick in enumerate(picks)
        ]
        return self.order.run(cost, self.transfer_seconds, held, speed=self.speed)

    def slack_bytes(self, stage: int) -> int:
        """At least what the bound of `room` counts too much: things that are never alive at one time."""
        ends = [end.transient_bytes + end.kept_bytes for end in self.stage_ends(stage)]
        full = self.pricing.transient_bytes(full_layer("layer-input"))
        return self.message_bytes + self.piece_bytes + full + sum(ends)

    def lane_bytes(self, stage: int, pick: Pick) -> int:
        """Bytes on the device of tensors that are on their way to or from the host."""
        return pick.host_bytes * min(RESIDENT, int(self.rows[stage].max()))


def even_counts(layers: int, stages: int, chunks: int) -> Counts:
    """The trainer's division.  Raises ValueError when a piece would have no layer."""
    sizes = [len(piece) for piece in split_layers(layers, stages * chunks)]
    return tuple(tuple(sizes[chunk * stages + stage] for chunk in range(chunks)) for stage in range(stages))
