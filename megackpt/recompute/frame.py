"""What takes the tensors that autograd saves while a step's forward runs, and puts a handle in the place of each."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megackpt.plan import KEEP, REPLAY, Decision
from megackpt.recompute.context import state
from megackpt.recompute.handle import (
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
_Stored = dict[int, tuple[weakref.ref[torch.UntypedStorage], Tag]]


class ForwardFrame:
    """The pack hook of one step's forward.  This is the hottest code of the engine: it runs for every tensor that
    autograd saves, so what is rarely needed is made when first needed."""

    __slots__ = (
        "tape", "where", "decision", "internals", "record", "count", "parent", "outer", "inputs", "input_storages",
        "last", "held", "stored", "counts",
    )  # fmt: skip

    def __init__(self, tape: Tape, where: str, decision: Decision, inputs: Sequence[Any]) -> None:
        self.tape = tape
        self.where = where
        self.decision = decision
        self.internals = decision.internals
        self.record: Record | None = None  # set if the step is dropped
        self.count = 0
        self.inputs = inputs
        self.input_storages: set[int] | None = None
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

    def is_input(self, tensor: Tensor) -> bool:
        inputs = self.input_storages
        if inputs is None:
            inputs = self.input_storages = {storage_key(a) for a in self.inputs if isinstance(a, Tensor)}
        return storage_key(tensor) in inputs

    def pack(self, tensor: Tensor) -> Handle:
        handle = self._handle(tensor)
        self.count += 1
        self.last = tensor
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
