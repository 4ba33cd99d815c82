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

from megackpt.plan import KEEP, REPLAY, Decision
from megackpt.recompute.context import COUNTED, LIVE, MERGED, state
from megackpt.recompute.handle import Internal, Kept, Tag, View, live_tag, write_tag
from megackpt.recompute.record import Record, tensors_of
from megackpt.recompute.replay import autocast_state, pop_hooks, push_hooks, resolve
from megackpt.recompute.rng import same_state
from megackpt.recompute.tape import Tape

T = TypeVar("T")
Module = Callable[[Tensor], Tensor]

_GROUP = Decision(output=KEEP, internals=REPLAY, masks=REPLAY)


class Scope:
    """Steps of one address (``layers.3``): ``scope("attn.norm", fn, x)`` runs ``fn(x)`` as the step attn.norm."""

    __slots__ = ("address",)

    def __init__(self, address: str) -> None:
        self.address = address

    def __call__(self, name: str, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        tape = state.tape
        if tape is None or not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        decision = tape.plan.save_set(self.address)[name]
        if state.inner == MERGED:
            return fn(*args, **kwargs)
        if state.inner == COUNTED or not tape.live:
            return _with_masks(decision.masks, fn, args, kwargs)
        where = f"{self.address} {name}" if self.address else name
        return _run(tape, where, decision, fn, args, kwargs, COUNTED)


def at(address: str) -> Scope:
    """The steps of one place in the model; the plan is asked for ``address`` and the step's name."""
    return Scope(address)


def step(name: str, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Run ``fn(*args, **kwargs)`` as the named step of the open tape (a plain call when none is open).

    ``fn`` must be a pure function of its arguments and of registered random streams: activations enter as
    arguments, not by closure, and are not modified.
    """
    return Scope("")(name, fn, *args, **kwargs)


def chain(layers: Sequence[tuple[int, Module]], x: Tensor) -> Tensor:
    """Run numbered layers one after another, the plan's groups of them as one dropped step each."""
    tape = state.tape
    if tape is None or not torch.is_grad_enabled() or not tape.plan.groups or state.inner != LIVE:
        return _in_turn([module for _, module in layers], x)
    place = 0
    while place < len(layers):
        first, module = layers[place]
        group = tape.plan.group_at(first)
        if group is None:
            x, place = module(x), place + 1
            continue
        members = [m for index, m in layers if group.first <= index <= group.last]
        where = f"layers {group.first} to {group.last}"
        x = _run(tape, where, _GROUP, partial(_in_turn, members), (x,), {}, MERGED)
        place += len(members)
    return x


def _in_turn(modules: Sequence[Module], x: Tensor) -> Tensor:
    for module in modules:
        x = module(x)
    return x


def _with_masks(masks: str, fn: Callable[..., T], args: tuple, kwargs: Mapping[str, Any]) -> T:
    before, state.masks = state.masks, masks
    try:
        return fn(*args, **kwargs)
    finally:
        state.masks = before


class _ForwardFrame:
    """The pack hook of one step's forward."""

    __slots__ = ("tape", "where", "record", "drop", "count", "parent", "inputs", "kept_inside")
    replaying = False

    def __init__(self, tape: Tape, where: str, record: Record | None, drop: bool, inputs: tuple) -> None:
        self.tape = tape
        self.where = where
        self.record = record
        self.drop = drop
        self.count = 0
        self.inputs = inputs
        self.kept_inside: set[int] = set()
        parent = state.frame
        self.parent = parent if parent is not None and parent.replaying else None

    def still_wanted(self, packs: int) -> bool:
        return True

    def is_input(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()._cdata
        return any(isinstance(a, Tensor) and a.untyped_storage()._cdata == storage for a in self.inputs)

    def pack(self, tensor: Tensor) -> Kept | Internal | View:
        handle = self._handle(tensor)
        self.count += 1
        if self.parent is not None:  # we run inside a replay: the handle fills the outer step's slot
            self.parent.fill(tensor, handle)
        return handle

    def _handle(self, tensor: Tensor) -> Kept | Internal | View:
        if isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter):
            return Kept(tensor, self.where)
        tag = live_tag(tensor)
        if tag is not None:
            return View(tag.cell().open(), tensor)
        if self.drop and not self.is_input(tensor):
            assert self.record is not None
            slot = Internal(self.record, tensor)
            self.record.slots[self.count] = weakref.ref(slot)
            return slot
        kept = Kept(tensor, self.where, self.tape.outer)
        self.tape.note_kept(kept, self.where)
        if self.record is not None:
            self.kept_inside.add(tensor.untyped_storage()._cdata)
        return kept


def _run(
    tape: Tape, where: str, decision: Decision, fn: Callable, args: tuple, kwargs: Mapping[str, Any], inner: int
) -> Any:
    """The forward of one step under a live tape."""
    record = None
    dropped = not decision.keeps_all
    if dropped:
        record = Record(where, tape, fn, decision.masks, LIVE if inner == COUNTED else MERGED)
        record.hold_inputs(args, kwargs)
        record.autocast = autocast_state()
        rng = tape.ledger.snapshot()
    inputs = (*args, *kwargs.values()) if kwargs else args
    frame = _ForwardFrame(tape, where, record, decision.internals == REPLAY, inputs)
    ambient = state.read()
    state.write((tape, frame, decision.masks, inner if dropped else LIVE))
    push_hooks(frame.pack, resolve)
    try:
        result = fn(*args, **kwargs)
    finally:
        pop_hooks()
        state.write(ambient)
    if record is not None:
        if not same_state(rng, tape.ledger.snapshot()):
            record.rng = rng
        record.packs = frame.count
        record.check_inputs_unchanged()
        tape.note_record(record)
        if decision.output == REPLAY:
            _tag_outputs(tape, record, frame, result)
    return result


def _tag_outputs(tape: Tape, record: Record, frame: _ForwardFrame, result: Any) -> None:
    """Mark each storage the step made.  One that belongs to an input or a parameter, or that a kept internal holds
    anyway, stays kept."""
    seen: set[int] = set()
    for index, tensor in enumerate(tensors_of(result)):
        storage = tensor.untyped_storage()._cdata
        if storage in seen or storage in frame.kept_inside or frame.is_input(tensor):
            continue
        if isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter):
            continue
        seen.add(storage)
        tag = Tag(record, index, tensor)
        write_tag(tensor, tag)
        tape.note_tag(tag)
