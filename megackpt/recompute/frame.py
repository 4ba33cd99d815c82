"""What takes the tensors that autograd saves while a step's forward runs, and puts a handle in the place of each."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence, Set
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from megackpt.plan import KEEP, REPLAY, Decision
from megackpt.recompute.call import Reading
from megackpt.recompute.context import Ambient
from megackpt.recompute.handle import (
    MARK,
    Internal,
    Kept,
    Tag,
    View,
    geometry_of,
    is_mask,
    is_parameter,
    live_tag,
    storage_key,
    version_of,
)
from megackpt.recompute.span import Tail

if TYPE_CHECKING:
    from megackpt.recompute.replay import Record
    from megackpt.recompute.tape import Tape

Handle = Kept | Internal | View
_UNKNOWN: frozenset[int] = frozenset()  # stands for a set that is made when first asked for
_NONE: Mapping[int, Kept | Reading] = MappingProxyType({})


class _Stored(NamedTuple):
    """An internal that waits in a tier."""

    storage: weakref.ref[torch.UntypedStorage]
    root: weakref.ref[Tensor]  # it, or what it is a view of
    tag: Tag


class ForwardFrame:
    """One step's forward; its method `pack` is autograd's hook.  This is the hottest code of the engine: it runs for
    every tensor that autograd saves, so what is rarely needed is made when first needed.

    Autograd holds a pack hook as long as what was packed, and so this frame: :meth:`close` cuts it loose from all that
    it knows of its step.
    """

    __slots__ = (
        "tape", "where", "decision", "record", "count", "parent", "outer", "inputs", "input_storages", "arguments",
        "last", "held", "stored", "drops", "given", "given_version", "start", "tail",
    )  # fmt: skip

    def __init__(self, tape: Tape, where: str, decision: Decision, inputs: Sequence[Any], now: Ambient) -> None:
        self.tape: Tape = tape
        self.where = where
        self.decision = decision
        self.record: Record | None = None  # of a dropped step, which rebuilds what the decision says
        self.drops: Record | None = None  # the same, if that is all, with nobody looking on
        self.count = 0
        self.inputs = inputs
        self.input_storages: Set[int] = _UNKNOWN
        self.arguments: Mapping[int, Kept | Reading] = _NONE  # by identity of the tensor, of a dropped step
        self.last: Tensor | None = None  # saved
        self.held: set[int] | None = None  # storages that stay on the device for a kept internal
        self.stored: dict[tuple[int, ...], _Stored] | None = None  # internals that wait in a tier
        self.start = -1  # in a span, how much was saved before the step that runs
        self.given: Tensor | None = None  # to that step
        self.tail: Tail | None = None
        parent = now.frame
        if parent is not None and parent.replaying:
            self.parent, self.outer = parent, None  # what a replay makes is nobody else's to save
        else:
            self.parent, self.outer = None, tape.outer

    @property
    def replaying(self) -> bool:
        return self.parent is not None

    def enter(self, where: str, given: Tensor | None) -> None:
        """The next step of a span begins."""
        self.where, self.given, self.start = where, given, self.count
        self.given_version = -1 if given is None else version_of(given)

    def still_wanted(self, packs: int) -> bool:
        return self.parent is None or self.parent.still_wanted(packs)

    def fill(self, tensor: Tensor, handle: Handle) -> None:
        """A step inside this one, inside a replay, saved something: it concerns only who is replaying."""
        assert self.parent is not None
        self.parent.fill(tensor, handle)

    def close(self) -> None:
        """The step has ended."""
        self.record = self.drops = self.parent = self.outer = self.last = self.stored = self.given = None
        self.inputs, self.arguments = (), _NONE
        del self.tape

    def is_input(self, tensor: Tensor) -> bool:
        if self.input_storages is _UNKNOWN:
            self.input_storages = {storage_key(a) for a in self.inputs if isinstance(a, Tensor)}
        return storage_key(tensor) in self.input_storages

    def pack(self, tensor: Tensor) -> Handle:
        handle: Handle
        record = self.drops
        if record is None:
            handle = self._handle(tensor)
        else:  # dropped, and nobody looks on
            argument = self.arguments.get(id(tensor))
            kind, base = type(tensor), tensor._base
            if argument is not None and argument.version == tensor._version:
                if isinstance(argument, Reading):
                    handle = View(argument.cell.open(), argument.geometry)
                else:
                    handle = argument
                    if self.tape.counts and not argument.of_parameter:
                        self.tape.note_kept(argument, self.where)
            elif kind is Parameter or type(base) is Parameter:
                handle = Kept(tensor, self.where)
            elif kind is Tensor and (base is None or type(base) is Tensor) and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                if storage._cdata in self.input_storages or hasattr(storage, MARK):
                    handle = self._handle(tensor)
                else:
                    handle = slot = Internal(record, self.where, self.count, tensor)
                    record.slots.append(weakref.ref(slot))
                    if self.start >= 0:
                        self._follow(tensor)
            else:
                handle = self._handle(tensor)
        self.last = tensor
        self.count += 1
        if self.parent is not None:
            self.parent.fill(tensor, handle)
        return handle

    def _follow(self, tensor: Tensor) -> None:
        """A step of a span saves an internal: is it what the step was given?"""
        if self.tail is None or self.tail.where != self.where:
            self.tail = Tail(self.where, self.start, [])
        if tensor is self.given and tensor._version == self.given_version and self.tail.start >= 0:
            self.tail.numbers.append(self.count)
        else:
            self.tail = Tail(self.where, -1, [])

    def _handle(self, tensor: Tensor) -> Handle:
        if is_parameter(tensor):
            return Kept(tensor, self.where)
        tag = live_tag(tensor)
        if tag is not None:
            return View(tag.cell().open(), geometry_of(tensor))
        decision = self.decision
        internals = decision.internals
        if internals != KEEP and not self.is_input(tensor) and not (decision.masks == KEEP and is_mask(tensor)):
            if internals == REPLAY:
                return self._slot(tensor)
            if tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg()):
                return self._elsewhere(tensor)
        kept = Kept(tensor, self.where, self.outer)
        if self.tape.counts:
            self.tape.note_kept(kept, self.where)
        if decision.output != KEEP:
            if self.held is None:
                self.held = set()
            self.held.add(storage_key(tensor))
        return kept

    def _slot(self, tensor: Tensor) -> Internal:
        record = self.record
        assert record is not None
        slot = Internal(record, self.where, self.count, tensor)
        record.slots.append(weakref.ref(slot))
        if self.start >= 0:
            self._follow(tensor)
        if record.watch is not None:
            record.watch.saved(self.count, tensor)
        return slot

    def _elsewhere(self, tensor: Tensor) -> View:
        """One copy serves all that share a version counter (views of one tensor) or see the same elements.  Parts of a
        storage that count for themselves (``unsafe_chunk``, as in recurrent cells) are written to one after another,
        so the copy made for one is too old for the next."""
        if self.stored is None:
            self.stored = {}
        storage, root = tensor.untyped_storage(), tensor if tensor._base is None else tensor._base
        counter, region = (storage._cdata, id(root)), (storage._cdata, *_extent(tensor))
        for key in (counter, region):
            found = self.stored.get(key)
            # The address alone does not say which storage it is: the tier lets go of storages, and others take their
            # place.
            if found is None or found.storage() is not storage or not found.tag.fits(tensor):
                continue
            if key is region or found.root() is root:
                return View(found.tag.cell().open(), geometry_of(tensor))
        tag = Tag(self.tape.store(self.decision.internals, self.where, tensor), 0, tensor)
        self.stored[counter] = self.stored[region] = _Stored(weakref.ref(storage), weakref.ref(root), tag)
        return View(tag.cell().open(), geometry_of(tensor))


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor begins in its storage, and how far it reaches."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset()), reach
