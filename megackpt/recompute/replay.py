"""Replay: run a record's step again, in the forward's surroundings, and fill what is wanted of it.

Only what is needed runs, once, in order: a handle demands its record, the record's missing inputs demand theirs
(by a work list; a chain of hundreds of dropped steps must not overflow the stack), and a replay ends at the last
tensor that is wanted.  The graph that a replay builds is thrown away at once; the forward's own graph is the one
that runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megackpt.recompute.context import state
from megackpt.recompute.handle import Internal, Kept, ReplayError, View
from megackpt.recompute.record import Record, tensors_of

push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks


class _Stop(BaseException):
    """Everything wanted is there.  A BaseException, so that a step that catches Exception cannot swallow it."""


class ReplayFrame:
    """Numbers the tensors saved during a replay and puts the wanted ones into their slots."""

    __slots__ = ("record", "count", "slots", "last", "boxes")
    replaying = True

    def __init__(self, record: Record) -> None:
        self.record = record
        self.count = 0
        self.slots = record.wanted_slots()
        self.last = max(self.slots, default=-1)
        self.boxes = record.wanted_boxes()

    def still_wanted(self, packs: int) -> bool:
        return bool(self.boxes) or self.last >= self.count + packs

    def pack(self, tensor: Tensor) -> None:
        self.fill(tensor, None)

    def fill(self, tensor: Tensor, handle: Kept | Internal | View | None) -> None:
        """Number one saved tensor; ``handle`` is what an inner step made of it, if one did."""
        slot = self.slots.get(self.count)
        if slot is not None:
            meta = (tensor.shape, tensor.dtype, tensor.device)
            if meta != slot.meta:
                raise ReplayError(
                    f"replay of {self.record.where}: saved tensor {self.count} has {_words(meta)}, "
                    f"in forward it had {_words(slot.meta)}"
                )
            slot.value = handle if handle is not None else Kept(tensor, self.record.where)
        self.count += 1
        if not self.boxes and self.count > self.last:
            raise _Stop

    def finish(self, result: Any) -> None:
        if self.count != self.record.packs:
            raise ReplayError(
                f"replay of {self.record.where} saved {self.count} tensors for backward, its forward "
                f"{self.record.packs}: the step is not a pure function of its arguments"
            )
        if self.boxes:
            for index, tensor in enumerate(tensors_of(result)):
                if (box := self.boxes.get(index)) is not None:
                    box.value = tensor.detach()


def _words(meta: tuple) -> str:
    return f"shape {tuple(meta[0])}, {meta[1]}, {meta[2]}"


def _no_unpack(_: Any) -> Tensor:
    raise ReplayError("backward was called on a graph built by a replay")


def run_again(record: Record) -> None:
    """Replay ``record`` once: fill every slot and box of it that is alive.  Its inputs must be there.

    Everything ambient is put back even when the step fails: grad mode, hooks, random streams, replay context.
    """
    frame = ReplayFrame(record)
    args, kwargs = record.arguments()
    ledger = record.tape.ledger
    before = ledger.snapshot() if record.rng is not None else None
    grad, ambient = torch.is_grad_enabled(), state.read()
    state.write((record.tape, frame, record.masks, record.inner))
    torch._C._set_grad_enabled(True)
    push_hooks(frame.pack, _no_unpack)
    try:
        if record.rng is not None:
            ledger.restore(record.rng)
        with _autocast(record.autocast):
            frame.finish(record.fn(*args, **kwargs))
    except _Stop:
        pass
    except ReplayError:
        raise
    except Exception as error:
        raise ReplayError(f"replay of {record.where} failed: {type(error).__name__}: {error}") from error
    finally:
        pop_hooks()
        torch._C._set_grad_enabled(grad)
        state.write(ambient)
        if before is not None:
            ledger.restore(before)
    record.release_inputs()
    if record.tape.clear_after_backward:
        _clear_when_backward_ends(record)


def _clear_when_backward_ends(record: Record) -> None:
    """What a backward rebuilt and did not release (retain_graph) goes when that backward ends.  The engine's
    callbacks are keyed by the graph task, since a backward that raised never runs its own."""
    task = torch._C._current_graph_task_id()
    if task < 0:
        return
    if state.clear_task != task:
        state.clear_task, state.to_clear = task, []
        torch.autograd.Variable._execution_engine.queue_callback(_Clear(state.to_clear))
    state.to_clear.append(weakref.ref(record))


class _Clear:
    __slots__ = ("records",)

    def __init__(self, records: list[weakref.ref[Record]]) -> None:
        self.records = records

    def __call__(self) -> None:
        for ref in self.records:
            if (record := ref()) is not None:
                record.clear()
        self.records.clear()


def demand(record: Record) -> None:
    """Replay ``record`` after whatever it reads that is missing."""
    work = [record]
    while work:
        current = work[-1]
        missing = [r for a in current.inputs() if (r := a.missing()) is not None]
        if missing:
            work += missing
            continue
        work.pop()
        if current.wanted_slots() or current.wanted_boxes():  # two readers may have asked for it
            run_again(current)


def resolve(handle: Kept | Internal | View) -> Tensor:
    """The tensor behind a handle, replaying what is needed: autograd's unpack hook."""
    while True:
        if type(handle) is Kept:
            return handle.get()
        if type(handle) is View:
            if handle.box.value is None:
                demand(handle.box.cell.record)
            assert handle.box.value is not None
            return handle.over(handle.box.value)
        assert type(handle) is Internal
        if handle.value is None:
            demand(handle.record)
        if handle.value is None:
            raise ReplayError(f"replay of {handle.record.where} did not save the tensor that backward asks for")
        handle = handle.value


def autocast_state() -> list[tuple[str, torch.dtype]]:
    """Devices on which autocast is on now, with its type."""
    return [(d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]


@contextmanager
def _autocast(wanted: list[tuple[str, torch.dtype]]) -> Iterator[None]:
    """The forward's autocast state, weight cache off; nothing at all when autocast is off then and now."""
    now = autocast_state()
    contexts = []
    for device in dict.fromkeys(d for d, _ in (*now, *wanted)):
        dtype = dict(wanted).get(device)
        contexts.append(torch.autocast(device, dtype=dtype, enabled=dtype is not None, cache_enabled=False))
    for context in contexts:
        context.__enter__()
    try:
        yield
    finally:
        for context in reversed(contexts):
            context.__exit__(None, None, None)
