"""Steps: the forward side of the engine.

``torch.utils.checkpoint`` wraps a region and runs all of it again, consumers and collectives included.  Here the
model only names its steps; the open tape's plan says, for each, whether its output and what autograd saves inside
it are kept or rebuilt.  A tensor saved inside a step is, in this order: a parameter; an earlier dropped output (then
a view handle); an input; else an internal of the step.  Only internals and dropped outputs ever make a step replay,
so a linear layer that saves its input and weight is never re-run for them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from megackpt.plan import KEEP, REPLAY, TIERS, Decision, Group, group_at
from megackpt.recompute import nested
from megackpt.recompute.call import StepCall, flatten, tensors_of
from megackpt.recompute.context import COUNTED, LIVE, MERGED, pack, state
from megackpt.recompute.handle import (
    Internal,
    Kept,
    Tag,
    View,
    is_mask,
    is_parameter,
    live_tag,
    meta_of,
    storage_key,
    write_tag,
)
from megackpt.recompute.lanes import lane_of
from megackpt.recompute.opaque import opaque
from megackpt.recompute.replay import Record, pop_hooks, push_hooks, resolve
from megackpt.recompute.rng import same_state
from megackpt.recompute.tape import Tape
from megackpt.recompute.watch import Watch

T = TypeVar("T")
Module = Callable[[Tensor], Tensor]


class Scope:
    """Steps of one address (``layers.3``): ``scope("attn.norm", fn, x)`` runs ``fn(x)`` as the step attn.norm."""

    __slots__ = ("address",)

    def __init__(self, address: str) -> None:
        self.address = address

    def __call__(self, name: str, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        tape = state.tape
        if tape is None or state.inner == MERGED or not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        if torch.compiler.is_compiling():
            return opaque(_unseen)(self, name, fn, *args, **kwargs)
        decision = tape.plan.save_set(self.address)[name]
        if state.inner == COUNTED or not tape.live or _concerns_nobody(tape, decision, args, kwargs):
            return _counted(decision.masks, fn, args, kwargs)
        where = f"{self.address} {name}" if self.address else name
        result: T = run_step(tape, where, decision, fn, args, kwargs)
        return result


def _concerns_nobody(tape: Tape, decision: Decision, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether autograd may save for itself, without hooks: everything is kept, nobody counts, and no argument was
    dropped."""
    if not decision.keeps_all or tape.counts or state.frame is not None or kwargs:
        return False
    return all(live_tag(a) is None if isinstance(a, Tensor) else not nested.is_nested(a) for a in args)


def _unseen(scope: Scope, name: str, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """The step once more, out of the compiler's sight."""
    return scope(name, fn, *args, **kwargs)


def at(address: str) -> Scope:
    """The steps of one place in the model; the plan is asked for ``address`` and the step's name."""
    return Scope(address)


def step(name: str, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Run ``fn(*args, **kwargs)`` as the named step of the open tape (a plain call when none is open).

    ``fn`` must be a pure function of its arguments and of registered random streams: activations enter as
    arguments, not by closure, and are not modified.
    """
    return Scope("")(name, fn, *args, **kwargs)


def chain(layers: Sequence[tuple[int, Module]], x: Tensor) -> Tensor:
    """Run numbered layers one after another, the plan's groups of them as one dropped step each."""
    tape = state.tape
    if tape is None or not torch.is_grad_enabled() or state.inner == MERGED:
        return _in_turn((), layers, x)
    return _in_turn(tape.plan.groups, layers, x)


def _in_turn(groups: Sequence[Group], layers: Sequence[tuple[int, Module]], x: Tensor) -> Tensor:
    """The layers in order, groups of them as one step.  While an outer step's forward only counts, a group is no step
    either, but it stores what it will store in the outer one's replay."""
    tape, place = state.tape, 0
    while place < len(layers):
        first, module = layers[place]
        group = group_at(groups, first) if groups else None
        if group is None:
            x, place = module(x), place + 1
            continue
        assert tape is not None
        members = layers[place : place + group.last - group.first + 1]
        run = partial(_in_turn, group.inner or (), members)
        inner = MERGED if group.inner is None else COUNTED
        if state.inner == LIVE:
            decision = Decision(output=group.output, internals=REPLAY, masks=REPLAY)
            x = run_step(tape, f"layers {group.first} to {group.last}", decision, run, (x,), {}, inner)
        else:
            x = _counted(REPLAY, run, (x,), {}, inner)
        place += len(members)
    return x


def _counted(
    masks: str, fn: Callable[..., T], args: tuple[Any, ...], kwargs: Mapping[str, Any], inner: int | None = None
) -> T:
    """A step that is none here: only its decision for masks holds, and for the steps inside it ``inner``."""
    before = state.masks, state.inner
    state.masks, state.inner = masks, state.inner if inner is None else inner
    try:
        return fn(*args, **kwargs)
    finally:
        state.masks, state.inner = before


class ForwardFrame:
    """The pack hook of one step's forward."""

    __slots__ = (
        "tape", "where", "decision", "record", "count", "parent", "outer", "inputs", "input_storages", "last", "held",
        "stored",
    )  # fmt: skip

    def __init__(self, tape: Tape, where: str, decision: Decision, inputs: Sequence[Any]) -> None:
        self.tape = tape
        self.where = where
        self.decision = decision
        self.record: Record | None = None  # set if the step is dropped
        self.count = 0
        self.inputs = inputs
        self.input_storages: set[int] | None = None  # made when first asked for
        self.last: Tensor | None = None  # saved
        self.held: set[int] = set()  # storages that stay on the device for a kept internal
        self.stored: dict[int, tuple[weakref.ref[torch.UntypedStorage], Tag]] = {}  # internals that wait in a tier
        parent = state.frame
        self.parent = parent if parent is not None and parent.replaying else None
        self.outer = tape.outer if self.parent is None else None  # what a replay makes is nobody else's to save

    @property
    def replaying(self) -> bool:
        return self.parent is not None

    def still_wanted(self, packs: int) -> bool:
        return self.parent is None or self.parent.still_wanted(packs)

    def fill(self, tensor: Tensor, handle: Kept | Internal | View) -> None:
        """A step inside this one, inside a replay, saved something: it concerns only who is replaying."""
        assert self.parent is not None
        self.parent.fill(tensor, handle)

    def is_input(self, tensor: Tensor) -> bool:
        if self.input_storages is None:
            self.input_storages = {storage_key(a) for a in self.inputs if isinstance(a, Tensor)}
        return storage_key(tensor) in self.input_storages

    def pack(self, tensor: Tensor) -> Kept | Internal | View:
        handle = self._handle(tensor)
        self.count += 1
        self.last = tensor
        if self.parent is not None:
            self.parent.fill(tensor, handle)
        return handle

    def _handle(self, tensor: Tensor) -> Kept | Internal | View:
        if is_parameter(tensor):
            return Kept(tensor, self.where)
        tag = live_tag(tensor)
        if tag is not None:
            return View(tag.cell().open(), tensor)
        internals = self.decision.internals
        if internals != KEEP and not self.is_input(tensor) and not self._keeps_as_mask(tensor):
            if internals == REPLAY:
                return self._slot(tensor)
            if tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg()):
                return self._elsewhere(tensor)
        kept = Kept(tensor, self.where, self.outer)
        self.tape.note_kept(kept, self.where)
        if self.decision.output != KEEP:
            self.held.add(storage_key(tensor))
        return kept

    def _keeps_as_mask(self, tensor: Tensor) -> bool:
        return self.decision.masks == KEEP and is_mask(tensor)

    def _slot(self, tensor: Tensor) -> Internal:
        assert self.record is not None
        slot = Internal(self.record, tensor)
        self.record.slots[self.count] = weakref.ref(slot)
        if self.record.watch is not None:
            self.record.watch.saved(self.count, tensor)
        return slot

    def _elsewhere(self, tensor: Tensor) -> View:
        storage = tensor.untyped_storage()
        ref, tag = self.stored.get(storage._cdata, (None, None))
        # The address alone does not say which storage it is: the tier lets go of storages, and others take their place.
        if ref is None or tag is None or ref() is not storage or not tag.fits(tensor):
            producer = self.tape.store(self.decision.internals, self.where, tensor)
            tag = Tag(producer, 0, tensor)
            self.stored[storage._cdata] = (weakref.ref(storage), tag)
        return View(tag.cell().open(), tensor)


def run_step(
    tape: Tape,
    where: str,
    decision: Decision,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    inner: int = COUNTED,
    watch: Watch | None = None,
) -> Any:
    """The forward of one step under a live tape.

    ``inner``: what steps inside a dropped one are, COUNTED (they decide for themselves in the replay) or MERGED.
    ``watch`` looks on if the step is dropped.
    """
    _refuse_transforms(where, args)
    leaves, spec = (args, None) if decision.keeps_all else flatten(args, kwargs)
    frame = ForwardFrame(tape, where, decision, leaves)
    record = None
    if decision.output == REPLAY or decision.internals == REPLAY:
        call = StepCall(where, fn, decision.masks, LIVE if inner == COUNTED else MERGED)
        call.hold(leaves, spec, frame.outer)
        watch = tape.watch_for(call, watch)
        record = frame.record = Record(tape, call, watch)
        record.lane = lane_of(leaves)
        rng = tape.ledger.snapshot()
    ambient = state.read()
    state.write((tape, frame, decision.masks, LIVE if record is None else inner))
    push_hooks(pack, resolve)
    try:
        result = fn(*args, **kwargs) if record is None or watch is None else watch.forward(fn, args, kwargs)
    finally:
        pop_hooks()
        state.write(ambient)
        # Also when the replay of an outer step stops in here: what was saved so far is rebuilt by this step.
        if record is not None and not same_state(rng, tape.ledger.snapshot()):
            record.call.rng = rng
    if record is not None:
        record.packs = frame.count
        record.ends_in_result = bool(record.slots) and _is_over(frame.last, result)
        record.call.check_inputs_unchanged(leaves)
        tape.note_record(record)
    if decision.output != KEEP:
        _drop_outputs(frame, decision.output, result)
    return result


def _is_over(last: Tensor | None, result: Any) -> bool:
    """Whether the step had its result when it saved for the last time, so that nothing costly came after."""
    if last is None or not isinstance(result, Tensor):
        return False
    return storage_key(last) == storage_key(result)


def _drop_outputs(frame: ForwardFrame, choice: str, result: Any) -> None:
    """Tag each storage that the step made with who rebuilds it.  One that belongs to an input or a parameter, or that
    a kept internal holds anyway, stays kept."""
    seen: set[int] = set()
    for index, tensor in enumerate(tensors_of(result)):
        storage = storage_key(tensor)
        if storage in seen or storage in frame.held or frame.is_input(tensor) or is_parameter(tensor):
            continue
        if tensor.layout is not torch.strided:
            continue
        seen.add(storage)
        if choice in TIERS:
            tag = Tag(frame.tape.store(choice, frame.where, tensor), 0, tensor)
        else:
            assert frame.record is not None
            tag = Tag(frame.record, index, tensor)
            frame.record.outputs[index] = meta_of(tensor)
            if frame.record.watch is not None:
                frame.record.watch.returned(index, tensor)
        write_tag(tensor, tag)
        frame.tape.note_tag(tag)


def _refuse_transforms(where: str, args: tuple[Any, ...]) -> None:
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            f"{where}: torch.func transforms (grad, vmap, jvp) cannot see through a replayed step; apply them outside "
            f"the tape, or without a plan"
        )
    if forward_ad._current_level >= 0 and any(
        isinstance(a, Tensor) and forward_ad.unpack_dual(a).tangent is not None for a in args
    ):
        raise RuntimeError(f"{where}: an input carries a forward-mode tangent; forward-mode AD works without a tape")
