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

from megackpt.plan import KEEP, REPLAY, TIERS, Decision, Group, SaveSet
from megackpt.recompute import nested
from megackpt.recompute.call import TwoPhase, flatten, tensors_of
from megackpt.recompute.context import COUNTED, LIVE, MERGED, state
from megackpt.recompute.demand import resolve
from megackpt.recompute.frame import ForwardFrame
from megackpt.recompute.handle import MARK, Tag, is_parameter, live_tag, meta_of, storage_key
from megackpt.recompute.lanes import lane_of
from megackpt.recompute.opaque import opaque
from megackpt.recompute.replay import Record, pop_hooks, push_hooks
from megackpt.recompute.span import Cut, Named, Span, cuts_of
from megackpt.recompute.tape import Tape
from megackpt.recompute.watch import Watch

T = TypeVar("T")
_in_transform = torch._C._functorch.peek_interpreter_stack


class Scope:
    """Steps of one address (``layers.3``): ``scope("attn.norm", fn, x)`` runs ``fn(x)`` as the step attn.norm."""

    __slots__ = ("address", "pure", "_cuts")

    def __init__(self, address: str, pure: bool = False) -> None:
        self.address = address
        self.pure = pure
        # By first step and number of steps: how the save-set that was asked last cuts that branch.
        self._cuts: dict[tuple[str, int], tuple[SaveSet, tuple[Cut, ...]]] = {}

    def __call__(self, name: str, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        now = state.now
        tape = now.tape
        if tape is None or now.inner == MERGED or not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        if torch.compiler.is_compiling():
            return opaque(_unseen)(self, name, fn, *args, **kwargs)
        if tape.observer is not None:
            return tape.observer(self.address, name, fn, args, kwargs)  # type: ignore[no-any-return]
        decision = tape.plan.save_set(self.address)[name]
        dropped = decision.output == REPLAY or decision.internals == REPLAY
        if now.inner == COUNTED or not (dropped or (tape.live and _concerns_us(tape, decision, args, kwargs))):
            return _counted(decision.masks, fn, args, kwargs)
        where = f"{self.address} {name}" if self.address else name
        result: T = run_step(tape, where, decision, fn, args, kwargs)
        return result

    def branch(self, x: Tensor, steps: Sequence[Named], join: tuple[str, Callable[[Tensor, Tensor], Tensor]]) -> Tensor:
        """``join(x, y)`` with y from the named steps one after another, the first of which reads x.

        The same as a call of the scope for each of them and for the join; told at once, neighbours that the plan drops
        whole are one replay, and neighbours that it keeps cost nothing.
        """
        now = state.now
        tape = now.tape
        if tape is None or now.inner == MERGED or not torch.is_grad_enabled():
            return _plainly(x, steps, join[1])
        if torch.compiler.is_compiling() or tape.verify or tape.observer is not None:  # these tell the steps apart
            y = x
            for name, fn in steps:
                y = self(name, fn, y)
            return self(*join, x, y)
        return self._branch(tape, x, steps, join)

    def _branch(
        self, tape: Tape, x: Tensor, steps: Sequence[Named], join: tuple[str, Callable[[Tensor, Tensor], Tensor]]
    ) -> Tensor:
        save_set = tape.plan.save_set(self.address)
        key = (steps[0][0], len(steps))
        known = self._cuts.get(key)
        if known is None or known[0] is not save_set:
            known = (save_set, cuts_of(steps, join[0], save_set, self.address))
            self._cuts[key] = known
        cuts, y = known[1], x
        now = state.now
        counted = now.inner == COUNTED or not tape.live
        alone = tape.counts or type(now.frame) is ForwardFrame
        if cuts[0].plain and (counted or not (alone or tape.dropped)):
            return _counted(cuts[0].decision.masks, _plainly, (x, steps, join[1]), {})
        for cut in cuts:
            part = steps[cut.start : cut.stop]
            if cut.merged and not counted:
                span = Span(part, cut, join[1] if cut.joined else None, self.pure)
                y = run_step(tape, cut.wheres[0], cut.decision, span, (y,), {})
            elif counted or (cut.decision.keeps_all and not alone):
                y = _kept(tape, cut, part, y, counted)
                if cut.joined:
                    y = _counted(cut.decision.masks, join[1], (x, y), {})
            else:
                for where, (_, fn) in zip(cut.wheres, part, strict=False):
                    y = run_step(tape, where, cut.decision, fn, (y,), {})
        return y if cuts[-1].joined else self(*join, x, y)


def _plainly(x: Tensor, steps: Sequence[Named], join: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    y = x
    for _, fn in steps:
        y = fn(y)
    return join(x, y)


def _kept(tape: Tape, cut: Cut, part: Sequence[Named], y: Tensor, counted: bool) -> Tensor:
    """Neighbours of which autograd may save for itself, except what the first saves of a dropped argument."""
    if tape.dropped and not counted and live_tag(y) is not None:
        y = run_step(tape, cut.wheres[0], cut.decision, part[0][1], (y,), {})
        part = part[1:]
    now = state.now
    before, now.masks = now.masks, cut.decision.masks
    try:
        for _, fn in part:
            y = fn(y)
    finally:
        now.masks = before
    return y


def _concerns_us(tape: Tape, decision: Decision, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether autograd may not simply save for itself, without hooks: something is put elsewhere, somebody counts, or
    an argument was dropped."""
    if not decision.keeps_all or tape.counts or kwargs:
        return True
    if type(state.now.frame) is ForwardFrame:  # in a replay it takes what autograd saves
        return True
    return tape.dropped and any(live_tag(a) is not None if isinstance(a, Tensor) else nested.is_nested(a) for a in args)


def _unseen(scope: Scope, name: str, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """The step once more, out of the compiler's sight."""
    return scope(name, fn, *args, **kwargs)


def at(address: str, *, pure: bool = False) -> Scope:
    """The steps of one place in the model; the plan is asked for ``address`` and the step's name.

    ``pure``: the model says that no module in its branches has running statistics (BatchNorm), so that a replay need
    not look for them.
    """
    return Scope(address, pure)


def step(name: str, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Run ``fn(*args, **kwargs)`` as the named step of the open tape (a plain call when none is open).

    ``fn`` must be a pure function of its arguments and of registered random streams: activations enter as
    arguments, not by closure, and are not modified.
    """
    return _NOWHERE(name, fn, *args, **kwargs)


_NOWHERE = Scope("")


def chain(layers: Sequence[tuple[int, Callable[[Tensor], Tensor]]], x: Tensor) -> Tensor:
    """Run numbered layers one after another, the plan's groups of them as one dropped step each."""
    now = state.now
    tape = now.tape
    if tape is None or not torch.is_grad_enabled() or now.inner == MERGED:
        return _in_turn((), layers, x)
    return _in_turn(tape.plan.groups, layers, x)


def _in_turn(groups: Sequence[Group], layers: Sequence[tuple[int, Callable[[Tensor], Tensor]]], x: Tensor) -> Tensor:
    """The layers in order, groups of them as one step.  While an outer step's forward only counts, a group is no step
    either, but it stores what it will store in the outer one's replay."""
    now, place = state.now, 0
    tape = now.tape
    starts = {group.first: group for group in (groups if now.inner == LIVE else _merged(groups))}
    while place < len(layers):
        first, module = layers[place]
        group = starts.get(first)
        if group is None:
            x, place = module(x), place + 1
            continue
        assert tape is not None
        members = layers[place : place + group.last - group.first + 1]
        run = partial(_in_turn, group.inner or (), members)
        inner = MERGED if group.inner is None else COUNTED
        if now.inner == LIVE:
            decision = Decision(output=group.output, internals=REPLAY, masks=REPLAY)
            x = run_step(tape, f"layers {group.first} to {group.last}", decision, run, (x,), {}, inner)
        else:
            x = _counted(REPLAY, run, (x,), {}, inner)
        place += len(members)
    return x


def _merged(groups: Sequence[Group]) -> list[Group]:
    """The groups without an inside, wherever in the trees they stand: what counts in a forward that only counts.  A
    walk without recursion, since a schedule for one slot is as deep as its chain is long."""
    found, waiting = [], list(groups)
    while waiting:
        group = waiting.pop()
        if group.inner is None:
            found.append(group)
        else:
            waiting += group.inner
    return found


def _counted(
    masks: str, fn: Callable[..., T], args: tuple[Any, ...], kwargs: Mapping[str, Any], inner: int | None = None
) -> T:
    """A step that is none here: only its decision for masks holds, and for the steps inside it ``inner``."""
    now = state.now
    before = now.masks, now.inner
    now.masks = masks
    if inner is not None:
        now.inner = inner
    try:
        return fn(*args, **kwargs)
    finally:
        now.masks, now.inner = before


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
    if _in_transform() is not None or forward_ad._current_level >= 0:
        _refuse_transforms(where, args)
    if decision.output != REPLAY and decision.internals != REPLAY:
        return _run_kept(tape, where, decision, fn, args, kwargs)
    leaves, spec = (args, None) if not kwargs and len(args) == 1 and type(args[0]) is Tensor else flatten(args, kwargs)
    now, ledger = state.now, tape.ledger
    record = Record(tape, where, fn, decision.masks, LIVE if inner == COUNTED else MERGED)
    frame = ForwardFrame(tape, where, decision, leaves, now)
    try:
        record.hold(leaves, spec, frame)
        if watch is not None or tape.verify:
            record.watch = watch = tape.watch_for(record, watch)
        elif decision.internals == REPLAY:
            frame.drops = record
        record.lane = lane_of(leaves)
        rng = ledger.snapshot()
        ambient = now.tape, now.frame, now.masks, now.inner
        push_hooks(frame.pack, resolve)  # first: it fails where hooks are forbidden
        now.tape, now.frame, now.masks, now.inner = tape, frame, decision.masks, inner
        try:
            result = fn(*args, **kwargs) if watch is None else watch.forward(fn, args, kwargs)
        finally:
            pop_hooks()
            now.tape, now.frame, now.masks, now.inner = ambient
            # Also when the replay of an outer step stops in here: what was saved so far is rebuilt by this step.
            if rng and ledger.drew_since(rng):
                record.rng = rng
        record.packs = frame.count
        record.check_arguments_unchanged(leaves)
        if decision.output == KEEP:
            record.ends_here = _ends_here(record, frame.last, result)
        else:
            _drop_outputs(frame, decision.output, result)
        if frame.tail is not None and frame.tail.start >= 0:
            record.tail = frame.tail
        record.runs_out = record.ends_here or record.tail is not None
        record.closer = watch is not None or (type(fn) is Span and fn.communicates)
        if tape.notes_records or isinstance(fn, TwoPhase):
            tape.note_record(record)
    finally:
        frame.close()
    return result


def _run_kept(
    tape: Tape,
    where: str,
    decision: Decision,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    now = state.now
    frame = ForwardFrame(tape, where, decision, args, now)
    if decision.internals != KEEP and (kwargs or any(map(nested.is_nested, args))):
        frame.inputs = flatten(args, kwargs)[0]
    ambient = now.tape, now.frame, now.masks, now.inner
    push_hooks(frame.pack, resolve)
    now.tape, now.frame, now.masks, now.inner = tape, frame, decision.masks, LIVE
    try:
        try:
            result = fn(*args, **kwargs)
        finally:
            pop_hooks()
            now.tape, now.frame, now.masks, now.inner = ambient
        if decision.output != KEEP:
            _drop_outputs(frame, decision.output, result)
    finally:
        frame.close()
    return result


_SMALL = 1 << 14  # elements
# Operations on one element each that always save what they read, just before they run.
_ELEMENTWISE = frozenset(f"{name}Backward0" for name in ("Cos", "Gelu", "Log", "Pow", "Silu", "Sin"))


def _ends_here(record: Record, last: Tensor | None, result: Any) -> bool:
    """Whether the step had its result, or nearly, when it saved an internal for the last time: what came after costs
    less than an exception through the dispatcher, some ten microseconds."""
    slot = record.slots[-1]() if record.slots else None
    if slot is None or slot.number != record.packs - 1 or type(result) is not Tensor:
        return False
    if type(result.grad_fn).__name__ in _ELEMENTWISE:
        return result.numel() <= _SMALL
    return last is not None and storage_key(last) == storage_key(result)


def _drop_outputs(frame: ForwardFrame, choice: str, result: Any) -> None:
    """Tag each storage that the step made with who rebuilds it.  One that belongs to an input or a parameter, or that
    a kept internal holds anyway, stays kept."""
    tape, record = frame.tape, frame.record
    seen = set() if frame.held is None else set(frame.held)
    for index, tensor in enumerate((result,) if type(result) is Tensor else tensors_of(result)):
        if tensor.layout is not torch.strided or frame.is_input(tensor) or is_parameter(tensor):
            continue
        storage = tensor.untyped_storage()
        if storage._cdata in seen:
            continue
        seen.add(storage._cdata)
        if choice in TIERS:
            tag = Tag(tape.store(choice, frame.where, tensor), 0, tensor)
        else:
            assert record is not None
            tag = Tag(record, index, tensor)
            record.outputs[index] = meta_of(tensor)
            if record.watch is not None:
                record.watch.returned(index, tensor)
        setattr(storage, MARK, tag)
        tape.dropped = True
        tape.tags.append(weakref.ref(tag))


def _refuse_transforms(where: str, args: tuple[Any, ...]) -> None:
    if _in_transform() is not None:
        raise RuntimeError(
            f"{where}: torch.func transforms (grad, vmap, jvp) cannot see through a replayed step; apply them outside "
            f"the tape, or without a plan"
        )
    if forward_ad._current_level >= 0 and any(
        isinstance(a, Tensor) and forward_ad.unpack_dual(a).tangent is not None for a in args
    ):
        raise RuntimeError(f"{where}: an input carries a forward-mode tangent; forward-mode AD works without a tape")
