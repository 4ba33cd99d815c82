"""The tier interface: put a storage somewhere, get it back.

A tier is chosen by a decision (``offload_host``, ``shard``) and handed to the tape under that name.  What it gives
back is the bytes of the storage; views with their own sizes, strides and offsets are made over them as over any
rebuilt output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from megackpt.recompute.handle import version_of
from megackpt.recompute.lanes import lane_of
from megackpt.recompute.producer import Producer


class Ticket(Protocol):
    """One storage that was put away.  Dropping the ticket frees the place."""

    def ahead(self) -> None:
        """Begin to bring it back."""

    def get(self) -> Tensor:
        """The storage again, as a flat tensor; may be called more than once."""

    def held_bytes(self) -> int:
        """Bytes it occupies on the device (not where it waits)."""


class Tier(Protocol):
    """A place to put storages."""

    def put(self, base: Tensor) -> Ticket:
        """Take the flat tensor ``base`` over a whole storage, as it is on the current stream.  The tier may read it
        until it is done, so it holds it until then; nobody else may write into it.  On a device with streams the
        ticket is asked on the stream on which ``base`` was put."""


def flat_storage(tensor: Tensor) -> Tensor:
    """The whole storage of ``tensor`` as a flat tensor of its type, without history.  A view, so that it has the
    tensor's own version counter and a later change is seen."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((count,), (1,), 0)


class Stored(Producer):
    """The producer of one storage that waits in a tier."""

    __slots__ = ("ticket",)

    def __init__(self, where: str, tier: Tier, tensor: Tensor) -> None:
        super().__init__(where)
        self.lane = lane_of((tensor,))
        self.ticket = tier.put(flat_storage(tensor))

    def missing(self) -> Sequence[Producer]:
        return ()

    def ahead(self) -> None:
        self.ticket.ahead()

    def rebuild(self) -> None:
        base = self.ticket.get()
        for box in self.wanted_boxes().values():
            box.value = base


def check_unchanged(base: Tensor, version: int, where: str) -> None:
    """Refuse a storage that was written to while a tier was still reading it."""
    if version >= 0 and version_of(base) != version:
        raise RuntimeError(f"a tensor was modified in place while it was being moved to {where}")
