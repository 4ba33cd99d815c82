"""Replay: run a dropped step again, in the forward's surroundings, and fill what is wanted of it.

Only what is needed runs, once, in order: a handle demands its producer, whose missing inputs demand theirs (by a work
list; a chain of hundreds of dropped steps must not overflow the stack), and a replay ends at the last tensor that is
wanted.  The graph that a replay builds is thrown away at once; the forward's own graph is the one that runs.
"""

from __future__ import annotations

import sys
import time
import weakref
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megackpt.recompute.batchnorm import Statistics, training_norms
from megackpt.recompute.call import StepCall, TwoPhase, autocast_as, tensors_of
from megackpt.recompute.context import pack, state
from megackpt.recompute.handle import Internal, Kept, Meta, ReplayError, View, live_tag, meta_of
from megackpt.recompute.producer import Producer
from megackpt.recompute.span import Span
from megackpt.recompute.watch import Watch

if TYPE_CHECKING:
    from megackpt.recompute.tape import Tape

_NOTHING = nullcontext()
push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks


class Record(Producer):
    """One dropped step of one forward: its call, and the slots of what autograd saved inside it."""

    __slots__ = ("tape", "call", "packs", "slots", "outputs", "watch", "differentiates", "ends_here", "launched")

    def __init__(self, tape: Tape, call: StepCall, watch: Watch | None = None) -> None:
        self.where = call.where
        self.lane = None
        self.cells = {}
        self.tape = tape
        self.watch = watch
        self.differentiates = False  # the step takes gradients itself, so its replay needs a graph that works
        self.call = call
        self.packs = 0
        self.launched: Any = None  # what a two-phase step that was asked ahead needs to finish
        self.ends_here = False  # after the last tensor saved there is nothing whose skipping is worth an exception
        self.slots: dict[int, weakref.ref[Internal]] = {}
        self.outputs: dict[int, Meta] = {}  # of the dropped ones

    def missing(self) -> list[Producer]:
        return [p for a in self.call.inputs if a.kept is None and (p := a.missing()) is not None]

    def wanted(self) -> bool:
        for ref in self.slots.values():
            if (h := ref()) is not None and h.value is None:
                return True
        return super().wanted()

    def wanted_slots(self) -> dict[int, Internal]:
        return {i: h for i, ref in self.slots.items() if (h := ref()) is not None and h.value is None}

    def clear(self) -> None:
        super().clear()
        for slot in self.slots.values():
            if (h := slot()) is not None:
                h.value = None

    @property
    def begins(self) -> bool:
        return isinstance(self.call.fn, TwoPhase)

    def ahead(self) -> None:
        """Launch a two-phase step whose inputs are there and whose result will be asked for."""
        if self.launched is None and isinstance(self.call.fn, TwoPhase) and not self.missing() and self.wanted():
            with _NOTHING if self.lane is None else self.lane:
                args, _ = self.call.arguments()
                self.launched = (self.call.fn.launch(*args),)

    def rebuild(self) -> None:
        """Run the step once more."""
        note = self.tape.on_replay
        if note is None:
            self._rebuild()
            return
        start = time.time()
        self._rebuild()
        note(self.where, start, time.time())

    def _rebuild(self) -> None:
        try:
            self._run()
        except _GraphWanted:
            self.differentiates = True
            try:
                self._run()
            except _GraphWanted:
                raise ReplayError(f"{self.where}: {_FOREIGN_GRAPH}") from None
        self.call.release()

    def _run(self) -> None:
        """Everything ambient is put back even when it fails: grad mode, hooks, random streams, replay context,
        running statistics."""
        frame, call, ledger, watch = ReplayFrame(self), self.call, self.tape.ledger, self.watch
        fn, (args, kwargs) = call.fn, call.arguments()
        if self.launched is not None:
            assert isinstance(fn, TwoPhase)
            fn, args, kwargs, self.launched = fn.finish, self.launched, {}, None
        norms = training_norms(call.fn)
        statistics = Statistics(norms) if norms else None
        before = ledger.snapshot() if call.rng is not None else None
        grad, ambient = torch.is_grad_enabled(), state.read()
        state.write((self.tape, frame, call.masks, call.inner))
        torch._C._set_grad_enabled(True)
        push_hooks(pack, resolve if self.differentiates else _no_unpack)
        try:
            if call.rng is not None:
                ledger.restore(call.rng)
            if watch is None and not call.autocast and not torch._C._is_any_autocast_enabled():
                frame.finish(fn(*args, **kwargs))
            else:
                with autocast_as(call.autocast):
                    frame.finish(fn(*args, **kwargs) if watch is None else watch.replay(fn, args, kwargs))
                if watch is not None:
                    watch.settle()
        except _Stop:
            if watch is not None:
                watch.settle()
        except ReplayError as error:
            if watch is None:
                raise
            raise watch.explain(error) from error.__cause__
        except Exception as error:
            raise self._failure(frame.where, error) from error
        finally:
            pop_hooks()
            torch._C._set_grad_enabled(grad)
            state.write(ambient)
            if before is not None:
                ledger.restore(before)
            if statistics is not None:
                statistics.restore()
            self.tape.cut()  # inner steps tagged what this replay made

    def _failure(self, where: str, error: Exception) -> ReplayError:
        # Made here and not in `_run`: a traceback holds its frames, so a local name for it there would be a cycle.
        failure = ReplayError(f"replay of {where} failed: {type(error).__name__}: {error}")
        return failure if self.watch is None else self.watch.explain(failure)


_FOREIGN_GRAPH = "backward was called on a graph built by an earlier replay"


class _Stop(BaseException):
    """Everything wanted is there.  A BaseException, so that a step that catches Exception cannot swallow it."""


class _GraphWanted(BaseException):
    """The step takes a gradient inside itself, on the graph of its replay."""


class ReplayFrame:
    """Numbers the tensors saved during a replay and puts the wanted ones into their slots."""

    __slots__ = ("record", "where", "count", "slots", "last", "boxes", "complete", "watched", "differentiates")
    replaying = True

    def __init__(self, record: Record) -> None:
        self.record = record
        self.where = record.where  # in a span, that of the step which runs
        self.count = 0
        self.slots = slots = record.wanted_slots()
        self.last = next(reversed(slots)) if slots else -1  # they are in order
        self.boxes = record.wanted_boxes() if record.cells else {}
        self.complete = record.packs if record.ends_here else -1
        self.watched = record.watch is not None
        self.differentiates = record.differentiates
        if record.watch is not None and not record.watch.early_stop:
            self.last = sys.maxsize

    def still_wanted(self, packs: int) -> bool:
        return bool(self.boxes) or self.last >= self.count + packs

    def pack(self, tensor: Tensor) -> Kept | None:
        self.fill(tensor, None)
        return Kept(tensor, self.where) if self.differentiates else None

    def fill(self, tensor: Tensor, handle: Kept | Internal | View | None) -> None:
        """Number one saved tensor; ``handle`` is what an inner step made of it, if one did."""
        count = self.count
        slot = self.slots.get(count)
        if slot is not None:
            if self.watched or (tensor.shape, tensor.dtype, tensor.device) != slot.meta:
                self._check("saved tensor", count, tensor, slot.meta)
            slot.value = Kept(tensor, self.where) if handle is None else handle
        self.count = count = count + 1
        if count > self.last and not self.boxes and count != self.complete:
            raise _Stop

    def finish(self, result: Any) -> None:
        if self.count != self.record.packs:
            raise ReplayError(
                f"replay of {self._whole()} saved {self.count} tensors for backward, its forward "
                f"{self.record.packs}: the step is not a pure function of its arguments"
            )
        if not self.boxes:
            return
        outputs = tensors_of(result)
        for index, box in self.boxes.items():
            if index >= len(outputs):
                raise ReplayError(f"replay of {self.record.where} returned {len(outputs)} tensors, its forward more")
            self._check("output", index, outputs[index], self.record.outputs[index])
            box.value = outputs[index].detach()

    def _check(self, what: str, number: int, tensor: Tensor, then: Meta) -> None:
        now, watch = meta_of(tensor), self.record.watch
        if now == then if watch is None else watch.rebuilt(what, number, tensor, now, then):
            return
        raise ReplayError(
            f"replay of {self.where}: {what} {number} has {_words(now)}, in forward it had {_words(then)}"
        )

    def _whole(self) -> str:
        fn = self.record.call.fn
        return f"{self.record.where} to {fn.wheres[-1].rpartition(' ')[2]}" if type(fn) is Span else self.record.where


def _words(meta: Meta) -> str:
    return f"shape {tuple(meta[0])}, {meta[1]}, {meta[2]}"


def _no_unpack(_: Any) -> Tensor:
    if state.frame is None or not state.frame.replaying:
        raise ReplayError(_FOREIGN_GRAPH)
    raise _GraphWanted


def demand(producer: Producer) -> None:
    """Rebuild ``producer`` after whatever it reads that is missing."""
    work = [producer]
    while work:
        current = work[-1]
        if not current.wanted():  # two readers asked for it; what it reads may be gone again, and is not needed
            work.pop()
            continue
        missing = current.missing()
        if missing:
            work += missing
            continue
        work.pop()
        if current.lane is None:
            current.rebuild()
        else:
            with current.lane:
                current.rebuild()
        _clear_when_backward_ends(current)


class Prefetch:
    """Asks ahead for a tensor that a backward will want soon: if it was dropped, and a step of two phases makes it
    again, what that step reads is rebuilt and its first phase begun."""

    __slots__ = ("_producer",)

    def __init__(self, tensor: Tensor) -> None:
        tag = live_tag(tensor)
        self._producer = None if tag is None or tag.producer is None else weakref.ref(tag.producer)

    def __call__(self) -> None:
        producer = self._producer() if self._producer is not None else None
        if producer is None or not producer.begins or not producer.wanted():
            return
        for missing in producer.missing():
            demand(missing)
        producer.ahead()


def resolve(handle: Kept | Internal | View) -> Tensor:
    """The tensor behind a handle, rebuilding what is needed: autograd's unpack hook."""
    lane = None
    while True:
        if type(handle) is Kept:
            tensor = handle.get()
            if lane is not None:
                lane.join(tensor)
            return tensor
        if type(handle) is View:
            if handle.box.value is None:
                demand(handle.box.cell.producer)
            base = handle.box.value
            assert base is not None
            lane = handle.box.cell.producer.lane
            if lane is not None:
                lane.join(base)
            return handle.over(base)
        assert type(handle) is Internal
        if handle.value is None:
            demand(handle.record)
        if handle.value is None:
            raise ReplayError(f"replay of {handle.record.where} did not save the tensor that backward asks for")
        lane = handle.record.lane
        handle = handle.value


def _clear_when_backward_ends(producer: Producer) -> None:
    """What a backward rebuilt and did not release (retain_graph) goes when that backward ends.  The engine's
    callbacks are keyed by the graph task, since a backward that raised never runs its own."""
    task = torch._C._current_graph_task_id()
    if task < 0 or (isinstance(producer, Record) and not producer.tape.clear_after_backward):
        return
    if state.clear_task != task:
        state.clear_task, state.to_clear = task, []
        torch.autograd.Variable._execution_engine.queue_callback(_Clear(state.to_clear))
    state.to_clear.append(weakref.ref(producer))


class _Clear:
    __slots__ = ("producers",)

    def __init__(self, producers: list[weakref.ref[Producer]]) -> None:
        self.producers = producers

    def __call__(self) -> None:
        for ref in self.producers:
            if (producer := ref()) is not None:
                producer.clear()
        self.producers.clear()
