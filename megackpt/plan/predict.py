"""Bytes of every stage before launch, each term by its name, and when the peak comes.

State follows from exact parameter counts; activations from the plan and the schedule's real action lists; what is
alive for a moment from `plan.live`.  All of it is what our own trainer holds; what lies outside the allocator of
tensors (communicators, the driver's context, fragmentation) is named and added when a machine is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megackpt.plan.accelerators import Machine
from megackpt.plan.chunk import ChunkModel
from megackpt.plan.decision import Plan
from megackpt.plan.kept import kept_bytes
from megackpt.plan.numbers import Layout, ModelNumbers
from megackpt.plan.parameters import stage_parameters, state_bytes
from megackpt.plan.profile import Profile, profile
from megackpt.plan.schedule import Action, destination, schedule_lists, source

STATE = ("weights", "gradients", "masters", "moments")


@dataclass(frozen=True)
class StagePrediction:
    """One pipeline stage; all its ranks are alike.

    ``terms`` at the moment of the peak: the state (weights, gradients, masters, moments), kept activations (layers,
    ends), messages between stages, and transient, which is the rest; with a machine also communicators, context and
    margin.  They sum to ``total_bytes``.  ``activation_bytes`` is the peak of what a step allocates: what a counter
    of tensors that starts at the step sees.
    """

    stage: int
    terms: Mapping[str, int]
    activation_bytes: int
    peak_action: str
    peak_step: str
    in_flight: int  # (micro-batch, chunk) pairs held then
    kept_by_chunk: tuple[int, ...]  # of one micro-batch
    kept_peak_bytes: int  # most that all open tapes hold together
    parameters: int

    @property
    def total_bytes(self) -> int:
        return sum(self.terms.values())

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
            "kept_peak_bytes": self.kept_peak_bytes,
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
) -> Prediction:
    """``made``: a traced or measured profile instead of the closed forms; ``lists``: other action lists than those of
    the layout's schedule; ``watched``: as seen by a counter that is a dispatch mode (see `ChunkModel`)."""
    made = profile(model, layout) if made is None else made
    lists = schedule_lists(layout.schedule, layout.p, layout.n, layout.v) if lists is None else lists
    stages = []
    for stage in range(layout.p):
        walk = StageWalk(made, layout, plan, stage, watched=watched)
        walk.run(lists[stage])
        stages.append(_stage(model, layout, plan, machine, made, walk))
    return Prediction(tuple(stages), plan.name, None if machine is None else machine.memory_bytes)


def _stage(
    model: ModelNumbers, layout: Layout, plan: Plan, machine: Machine | None, made: Profile, walk: StageWalk
) -> StagePrediction:
    count = stage_parameters(model, layout, walk.stage).total
    state = state_bytes(count, layout)
    peak = walk.peak
    ends = sum(
        _ends_kept(made, plan, layout, walk.stage, chunk) * number for chunk, number in enumerate(peak.in_flight)
    )
    kept = sum(c.kept() * number for c, number in zip(walk.chunks, peak.in_flight, strict=True))
    terms = {name: getattr(state, name) for name in STATE} | {
        "activations": kept - ends,
        "ends": ends,
        "messages": peak.messages,
        "transient": peak.live - kept - peak.messages,
    }
    if machine is not None:
        groups = sum(size > 1 for size in (layout.t, layout.d * layout.c)) + 2 * (layout.p > 1)
        terms["communicators"] = machine.communicator_bytes * groups
        terms["context"] = machine.context_bytes
        terms["margin"] = machine.margin_bytes
    return StagePrediction(
        stage=walk.stage,
        terms=terms,
        activation_bytes=peak.live,
        peak_action=str(peak.action),
        peak_step=peak.at,
        in_flight=sum(peak.in_flight),
        kept_by_chunk=tuple(c.kept() for c in walk.chunks),
        kept_peak_bytes=walk.kept_peak,
        parameters=count,
    )


def _ends_kept(made: Profile, plan: Plan, layout: Layout, stage: int, chunk: int) -> int:
    sets, total = plan.chunk(stage, chunk), 0
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
    action: Action = field(default_factory=lambda: Action("F", 0))
    at: str = ""
    in_flight: tuple[int, ...] = ()


class StageWalk:
    """A stage's actions in order with the executor's rules: one message posted ahead per direction, a sent tensor
    alive until the next action begins, a received gradient alive until its backward has ended."""

    def __init__(self, made: Profile, layout: Layout, plan: Plan, stage: int, *, watched: bool = False) -> None:
        self.layout, self.stage = layout, stage
        self.message = made.boundary_bytes
        self.chunks = [
            ChunkModel(
                made, plan.chunk(stage, chunk), layers, layout.is_first(stage, chunk), layout.is_last(stage, chunk),
                layout.t, watched,
            )
            for chunk, layers in enumerate(layout.pieces[stage])
        ]  # fmt: skip
        self.spans = {"F": [c.forward() for c in self.chunks], "B": [c.backward() for c in self.chunks]}
        self.flights = [0] * layout.v
        self.live = 0  # activations of open tapes
        self.sent = 0
        self.posted = {"F": 0, "B": 0}
        self.peak = Moment()
        self.kept_peak = 0
        self._kept = [chunk.kept() for chunk in self.chunks]

    def run(self, actions: Sequence[Action]) -> None:
        """Raises ValueError for a list that ends with anything held."""
        coming = {kind: sum(a.kind == kind and self._receives(a) for a in actions) for kind in ("F", "B")}
        self.posted = {kind: self.message if count else 0 for kind, count in coming.items()}
        split = any(action.kind == "W" for action in actions)
        for action in actions:
            if action.kind in coming and self._receives(action):
                coming[action.kind] -= 1
                self.posted[action.kind] = self.message if coming[action.kind] else 0
                self._note(action, "receive", self.message)
            self.sent = 0
            getattr(self, {"F": "_forward", "B": "_backward", "W": "_weight"}[action.kind])(action, split)
        if any(self.flights):
            raise ValueError(f"stage {self.stage} ends with {sum(self.flights)} forwards that no backward has freed")

    def _forward(self, action: Action, split: bool) -> None:
        span, chunk = self.spans["F"][action.chunk], self.chunks[action.chunk]
        self.flights[action.chunk] += 1
        kept = sum(count * size for count, size in zip(self.flights, self._kept, strict=True))
        self.kept_peak = max(self.kept_peak, kept)
        self._note(action, span.at, span.peak)
        self.live += span.change
        if not chunk.last:
            self.live -= self.message
            self.sent = self.message if self._sends(action) else 0

    def _backward(self, action: Action, split: bool) -> None:
        span, chunk = self.spans["B"][action.chunk], self.chunks[action.chunk]
        received = 0 if chunk.last else self.message
        self._note(action, span.at, received + span.peak)
        returned = 0 if chunk.first else self.message
        if split:  # a split backward keeps what it kept until its weight half
            return
        self.live += span.change - returned
        self.sent = returned if self._sends(action) else 0
        self.flights[action.chunk] -= 1

    def _weight(self, action: Action, split: bool) -> None:
        span, chunk = self.spans["B"][action.chunk], self.chunks[action.chunk]
        self.live += span.change - (0 if chunk.first else self.message)
        self.flights[action.chunk] -= 1

    def _note(self, action: Action, at: str, extra: int) -> None:
        messages = self.sent + sum(self.posted.values())
        if self.live + extra + messages > self.peak.live:
            self.peak = Moment(self.live + extra + messages, messages, action, at, tuple(self.flights))

    def _receives(self, action: Action) -> bool:
        return self.layout.p > 1 and source(action, self.stage, self.layout.p, self.layout.v) is not None

    def _sends(self, action: Action) -> bool:
        return self.layout.p > 1 and destination(action, self.stage, self.layout.p, self.layout.v) is not None

