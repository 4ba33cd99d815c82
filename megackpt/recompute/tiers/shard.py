"""The shard tier: of a tensor that all ranks of a group hold, each keeps its part and gathers the rest when asked.

Megatron's ``--distribute-saved-activations`` and DeepSpeed's ``partition_activations``: 1/t of the bytes for one
all-gather at replay.  The gather itself is handed in, so that this room knows no process groups; all ranks ask in the
same order, since the order follows from graph and plan alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Gather = Callable[[Tensor], Tensor]
"""[n/t] on each rank -> [n] on every rank."""


class _ShardTicket:
    __slots__ = ("_part", "_count", "_gather")

    def __init__(self, part: Tensor, count: int, gather: Gather) -> None:
        self._part, self._count, self._gather = part, count, gather

    def ahead(self) -> None:
        return None

    def get(self) -> Tensor:
        return self._gather(self._part)[: self._count]

    def held_bytes(self) -> int:
        return self._part.untyped_storage().nbytes()


class ShardTier:
    """``index`` of ``size`` ranks that hold equal tensors."""

    def __init__(self, index: int, size: int, gather: Gather) -> None:
        if not 0 <= index < size:
            raise ValueError(f"rank {index} of {size}")
        self._index, self._size, self._gather = index, size, gather

    def put(self, base: Tensor) -> _ShardTicket:
        count = base.numel()
        share = -(-count // self._size)
        part = base[self._index * share : (self._index + 1) * share]
        if part.numel() < share:  # the last rank's part, padded
            part = torch.cat((part, part.new_zeros(share - part.numel())))
        return _ShardTicket(part.clone(), count, self._gather)
