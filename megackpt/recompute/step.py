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
from megackpt.recompute.call import StepCall, flatten, tensors_of
from megackpt.recompute.context import COUNTED, LIVE, MERGED, pack, state
from megackpt.recompute.handle import Internal, Kept, Tag, View, live_tag, meta_of, write_tag
from megackpt.recompute.producer import Producer
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

    def __call__(self, name: str, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        tape = state.tape
        if tape is None or state.inner == MERGED or not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        decision = tape.plan.save_set(self.address)[name]
        if state.inner == COUNTED or not tape.live:
            return _with_masks(decision.masks, fn, args, kwargs)
        where = f"{self.address} {name}" if self.address else name
        result: T = run_step(tape, where, decision, fn, args, kwargs)
        return result


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
    if tape is None or not torch.is_grad_enabled() or state.inner != LIVE:
        return _in_turn((), layers, x)
    return _in_turn(tape.plan.groups, layers, x)


def _in_turn(groups: Sequence[Group], layers: Sequence[tuple[int, Module]], x: Tensor) -> Tensor:
    """The layers in order; ``groups`` count only where steps are live (a group's own forward is not)."""
    tape, place = state.tape, 0
    live = bool(groups) and state.inner == LIVE
    while place < len(layers):
        first, module = layers[place]
        group = group_at(groups, first) if live else None
        if group is None:
            x, place = module(x), place + 1
            continue
        assert tape is not None
        members = layers[place : place + group.last - group.first + 1]
        where = f"layers {group.first} to {group.last}"
        inner = MERGED if group.inner is None else COUNTED
        decision = Decision(output=group.output, internals=REPLAY, masks=REPLAY)
        x = run_step(tape, where, decision, partial(_in_turn, group.inner or (), members), (x,), {}, inner)
        place += len(members)
    return x


def _with_masks(masks: str, fn: Callable[..., T], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> T:
    before, state.masks = state.masks, masks
    try:
        return fn(*args, **kwargs)
    finally:
        state.masks = before


class ForwardFrame:
    """The pack hook of one step's forward."""

    __slots__ = ("tape", "where", "decision", "record", "count", "parent", "outer", "inputs", "held", "stored")

    def __init__(self, tape: Tape, where: str, decision: Decision, inputs: Sequence[Any]) -> None:
        self.tape = tape
        self.where = where
        self.decision = decision
        self.record: Record | None = None  # set if the step is dropped
        self.count = 0
        self.inputs = inputs
        self.held: set[int] = set()  # storages that stay on the device for a kept internal
        self.stored: dict[tuple[int, torch.dtype], Producer] = {}  # storages of internals that wait in a tier
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
        storage = tensor.untyped_storage()._cdata
        return any(isinstance(a, Tensor) and a.untyped_storage()._cdata == storage for a in self.inputs)

    def pack(self, tensor: Tensor) -> Kept | Internal | View:
        handle = self._handle(tensor)
        self.count += 1
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
        if internals != KEEP and not self.is_input(tensor):
            if internals == REPLAY:
                return self._slot(tensor)
            if not (tensor.is_conj() or tensor.is_neg()):
                return self._elsewhere(tensor)
        kept = Kept(tensor, self.where, self.outer)
        self.tape.note_kept(kept, self.where)
        if self.decision.output != KEEP:
            self.held.add(tensor.untyped_storage()._cdata)
        return kept

    def _slot(self, tensor: Tensor) -> Internal:
        assert self.record is not None
        slot = Internal(self.record, tensor)
        self.record.slots[self.count] = weakref.ref(slot)
        if self.record.watch is not None:
            self.record.watch.saved(self.count, tensor)
        return slot

    def _elsewhere(self, tensor: Tensor) -> View:
        key = (tensor.untyped_storage()._cdata, tensor.dtype)
        producer = self.stored.get(key)
        if producer is None:
            producer = self.stored[key] = self.tape.store(self.decision.internals, self.where, tensor)
        return View(producer.cell(0).open(), tensor)


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
        record.call.check_inputs_unchanged(leaves)
        tape.note_record(record)
    if decision.output != KEEP:
        _drop_outputs(frame, decision.output, result)
    return result


def _drop_outputs(frame: ForwardFrame, choice: str, result: Any) -> None:
    """Tag each storage that the step made with who rebuilds it.  One that belongs to an input or a parameter, or that
    a kept internal holds anyway, stays kept."""
    seen: set[int] = set()
    for index, tensor in enumerate(tensors_of(result)):
        storage = tensor.untyped_storage()._cdata
        if storage in seen or storage in frame.held or frame.is_input(tensor) or is_parameter(tensor):
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


def is_parameter(tensor: Tensor) -> bool:
    """A parameter or a view of one (``F.linear`` saves ``weight.t()``)."""
    return isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter)


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
