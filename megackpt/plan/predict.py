"""Bytes of every stage before launch, each term by its name, and when the peak comes.

State follows from exact parameter counts; activations from the plan and the schedule's real action lists; what is
alive for a moment from `plan.live`.  All of it is what our own trainer holds; what lies outside the allocator of
tensors (communicators, the driver's context, fragmentation) is named and added when a machine is given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megackpt.plan.accelerators import Machine
from megackpt.plan.chunk import ChunkModel, Spans
from megackpt.plan.decision import OFFLOAD_HOST, ChunkPlan, Plan
from megackpt.plan.kept import kept_bytes
from megackpt.plan.live import Span
from megackpt.plan.machine import needs_of
from megackpt.plan.numbers import Layout, ModelNumbers
from megackpt.plan.parameters import stage_parameters, stage_state
from megackpt.plan.profile import Profile, profile
from megackpt.plan.schedule import Action, destination, schedule_lists, source
from megackpt.plan.slots import slots_of

# Micro-batches of an offloaded tensor that are on the device at once: one on its way out, one on its way back.
RESIDENT = 2
STATE = ("weights", "gradients", "masters", "moments")


@dataclass(frozen=True)
class StagePrediction:
    """One pipeline stage; all its ranks are alike.

    ``terms`` at the moment of the peak: the state (weights, gradients, masters, moments), kept activations (layers,
    ends), messages between stages, factors of weight_gradients that wait, and transient, which is the rest; with a
    machine also communicators, context and margin.  They sum to ``total_bytes``.  ``activation_bytes`` is the peak of
    what a step allocates: what a counter of tensors that starts at the step sees.
    """

    stage: int
    terms: Mapping[str, int]
    activation_bytes: int
    peak_action: str
    peak_step: str
    in_flight: int  # (micro-batch, chunk) pairs held then
    kept_by_slot: tuple[tuple[int, ...], ...]  # of one micro-batch, by [chunk][slot]
    host_bytes: int  # most that waits in host memory
    kept_peak_bytes: int  # most that all open tapes hold together
    parameters: int

    @property
    def total_bytes(self) -> int:
        return sum(self.terms.values())

    @property
    def kept_by_chunk(self) -> tuple[int, ...]:
        """Of the micro-batch that keeps most."""
        return tuple(map(max, self.kept_by_slot))

    @property
    def state_bytes(self) -> int:
        return sum(self.terms[name] for name in STATE)

    def to_json(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "terms": dict(self.terms),
            "total_bytes": self.total_bytes,
            "activation_bytes": self.activation_bytes,
            "peak": {"action": self.peak_action, "step": self.peak_step, "in_flight": self.in_flight},
            "kept_bytes_by_chunk": list(self.kept_by_chunk),
            "kept_bytes_by_slot": [list(slots) for slots in self.kept_by_slot],
            "kept_peak_bytes": self.kept_peak_bytes,
            "host_bytes": self.host_bytes,
            "parameters": self.parameters,
        }


@dataclass(frozen=True)
class Prediction:
    """All stages under one plan."""

    stages: tuple[StagePrediction, ...]
    plan: str
    memory_bytes: int | None = None  # of the machine, if one was given

    @property
    def peak_bytes(self) -> int:
        return max(stage.total_bytes for stage in self.stages)

    @property
    def fits(self) -> bool | None:
        """None without a machine."""
        return None if self.memory_bytes is None else self.peak_bytes <= self.memory_bytes

    def to_json(self) -> dict[str, Any]:
        return {
            "version": 1,
            "plan": self.plan,
            "memory_bytes": self.memory_bytes,
            "fits": self.fits,
            "peak_bytes": self.peak_bytes,
            "stages": [stage.to_json() for stage in self.stages],
        }


def predict(
    model: ModelNumbers,
    layout: Layout,
    plan: Plan,
    machine: Machine | None = None,
    *,
    made: Profile | None = None,
    lists: Sequence[Sequence[Action]] | None = None,
    watched: bool = False,
    needs: Sequence[Mapping[Action, int]] | None = None,
) -> Prediction:
    """``made``: a traced or measured profile instead of the closed forms; ``lists``: other action lists than those of
    the layout's schedule, with their ``needs`` if `needs_of` was asked before; ``watched``: as seen by a counter that
    is a dispatch mode (see `ChunkModel`)."""
    made = profile(model, layout) if made is None else made
    lists = schedule_lists(layout.schedule, layout.p, layout.n, layout.v) if lists is None else lists
    needs = needs_of(lists) if needs is None else needs
    stages = tuple(
        predict_stage(model, layout, plan, stage, lists[stage], needs[stage], made, machine, watched)
        for stage in range(layout.p)
    )
    return Prediction(stages, plan.name, None if machine is None else machine.memory_bytes)


def short_lists(layout: Layout) -> list[list[Action]]:
    """Lists with the peaks of the whole step: in its steady state a schedule repeats itself every p micro-batches."""
    n = layout.n if layout.schedule == "gpipe" else min(layout.n, 3 * layout.p + layout.n % layout.p)
    return schedule_lists(layout.schedule, layout.p, n, layout.v)


def predict_stage(
    model: ModelNumbers,
    layout: Layout,
    plan: Plan,
    stage: int,
    actions: Sequence[Action],
    needs: Mapping[Action, int],
    made: Profile,
    machine: Machine | None = None,
    watched: bool = False,
    spans: Spans | None = None,
) -> StagePrediction:
    """One stage through its list.  ``spans``: what calls with the same profile and ``watched`` may share."""
    walk = StageWalk(made, layout, plan, stage, watched=watched, spans=spans)
    walk.run(actions, needs)
    return _stage(model, layout, machine, walk)


def _stage(model: ModelNumbers, layout: Layout, machine: Machine | None, walk: StageWalk) -> StagePrediction:
    count = stage_parameters(model, layout, walk.stage).total
    state = stage_state(model, layout, walk.stage)
    peak = walk.peak
    terms = {name: getattr(state, name) for name in STATE} | {
        "activations": peak.kept - peak.ends,
        "ends": peak.ends,
        "messages": peak.messages,
        "weight_gradients": peak.waiting,
        "transient": peak.live - peak.kept - peak.messages - peak.waiting,
    }
    if walk.host_peak:
        terms["lanes"] = walk.lane_bytes
    if machine is not None:
        terms["communicators"] = machine.communicator_bytes * layout.communicators
        terms["context"] = machine.context_bytes
        terms["margin"] = machine.margin_bytes
    return StagePrediction(
        stage=walk.stage,
        terms=terms,
        activation_bytes=peak.live,
        peak_action=str(peak.action),
        peak_step=peak.at,
        in_flight=peak.in_flight,
        kept_by_slot=walk.kept,
        kept_peak_bytes=walk.kept_peak,
        host_bytes=walk.host_peak,
        parameters=count,
    )


def ends_kept(made: Profile, layout: Layout, stage: int, chunk: int, sets: ChunkPlan) -> int:
    """What the embedding and the head keep of one micro-batch on the piece that owns them."""
    total = 0
    if layout.is_first(stage, chunk):
        total += kept_bytes(made.embedding, sets.save_set("embedding"))
    if layout.is_last(stage, chunk):
        total += kept_bytes(made.head, sets.save_set("head"))
    return total


# -- one stage through its list ----------------------------------------------------------------------------------


@dataclass
class Moment:
    """The peak of a stage: bytes alive beside the state, and what they belong to."""

    live: int = 0
    messages: int = 0
    kept: int = 0  # by open tapes, ends included
    ends: int = 0
    waiting: int = 0  # for weight gradients
    in_flight: int = 0
    action: Action = field(default_factory=lambda: Action("F", 0))
    at: str = ""


@dataclass(frozen=True)
class _Slot:
    """One chunk under the plan of one slot."""

    plan: ChunkPlan
    forward: Span
    backward: Span
    plain: Span  # a backward that rebuilds nothing ahead
    waiting: int  # factors of weight gradients that a split backward leaves
    kept: int
    ends: int
    away: int  # in host memory


class StageWalk:
    """A stage's actions in order with the executor's rules: one message posted ahead per direction as soon as it can
    exist, a sent tensor alive until the next action ends, a received gradient alive until its backward has ended.
    Which slot's plan a micro-batch has, `plan.slots` says."""

    def __init__(
        self,
        made: Profile,
        layout: Layout,
        plan: Plan,
        stage: int,
        *,
        watched: bool = False,
        spans: Spans | None = None,
    ) -> None:
        self.layout, self.stage = layout, stage
        self._spans = {} if spans is None else spans
        self.message, self.split = made.boundary_bytes, layout.splits_backward
        self._receiving, self._sending = self._meeting(source), self._meeting(destination)
        self._first = [layout.is_first(stage, chunk) for chunk in range(layout.v)]
        self._last = [layout.is_last(stage, chunk) for chunk in range(layout.v)]
        self._slots = [
            [self._slot(made, chunk, sets, watched) for sets in plan.slots(stage, chunk)] for chunk in range(layout.v)
        ]
        self._taken: Mapping[tuple[int, int], int] = {}
        self.live = 0  # activations of open tapes, and factors of weight gradients
        self.kept_now = self.ends_now = self.in_flight = self.waiting = 0
        self.sent = 0
        self.posted = {"F": 0, "B": 0}
        self.peak = Moment()
        self.kept_peak = self.host_now = self.host_peak = 0

    def _slot(self, made: Profile, chunk: int, sets: ChunkPlan, watched: bool) -> _Slot:
        layers = self.layout.pieces[self.stage][chunk]
        first, last = self._first[chunk], self._last[chunk]
        model = ChunkModel(made, sets, layers, first, last, self.layout.t, watched, _spans=self._spans)
        whole = model.backward()
        backward = replace(model, split=True, _spans={}).backward() if self.split else whole
        plain = backward
        if sets.ahead_within:
            spans = {} if self.split else self._spans
            plain = replace(model, plan=replace(sets, ahead=0), split=self.split, _spans=spans).backward()
        ends = ends_kept(made, self.layout, self.stage, chunk, sets)
        kept = model.kept()
        away = replace(model, plan=sets.on_device(), _spans={}).kept() - kept if OFFLOAD_HOST in sets.choices() else 0
        return _Slot(sets, model.forward(), backward, plain, backward.change - whole.change, kept, ends, away)

    @property
    def lane_bytes(self) -> int:
        """On the device, of tensors on their way to the host and back: of `RESIDENT` micro-batches."""
        largest = max(slot.away for slots in self._slots for slot in slots)
        return min(RESIDENT * largest, self.host_peak)

    @property
    def kept(self) -> tuple[tuple[int, ...], ...]:
        """Bytes of one micro-batch by [chunk][slot]."""
        return tuple(tuple(slot.kept for slot in slots) for slots in self._slots)

    def run(self, actions: Sequence[Action], needs: Mapping[Action, int] | None = None) -> None:
        """``needs``: of each message, as `plan.machine.needed_before` says it.  Raises ValueError for a list that ends
        with anything held."""
        self._taken, needs = slots_of(actions), needs or {}
        coming = {kind: deque(a for a in actions if a.kind == kind and self._receives(a)) for kind in self.posted}

        def post(over: int) -> None:
            for kind, messages in coming.items():
                if not self.posted[kind] and messages and needs.get(messages[0], 0) <= over:
                    messages.popleft()
                    self.posted[kind] = self.message

        post(0)
        for over, action in enumerate(actions):
            if action.kind in coming and self._receives(action):
                self.posted[action.kind] = 0
                post(over)
                self._note(action, "receive", self.message)
            getattr(self, {"F": "_forward", "B": "_backward", "W": "_weight"}[action.kind])(action)
            post(over + 1)
        if self.in_flight:
            raise ValueError(f"stage {self.stage} ends with {self.in_flight} forwards that no backward has freed")

    def _of(self, action: Action) -> _Slot:
        slots = self._slots[action.chunk]
        return slots[min(self._taken[action.micro_batch, action.chunk], len(slots) - 1)]

    def _hold(self, slot: _Slot, sign: int) -> None:
        self.in_flight += sign
        self.kept_now += sign * slot.kept
        self.host_now += sign * slot.away
        self.host_peak = max(self.host_peak, self.host_now)
        self.ends_now += sign * slot.ends

    def _forward(self, action: Action) -> None:
        slot = self._of(action)
        self._hold(slot, 1)
        self.kept_peak = max(self.kept_peak, self.kept_now)
        self._note(action, slot.forward.at, slot.forward.peak)
        self.live += slot.forward.change
        if not self._last[action.chunk]:
            self.live -= self.message
        self.sent = self.message if self._sends(action) else 0

    def _backward(self, action: Action) -> None:
        slot = self._of(action)
        received = 0 if self._last[action.chunk] else self.message
        backward = slot.backward if slot.plan.goes_ahead(self.in_flight) else slot.plain
        self._note(action, backward.at, received + backward.peak)
        returned = 0 if self._first[action.chunk] else self.message
        self.live += backward.change - returned
        self.waiting += slot.waiting
        self.sent = returned if self._sends(action) else 0
        self._hold(slot, -1)

    def _weight(self, action: Action) -> None:
        slot = self._of(action)
        self._note(action, "weight gradients", 0)
        self.sent = 0
        self.live -= slot.waiting
        self.waiting -= slot.waiting

    def _note(self, action: Action, at: str, extra: int) -> None:
        messages = self.sent + sum(self.posted.values())
        live = self.live + extra + messages
        if live > self.peak.live:
            waiting = self.waiting
            self.peak = Moment(live, messages, self.kept_now, self.ends_now, waiting, self.in_flight, action, at)

    def _receives(self, action: Action) -> bool:
        return (action.kind, action.chunk) in self._receiving

    def _sends(self, action: Action) -> bool:
        return (action.kind, action.chunk) in self._sending

    def _meeting(self, other: Callable[[Action, int, int, int], object]) -> set[tuple[str, int]]:
        """Kinds and chunks of actions that have an `other` end (a source, a destination) on another stage."""
        p, v = self.layout.p, self.layout.v
        kinds = [(kind, chunk) for kind in ("F", "B", "W") for chunk in range(v) if p > 1]
        return {(kind, chunk) for kind, chunk in kinds if other(Action(kind, 0, chunk), self.stage, p, v) is not None}
