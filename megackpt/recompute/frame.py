"""What takes the tensors that autograd saves while a step's forward runs, and puts a handle in the place of each."""

from __future__ import annotations

import weakref
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megackpt.plan import KEEP, REPLAY, Decision
from megackpt.recompute.context import state
from megackpt.recompute.handle import (
    OUTPUT_TAG,
    Internal,
    Kept,
    Tag,
    View,
    is_mask,
    is_parameter,
    live_tag,
    storage_key,
)

if TYPE_CHECKING:
    from megackpt.recompute.replay import Record
    from megackpt.recompute.tape import Tape

Handle = Kept | Internal | View
_UNKNOWN: frozenset[int] = frozenset()  # stands for a set that is made when first asked for
_Stored = dict[int, tuple[weakref.ref[torch.UntypedStorage], Tag]]


class ForwardFrame:
    """The pack hook of one step's forward.  This is the hottest code of the engine: it runs for every tensor that
    autograd saves, so what is rarely needed is made when first needed."""

    __slots__ = (
        "tape", "where", "decision", "internals", "record", "count", "parent", "outer", "inputs", "input_storages",
        "last", "held", "stored", "counts", "drops",
    )  # fmt: skip

    def __init__(self, tape: Tape, where: str, decision: Decision, inputs: Sequence[Any]) -> None:
        self.tape = tape
        self.where = where
        self.decision = decision
        self.internals = decision.internals
        self.record: Record | None = None  # set if the step is dropped
        self.drops: Record | None = None  # the same, if internals and masks are dropped with nobody looking on
        self.count = 0
        self.inputs = inputs
        self.input_storages: Set[int] = _UNKNOWN
        self.last: Tensor | None = None  # saved
        self.held: set[int] | None = None  # storages that stay on the device for a kept internal
        self.stored: _Stored | None = None  # internals that wait in a tier
        self.counts = tape.counts
        parent = state.frame
        if parent is not None and parent.replaying:
            self.parent, self.outer = parent, None  # what a replay makes is nobody else's to save
        else:
            self.parent, self.outer = None, tape.outer

    @property
    def replaying(self) -> bool:
        return self.parent is not None

    def still_wanted(self, packs: int) -> bool:
        return self.parent is None or self.parent.still_wanted(packs)

    def fill(self, tensor: Tensor, handle: Handle) -> None:
        """A step inside this one, inside a replay, saved something: it concerns only who is replaying."""
        assert self.parent is not None
        self.parent.fill(tensor, handle)

    def drop_for(self, record: Record) -> None:
        """What is saved from now on is rebuilt by ``record``, as far as the decision says so."""
        self.record = record
        if record.watch is None and self.internals == REPLAY and self.decision.masks != KEEP:
            self.input_storages = {storage_key(a) for a in self.inputs if isinstance(a, Tensor)}
            self.drops = record

    def is_input(self, tensor: Tensor) -> bool:
        if self.input_storages is _UNKNOWN:
            self.input_storages = {storage_key(a) for a in self.inputs if isinstance(a, Tensor)}
        return storage_key(tensor) in self.input_storages

    def pack(self, tensor: Tensor) -> Handle:
        self.last = tensor
        kind, base, record = type(tensor), tensor._base, self.drops
        if kind is Parameter or type(base) is Parameter:
            handle: Handle = Kept(tensor, self.where)
        elif record is None or kind is not Tensor or not (base is None or type(base) is Tensor):
            handle = self._handle(tensor)
        else:  # an internal to be rebuilt, most likely
            storage = tensor.untyped_storage() if tensor.layout is torch.strided else None
            if storage is None or hasattr(storage, OUTPUT_TAG) or storage._cdata in self.input_storages:
                handle = self._handle(tensor)
            else:
                handle = slot = Internal(record, tensor)
                record.slots[self.count] = weakref.ref(slot)
        self.count += 1
        if self.parent is not None:
            self.parent.fill(tensor, handle)
        return handle

    def _handle(self, tensor: Tensor) -> Handle:
        if is_parameter(tensor):
            return Kept(tensor, self.where)
        tag = live_tag(tensor)
        if tag is not None:
            return View(tag.cell().open(), tensor)
        internals = self.internals
        if internals != KEEP and not self.is_input(tensor) and not (self.decision.masks == KEEP and is_mask(tensor)):
            if internals == REPLAY:
                return self._slot(tensor)
            if tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg()):
                return self._elsewhere(tensor)
        kept = Kept(tensor, self.where, self.outer)
        if self.counts:
            self.tape.note_kept(kept, self.where)
        if self.decision.output != KEEP:
            if self.held is None:
                self.held = set()
            self.held.add(storage_key(tensor))
        return kept

    def _slot(self, tensor: Tensor) -> Internal:
        record = self.record
        assert record is not None
        slot = Internal(record, tensor)
        record.slots[self.count] = weakref.ref(slot)
        if record.watch is not None:
            record.watch.saved(self.count, tensor)
        return slot

    def _elsewhere(self, tensor: Tensor) -> View:
        if self.stored is None:
            self.stored = {}
        storage = tensor.untyped_storage()
        ref, tag = self.stored.get(storage._cdata, (None, None))
        # The address alone does not say which storage it is: the tier lets go of storages, and others take their place.
        if ref is None or tag is None or ref() is not storage or not tag.fits(tensor):
            producer = self.tape.store(self.decision.internals, self.where, tensor)
            tag = Tag(producer, 0, tensor)
            self.stored[storage._cdata] = (weakref.ref(storage), tag)
        return View(tag.cell().open(), tensor)
