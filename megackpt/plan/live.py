"""What is alive while a chunk's forward and backward run: bytes over the steps, as the engine and autograd free them.

A forward keeps what the plan keeps and, for a moment, the step at hand: its input, its output, its workspace.  A
backward walks the steps in reverse with one gradient per value; when a step needs something that was dropped, the
steps that rebuild it run first, and what they rebuild lives until the last backward that saved it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from megackpt.plan.decision import KEEP, REPLAY, SaveSet
from megackpt.plan.kept import INPUT, KeptLayer, keep_layer
from megackpt.plan.profile import LayerProfile, StepCost
from megackpt.plan.steps import DEFERRED


@dataclass(frozen=True)
class Span:
    """A stretch of work: most bytes above what was alive when it began, when that was, and the change it leaves.
    ``keeps_top``: a gradient that somebody outside held is needed beyond the end, and not counted in the change."""

    peak: int
    change: int
    at: str = ""
    keeps_top: bool = False


@dataclass
class Clock:
    """Adds spans up: bytes alive now and at most."""

    live: int = 0
    peak: int = 0
    at: str = ""

    def touch(self, extra: int, at: str) -> None:
        """`extra` bytes for a moment."""
        if self.live + extra > self.peak:
            self.peak, self.at = self.live + extra, at

    def run(self, span: Span, where: str = "") -> None:
        self.touch(span.peak, f"{where} {span.at}".strip())
        self.live += span.change

    def span(self) -> Span:
        return Span(self.peak, self.live, self.at)


@dataclass(frozen=True)
class Layer:
    """One layer under one save-set."""

    profile: LayerProfile
    save_set: SaveSet
    input_choice: str = KEEP
    t: int = 1

    def kept(self) -> KeptLayer:
        return keep_layer(self.profile, self.save_set, input_choice=self.input_choice, t=self.t)


# -- forward -----------------------------------------------------------------------------------------------------


def forward_span(layer: Layer, *, until: str = "", bare: bool = False) -> Span:
    """The forward of one layer.  Its input is alive at the start; what it keeps (its input apart) and its output are
    alive at the end.  ``until``: stop before this step, as a replay does that is asked for nothing later, and leave
    no output.  ``bare``: nothing is kept, as in a step around the layer."""
    storages, waiting = ({}, {}) if bare else (layer.kept().storages, layer.kept().waiting)
    clock, steps = Clock(), _steps_until(layer.profile.steps, until)
    last_reader = {name: step.name for step in steps for name in step.reads}
    for step in steps:
        stays = sum(storages.get(f"{step.name} {part}", 0) for part in ("internals", "masks", "arguments"))
        fresh = step.output_bytes + step.internal_bytes + step.mask_bytes + step.held_bytes
        fresh -= step.output_bytes if step.output_is_internal else 0
        clock.touch(fresh + step.workspace_bytes, f"forward {step.name}")
        clock.live += stays + step.output_bytes + waiting.get(step.name, 0)
        for name in step.reads:
            if last_reader[name] == step.name and name != INPUT and name not in storages:
                clock.live -= layer.profile.bytes_of(name)
    last = steps[-1]
    if until and last.name not in storages:
        clock.live -= last.output_bytes
    return clock.span()


def _steps_until(steps: tuple[StepCost, ...], until: str) -> tuple[StepCost, ...]:
    names = [step.name for step in steps]
    return steps[: names.index(until)] if until in names else steps


# -- backward ----------------------------------------------------------------------------------------------------


@dataclass
class Gradients:
    """Gradients by the name of the value they belong to.  Several names may share one tensor."""

    clock: Clock
    watched: bool  # under a dispatch mode autograd adds two gradients out of place
    owner: dict[str, int] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)  # somebody outside holds these

    def put(self, name: str, tensor: int, at: str) -> None:
        """A gradient arrives; a second one for the same value is added to the first."""
        if name not in self.owner:
            self.owner[name] = tensor
            return
        size = self.sizes[tensor]
        first, total = self.owner.pop(name), self.new(size)
        self.clock.live += size
        self.clock.touch(0 if self.watched or first in self.held else -size, at)
        self.owner[name] = total
        self.drop(first)
        self.drop(tensor)

    def new(self, size: int) -> int:
        self.sizes[len(self.sizes)] = size
        return len(self.sizes) - 1

    def take(self, name: str) -> int:
        return self.owner.pop(name)

    def drop(self, tensor: int) -> None:
        """Freed when no value has it any more."""
        if tensor not in self.held and tensor not in self.owner.values():
            self.clock.live -= self.sizes[tensor]


def backward_span(
    layer: Layer,
    *,
    on_first_need: Callable[[Clock], None] | None = None,
    watched: bool = False,
    input_gradient: bool = True,
    held: bool = False,
    split: bool = False,
    ahead: bool = False,
) -> Span:
    """The backward of one layer.  Alive at the start: what the layer keeps, and the gradient of its output; at the
    end: the gradient of its input.  ``on_first_need`` runs before the first step that asks for anything saved.
    ``held``: somebody outside holds the output's gradient to the end, and beyond.  ``split``: weight gradients are put
    off, so their factors are alive at the end too.  ``ahead``: what it needs was rebuilt before (`rebuilt_span`)."""
    backward = _Backward(layer, watched, on_first_need, split)
    if ahead:
        backward.rebuild()
        backward.clock.live = backward.clock.peak = 0
    return backward.run(input_gradient, held)


def rebuilt_span(layer: Layer) -> Span:
    """Rebuilding all that a layer's backward will ask for, at once."""
    backward = _Backward(layer, False, None, False)
    backward.rebuild()
    return backward.clock.span()


class _Backward:
    def __init__(
        self, layer: Layer, watched: bool, on_first_need: Callable[[Clock], None] | None, split: bool
    ) -> None:
        self.layer, self.profile, self.split = layer, layer.profile, split
        self.kept = layer.kept()
        self.clock = Clock()
        self.gradients = Gradients(self.clock, watched)
        self.on_first_need = on_first_need
        self.by_name = {step.name: step for step in self.profile.steps}
        self.done: set[str] = set()  # steps whose backward is over
        self.rebuilt: dict[str, int] = {}  # dropped storages that are alive again
        self.replayed: set[str] = set()  # records that have run
        self.waiting: set[str] = set()  # storages that a weight gradient still needs
        self.holders = self._holders()
        self.present = dict(self.kept.storages)

    # -- who holds what ------------------------------------------------------------------------------------------

    def _holders(self) -> dict[str, set[str]]:
        """For each storage the steps whose backward must be over before it is freed."""
        holders: dict[str, set[str]] = {}
        slotted = self._slotted()
        for step in self.profile.steps:
            if step.saves_input:
                holders.setdefault(step.reads[0], set()).add(step.name)
            for part in ("internals", "masks", "arguments"):
                holders.setdefault(f"{step.name} {part}", set()).add(step.name)
            if step.output_is_internal:
                holders.setdefault(step.name, set()).add(step.name)
        # a record lives for those who hold its output or its internals, and keeps its inputs alive for them
        asked: dict[str, set[str]] = {}
        for step in reversed(self.profile.steps):
            if step.name not in self.kept.replayed:
                continue
            mine = asked.setdefault(step.name, set())
            mine |= {step.name} if step.name in slotted else set()
            if step.name in self.kept.dropped:
                mine |= holders.get(step.name, set())
            for name in step.reads:
                if name in self.kept.replayed and name in self.kept.dropped:
                    asked.setdefault(name, set()).update(mine)
                else:
                    holders.setdefault(name, set()).update(mine)
        return holders

    def _slotted(self) -> set[str]:
        save_set = self.layer.save_set
        return {s.name for s in self.profile.steps if save_set[s.name].internals == REPLAY and s.internal_bytes}

    # -- the walk ------------------------------------------------------------------------------------------------

    def run(self, input_gradient: bool, held: bool) -> Span:
        last = self.profile.steps[-1]
        tensor = self.gradients.new(last.output_bytes)
        self.gradients.held = {tensor} if held else set()
        self.gradients.put(last.name, tensor, "")
        waits_for_top = False
        for step in reversed(self.profile.steps):
            if self.on_first_need is not None and self._needs(step):
                self.on_first_need(self.clock)
                self.on_first_need = None
            self._demand(step)
            waits = self.split and step.name in DEFERRED
            waits_for_top = waits_for_top or (waits and self.gradients.owner[step.name] == tensor)
            self._step(step, input_gradient, waits)
            self._release(step)
        return replace(self.clock.span(), keeps_top=held and waits_for_top)

    def rebuild(self) -> None:
        for step in reversed(self.profile.steps):
            self._demand(step)

    def _needs(self, step: StepCost) -> bool:
        stored = step.mask_bytes and self.layer.save_set[step.name].masks == KEEP
        return bool(step.saves_input or step.internal_bytes or stored or step.held_bytes)

    def _step(self, step: StepCost, input_gradient: bool, waits: bool) -> None:
        own = self.gradients.take(step.name)
        if waits:
            self.gradients.held.add(own)
            self.waiting.add(step.reads[0])
        at = f"backward {step.name}"
        redrawn = step.mask_bytes if self.layer.save_set[step.name].masks != KEEP else 0
        self.clock.touch(step.backward_workspace_bytes + redrawn, at)
        for name in step.reads[:-1]:
            self.gradients.put(name, own, at)
        target = step.reads[-1]
        if target == INPUT and not input_gradient:
            pass
        elif step.passes_gradient:
            self.gradients.put(target, own, at)
        else:
            size = self.profile.bytes_of(target)
            self.clock.live += size
            self.gradients.put(target, self.gradients.new(size), at)
        self.gradients.drop(own)

    def _release(self, step: StepCost) -> None:
        self.done.add(step.name)
        for pool in (self.present, self.rebuilt):
            for name in [n for n in pool if self.holders.get(n, set()) <= self.done and n not in self.waiting]:
                self.clock.live -= pool.pop(name)

    # -- replay --------------------------------------------------------------------------------------------------

    def _demand(self, step: StepCost) -> None:
        """Bring back what this step's backward asks for."""
        if step.saves_input:
            self._resolve(step.reads[0], f"replay for {step.name}")
        if step.name in self._slotted() and step.name not in self.replayed:
            self._rebuild(step, f"replay for {step.name}")

    def _resolve(self, name: str, at: str) -> None:
        if name in self.present or name in self.rebuilt or name not in self.kept.dropped:
            return
        if name in self.kept.waiting:  # comes back whole from its tier, whose own bytes go with it
            size = self.profile.bytes_of(name)
            self.clock.live += size
            self.clock.touch(0, at)
            self.rebuilt[name] = size + self.kept.waiting[name]
        elif name in self.by_name:
            self._rebuild(self.by_name[name], at)

    def _rebuild(self, step: StepCost, at: str) -> None:
        for name in step.reads:
            self._resolve(name, at)
        inside = step.internal_bytes - (step.output_bytes if step.output_is_internal else 0)
        stored = step.mask_bytes if self.layer.save_set[step.name].masks == KEEP else 0
        needs = step.output_bytes + inside + step.mask_bytes + step.workspace_bytes + step.replay_workspace_bytes
        self.clock.touch(needs, at)
        self.replayed.add(step.name)
        if step.name in self._slotted() and step.name not in self.done:
            for part, size in (("internals", inside), ("masks", stored)):
                self._revive(f"{step.name} {part}", size)
        if step.name in self.kept.dropped or step.output_is_internal:
            self._revive(step.name, step.output_bytes)
        self._forget_inputs(step)

    def _revive(self, name: str, size: int) -> None:
        if size and name not in self.present and name not in self.rebuilt:
            self.rebuilt[name] = size
            self.clock.live += size

    def _forget_inputs(self, step: StepCost) -> None:
        """A replayed step lets go of its rebuilt inputs; they stay only for a backward or a replay still to come."""
        for name in step.reads:
            if name in self.rebuilt and name not in self.waiting and not self._wanted(name):
                self.clock.live -= self.rebuilt.pop(name)

    def _wanted(self, name: str) -> bool:
        waiting = (s for s in self.profile.steps if name in s.reads)
        return any(
            (s.saves_input and s.reads[0] == name and s.name not in self.done)
            or (s.name in self.kept.replayed and s.name not in self.replayed)
            for s in waiting
        )

