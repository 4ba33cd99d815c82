"""Replay: run a dropped step again, in the forward's surroundings, and fill what is wanted of it.

A replay ends at the last tensor that is wanted.  The graph that it builds is thrown away at once; the forward's own
graph is the one that runs.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module

from megackpt.recompute import nested
from megackpt.recompute.batchnorm import Statistics, training_norms
from megackpt.recompute.call import (
    Autocast,
    Reading,
    TwoPhase,
    autocast_as,
    autocast_is_on,
    autocast_state,
    given,
)
from megackpt.recompute.context import state
from megackpt.recompute.demand import resolve
from megackpt.recompute.frame import ForwardFrame
from megackpt.recompute.handle import (
    MARK,
    Box,
    Internal,
    Kept,
    Meta,
    ReplayError,
    is_itself_parameter,
    is_parameter,
    live_tag,
    storage_key,
    version_of,
)
from megackpt.recompute.producer import Producer
from megackpt.recompute.refill import Collector, ReplayFrame, Stop, Unsure
from megackpt.recompute.rng import Snapshot, Source, Sources, positions, put_back
from megackpt.recompute.span import Tail
from megackpt.recompute.watch import Watch

if TYPE_CHECKING:
    from megackpt.recompute.tape import Tape

_NOTHING = nullcontext()
_NONE: Mapping[int, Box] = MappingProxyType({})
_grad_enabled, _set_grad_enabled = torch.is_grad_enabled, torch._C._set_grad_enabled
push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks


class Record(Producer):
    """One dropped step of one forward: its call, and the slots of what autograd saved inside it."""

    __slots__ = (
        "tape", "fn", "args", "spec", "reads", "repeated", "rng", "sources", "modules", "autocast", "masks", "inner",
        "watch", "packs", "slots", "outputs", "lasting", "differentiates", "ends_here", "tail",
        "runs_out", "closer", "launched",
    )  # fmt: skip

    def __init__(self, tape: Tape, where: str, fn: Callable[..., Any], masks: str, inner: int) -> None:
        self.where = where
        self.lane = None
        self.cells = None
        self.tape = tape
        self.fn = fn
        self.args: list[Any] = []  # tensors as Kept or Reading
        self.spec: nested.Spec | None = None  # how to nest them, if they were
        self.reads: list[Reading] = []  # the arguments that were dropped
        self.repeated = False  # one argument stands in several places
        self.rng: Snapshot | None = None  # state before the step, if the step may have drawn
        self.sources: Sources | None = None  # random ones among the arguments, and where they stood
        self.modules: tuple[Module, ...] = ()  # those among the arguments
        self.autocast: Autocast | None = autocast_state() if autocast_is_on() else None
        self.masks = masks
        self.inner = inner  # how steps inside this one behave in its replay, see context.py
        self.watch: Watch | None = None
        self.packs = 0
        self.slots: list[weakref.ref[Internal]] = []
        self.outputs: dict[int, Meta] = {}  # of the dropped ones
        self.lasting = not tape.clear_after_backward
        self.differentiates = False  # the step takes gradients itself, so its replay needs a graph that works
        # The last tensor saved is an internal, and after it comes nothing whose skipping is worth an exception.
        self.ends_here = False
        self.tail: Tail | None = None
        self.runs_out = False  # nothing is spared by an end before its own, or before its tail
        self.closer = False  # its replay must be looked at closely: by a watch, or for versions that may differ
        self.launched: Any = None  # what a two-phase step that was asked ahead needs to finish

    def hold(self, leaves: Sequence[Any], spec: nested.Spec | None, frame: ForwardFrame) -> None:
        """Remember the arguments, as `call.flatten` gives them, and let the frame of the forward know them."""
        outer, where, counts = frame.outer, self.where, self.tape.counts
        arguments: dict[int, Kept | Reading] = {}
        storages: set[int] = set()
        frame.record, frame.arguments, frame.input_storages = self, arguments, storages
        args = self.args
        self.spec = spec
        for leaf in leaves:
            if type(leaf) is not Tensor and not isinstance(leaf, Tensor):
                args.append(leaf)
                if isinstance(leaf, Module):
                    self.modules = (*self.modules, leaf)
                elif isinstance(leaf, Source):
                    self.sources = (*(self.sources or ()), *positions((leaf,)))
                continue
            storage = leaf.untyped_storage() if leaf.layout is torch.strided else None
            storages.add(storage_key(leaf) if storage is None else storage._cdata)
            if type(leaf) is not Tensor and is_itself_parameter(leaf):
                args.append(leaf)
                continue
            tag = live_tag(leaf) if storage is not None and hasattr(storage, MARK) else None
            if tag is not None:
                reading = Reading(leaf, tag)
                args.append(reading)
                self.reads.append(reading)
                arguments[id(leaf)] = reading
                continue
            kept = Kept(leaf, where, outer)
            kept.needs_grad = leaf.requires_grad
            args.append(kept)
            if outer is None:  # else each handle may be unpacked once
                arguments[id(leaf)] = kept
            if counts:
                kept.of_parameter = is_parameter(leaf)
                if not kept.of_parameter:
                    self.tape.note_argument(kept, where)
        if len(args) > 1:
            self._note_repeated(leaves)

    def _note_repeated(self, leaves: Sequence[Any]) -> None:
        first: dict[int, int] = {}
        for place, leaf in enumerate(leaves):
            if (type(self.args[place]) is Kept or type(self.args[place]) is Reading) and (
                first.setdefault(id(leaf), place) != place
            ):
                self.args[place] = self.args[first[id(leaf)]]
                self.repeated = True

    def check_arguments_unchanged(self, leaves: Sequence[Any]) -> None:
        """Refuse a step that wrote into its own input: its replay would start from the changed one, or change what
        others rebuilt."""
        for a, leaf in zip(self.args, leaves):  # noqa: B905 (as many, and this runs in every step)
            if type(a) is Kept or type(a) is Reading:
                now = a.held._version if type(a) is Kept and a.outer is None and a.version >= 0 else version_of(leaf)
                if now != a.version:
                    raise RuntimeError(
                        f"{self.where} modified its own input in place; a replayed step must leave its inputs alone: "
                        f"use the out-of-place operation"
                    )

    def missing(self) -> Sequence[Producer]:
        if not self.reads:
            return ()
        return [p for a in self.reads if (p := a.missing()) is not None]

    def wanted(self) -> bool:
        for ref in self.slots:
            if (h := ref()) is not None and h.value is None:
                return True
        return self.cells is not None and super().wanted()

    def wanted_slots(self) -> dict[int, Internal]:
        return {h.number: h for ref in self.slots if (h := ref()) is not None and h.value is None}

    def clear(self) -> None:
        super().clear()
        for slot in self.slots:
            if (h := slot()) is not None:
                h.value = None

    @property
    def begins(self) -> bool:
        return isinstance(self.fn, TwoPhase)

    def ahead(self) -> None:
        """Launch a two-phase step whose inputs are there and whose result will be asked for."""
        if self.launched is None and isinstance(self.fn, TwoPhase) and not self.missing() and self.wanted():
            with _NOTHING if self.lane is None else self.lane:
                args, _ = given(self.args, self.spec, self.repeated)
                self.launched = (self.fn.launch(*args),)

    def rebuild(self) -> None:
        """Run the step once more."""
        note = self.tape.on_replay
        start = 0.0 if note is None else time.time()
        try:
            self._run()
        except (_GraphWanted, Unsure) as closer:
            self.differentiates, self.closer, self.ends_here = isinstance(closer, _GraphWanted), True, False
            try:
                self._run()
            except _GraphWanted:
                raise ReplayError(f"{self.where}: {_FOREIGN_GRAPH}") from None
        for a in self.reads:  # rebuilt arguments live on only if someone else saved them
            a.box = None
        if note is not None:
            note(self.where, start, time.time())

    def _run(self) -> None:
        """Everything ambient is put back even when it fails: grad mode, hooks, random streams, replay context,
        running statistics."""
        tape, watch, slots = self.tape, self.watch, self.wanted_slots()
        fn: Any = self.fn
        frame: ReplayFrame | Collector
        tail: Tail | None = None
        boxes = _NONE if self.cells is None else self.wanted_boxes()
        if not self.closer and (boxes or self.runs_out) and len(slots) == len(self.slots):
            frame, tail = Collector(self), None if boxes else self.tail
            hook: Callable[[Tensor], Any] = frame.saved.append
        else:
            frame = ReplayFrame(self, slots, boxes)
            hook = frame.pack
        args, kwargs = given(self.args, self.spec, self.repeated)
        norms = training_norms(fn, self.modules)
        if tail is not None:
            fn = partial(fn.before, tail.where)
        if self.launched is not None:
            assert isinstance(fn, TwoPhase)
            fn, args, kwargs, self.launched = fn.finish, self.launched, {}, None
        statistics = Statistics(norms) if norms else None
        random = None if self.rng is None and self.sources is None else self._random_now()
        now, grad = state.now, _grad_enabled()
        ambient = now.tape, now.frame, now.masks, now.inner
        push_hooks(hook, resolve if self.differentiates else _no_unpack)  # first: it fails where hooks are forbidden
        now.tape, now.frame, now.masks, now.inner = tape, frame, self.masks, self.inner
        _set_grad_enabled(True)
        try:
            if random is not None:
                self._put_random(self.rng, self.sources)
            if watch is None and self.autocast is None and not autocast_is_on():
                result = fn(*args, **kwargs)
            else:
                with autocast_as(self.autocast or []):
                    result = fn(*args, **kwargs) if watch is None else watch.replay(fn, args, kwargs)
            if isinstance(frame, Collector):
                frame.finish(slots, boxes, tail, result)
            elif frame.boxes or (frame.count != self.packs and not frame.stopped):  # a step may swallow a Stop
                frame.finish(result)
            if watch is not None:
                watch.settle()
        except (Stop, Exception) as end:
            if not frame.stopped:  # TorchScript makes something else of a Stop
                raise self._failure(frame.where, end) from (end.__cause__ if isinstance(end, ReplayError) else end)
            if watch is not None:
                watch.settle()
        finally:
            pop_hooks()
            if isinstance(frame, Collector):
                frame.saved.clear()  # autograd holds the list as its hook, the list what autograd made
            _set_grad_enabled(grad)
            now.tape, now.frame, now.masks, now.inner = ambient
            if random is not None:
                self._put_random(*random)
            if statistics is not None:
                statistics.restore()
            if tape.tags:
                tape.cut()  # inner steps tagged what this replay made

    def _random_now(self) -> tuple[Snapshot | None, Sources | None]:
        ledger = None if self.rng is None else self.tape.ledger.snapshot()
        return ledger, None if self.sources is None else positions([source for source, _ in self.sources])

    def _put_random(self, ledger: Snapshot | None, sources: Sources | None) -> None:
        if ledger is not None:
            self.tape.ledger.restore(ledger)
        if sources is not None:
            put_back(sources)

    def _failure(self, where: str, error: BaseException) -> ReplayError:
        # Made here and not in `_run`: a traceback holds its frames, so a local name for it there would be a cycle.
        failure = error
        if not isinstance(failure, ReplayError):
            failure = ReplayError(f"replay of {where} failed: {type(error).__name__}: {error}")
        return failure if self.watch is None else self.watch.explain(failure)


_FOREIGN_GRAPH = "backward was called on a graph built by an earlier replay"


class _GraphWanted(BaseException):
    """The step takes a gradient inside itself, on the graph of its replay."""


def _no_unpack(_: Any) -> Tensor:
    frame = state.now.frame
    if frame is None or not frame.replaying:
        raise ReplayError(_FOREIGN_GRAPH)
    raise _GraphWanted
