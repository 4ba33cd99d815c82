"""Autograd asks for a tensor: find it, and have whatever is missing on the way rebuilt.

Only what is needed runs, once, in order: a handle demands its producer, whose missing inputs demand theirs, by a work
list, since a chain of hundreds of dropped steps must not overflow the stack.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from megackpt.recompute.context import state
from megackpt.recompute.handle import Internal, Kept, ReplayError, View, changed, live_tag, seen_as
from megackpt.recompute.producer import Producer

_task_of_this_backward = torch._C._current_graph_task_id


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
        _rebuild(current)


def _rebuild(producer: Producer) -> None:
    if producer.lane is None:
        producer.rebuild()
    else:
        with producer.lane:
            producer.rebuild()
    task = _task_of_this_backward()
    if task < 0 or producer.lasting:
        return
    # What a backward rebuilt and did not release (retain_graph) goes when that backward ends.  The engine's callbacks
    # are keyed by the graph task, since a backward that raised never runs its own.
    now = state.now
    if now.clear_task != task:
        now.clear_task, now.to_clear = task, []
        torch.autograd.Variable._execution_engine.queue_callback(_Clear(now.to_clear))
    now.to_clear.append(weakref.ref(producer))


class _Clear:
    __slots__ = ("producers",)

    def __init__(self, producers: list[weakref.ref[Producer]]) -> None:
        self.producers = producers

    def __call__(self) -> None:
        for ref in self.producers:
            if (producer := ref()) is not None:
                producer.clear()
        self.producers.clear()


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
    while type(handle) is Internal:
        record = handle.record
        if handle.value is None:
            missing = record.missing() if record.reads else ()
            if len(missing) == 1 and not missing[0].missing():  # mostly: no list of work for that
                _rebuild(missing[0])
                missing = ()
            if missing:
                demand(record)
            else:
                _rebuild(record)
        value = handle.value
        lane = record.lane
        if isinstance(value, Tensor):
            if value._version != handle.version:
                raise changed(value, handle.version, handle.where)
            if lane is not None:
                lane.join(value)
            return value
        if value is None:
            raise ReplayError(f"replay of {record.where} did not save the tensor that backward asks for")
        handle = value
    if type(handle) is Kept:
        tensor = handle.get()
        if lane is not None:
            lane.join(tensor)
        return tensor
    assert type(handle) is View
    box = handle.box
    if box.value is None:
        demand(box.cell.producer)
    base = box.value
    assert base is not None
    lane = box.cell.producer.lane
    if lane is not None:
        lane.join(base)
    return seen_as(base, handle.geometry)
