"""What takes the tensors that autograd saves while a step runs again: the wanted ones go into their slots."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megackpt.recompute.call import tensors_of
from megackpt.recompute.handle import Box, Internal, Kept, Meta, ReplayError, View, is_parameter, meta_of
from megackpt.recompute.span import Span, Tail

if TYPE_CHECKING:
    from megackpt.recompute.replay import Record

_NEVER = sys.maxsize


class Stop(BaseException):
    """Everything wanted is there.  A BaseException, so that a step that catches Exception cannot swallow it."""


class Unsure(BaseException):
    """The replay must be run again, and looked at more closely."""


class Collector:
    """A replay that runs to its end, with all that it saves wanted: what autograd saves is collected by the list's own
    append, a hook without a Python frame, and put into its slots at the end.

    So it sees no version until then.  One that is not the forward's means that the step wrote into what it had saved,
    or that a dispatch mode was on, under which collectives move no version: :class:`ReplayFrame` can tell."""

    __slots__ = ("record", "where", "saved")
    replaying = True
    stopped = False

    def __init__(self, record: Record) -> None:
        self.record = record
        self.where = record.where  # in a span, that of the step which runs
        self.saved: list[Any] = []

    def enter(self, where: str, given: Tensor | None) -> None:
        self.where = where

    def still_wanted(self, packs: int) -> bool:
        return True

    def fill(self, tensor: Tensor, handle: Kept | Internal | View) -> None:
        """An inner step saved a tensor and made a handle of it."""
        self.saved.append(handle)

    def finish(self, slots: dict[int, Internal], boxes: Mapping[int, Box], tail: Tail | None, result: Any) -> None:
        """The step has run to its end, or to its tail, which is given the ``result``."""
        saved, record = self.saved, self.record
        if len(saved) != (record.packs if tail is None else tail.start):
            raise _miscounted(record, len(saved))
        for number, slot in slots.items():
            value = result if tail is not None and number >= tail.start else saved[number]
            if isinstance(value, Tensor):
                if (value.shape, value.dtype, value.device) != slot.meta:
                    raise _unlike(slot.where, "saved tensor", number, meta_of(value), slot.meta)
                if is_parameter(value):
                    raise _replaced(slot.where, number)
                if value._version != slot.version:
                    raise Unsure
                value = value.detach()  # without the graph that this replay builds
            slot.value = value
        if boxes:
            _fill_boxes(record, boxes, result)


class ReplayFrame:
    """A replay that may end early.  Numbers the tensors saved; its method `pack` is autograd's hook."""

    __slots__ = ("record", "where", "count", "slots", "last", "boxes", "stop_at", "watched", "differentiates")
    replaying = True

    def __init__(self, record: Record, slots: dict[int, Internal], boxes: Mapping[int, Box]) -> None:
        self.record = record
        self.where = record.where  # in a span, that of the step which runs
        self.count = 0
        self.slots = slots
        self.boxes = boxes
        self.watched = record.watch is not None
        self.differentiates = record.differentiates
        self.last = last = next(reversed(slots)) if slots else -1  # they are in order
        self.stop_at = last + 1
        if self.boxes or (record.ends_here and last + 1 == record.packs):
            self.stop_at = _NEVER
        elif record.watch is not None and not record.watch.early_stop:
            self.last = self.stop_at = _NEVER

    def enter(self, where: str, given: Tensor | None) -> None:
        self.where = where

    @property
    def stopped(self) -> bool:
        """Whether it has ended early, whatever the step made of that."""
        return self.count >= self.stop_at

    def still_wanted(self, packs: int) -> bool:
        return bool(self.boxes) or self.last >= self.count + packs

    def pack(self, tensor: Tensor) -> Kept | None:
        count = self.count
        slot = self.slots.get(count)
        if slot is not None:
            if self.watched or (tensor.shape, tensor.dtype, tensor.device) != slot.meta:
                self.check("saved tensor", count, tensor, slot.meta)
            if is_parameter(tensor):
                raise _replaced(self.where, count)
            slot.version = tensor._version
            slot.value = tensor.detach()  # without the graph that this replay builds
        self.count = count = count + 1
        if count >= self.stop_at:
            raise Stop
        return Kept(tensor, self.where) if self.differentiates else None

    def fill(self, tensor: Tensor, handle: Kept | Internal | View) -> None:
        """An inner step saved a tensor and made a handle of it."""
        slot = self.slots.get(self.count)
        if slot is not None:
            self.check("saved tensor", self.count, tensor, slot.meta)
            slot.value = handle
        self.count += 1
        if self.count >= self.stop_at:
            raise Stop

    def finish(self, result: Any) -> None:
        """The step has run to its end."""
        record = self.record
        if self.count != record.packs:
            raise _miscounted(record, self.count)
        if self.boxes:
            _fill_boxes(record, self.boxes, result)

    def check(self, what: str, number: int, tensor: Tensor, then: Meta) -> None:
        """Raises ReplayError if the tensor cannot stand for the one that the forward had."""
        _check(self.record, self.where, what, number, tensor, then)


def _fill_boxes(record: Record, boxes: Mapping[int, Box], result: Any) -> None:
    """The dropped outputs of a step that has run to its end."""
    outputs = tensors_of(result)
    for index, box in boxes.items():
        if index >= len(outputs):
            raise ReplayError(f"replay of {record.where} returned {len(outputs)} tensors, its forward more")
        _check(record, record.where, "output", index, outputs[index], record.outputs[index])
        box.value = outputs[index].detach()


def _check(record: Record, where: str, what: str, number: int, tensor: Tensor, then: Meta) -> None:
    now, watch = meta_of(tensor), record.watch
    if not (now == then if watch is None else watch.rebuilt(what, number, tensor, now, then)):
        raise _unlike(where, what, number, now, then)


def _miscounted(record: Record, count: int) -> ReplayError:
    fn, whole = record.fn, record.where
    if type(fn) is Span:
        whole = f"{whole} to {fn.wheres[-1].rpartition(' ')[2]}"
    return ReplayError(
        f"replay of {whole} saved {count} tensors for backward, its forward {record.packs}: the step is not a pure "
        f"function of its arguments"
    )


def _replaced(where: str, number: int) -> ReplayError:
    """The forward keeps every parameter, so what a slot waits for was none."""
    return ReplayError(
        f"replay of {where}: saved tensor {number} is a parameter, in forward it was a tensor in its place "
        f"(functional_call?), which is gone now: give such tensors as arguments, as in "
        f"checkpoint(torch.func.functional_call, module, parameters, args)"
    )


def _unlike(where: str, what: str, number: int, now: Meta, then: Meta) -> ReplayError:
    return ReplayError(f"replay of {where}: {what} {number} has {_words(now)}, in forward it had {_words(then)}")


def _words(meta: Meta) -> str:
    return f"shape {tuple(meta[0])}, {meta[1]}, {meta[2]}"
