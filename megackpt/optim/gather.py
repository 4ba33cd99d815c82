"""The flat parameter buffer of a sharded optimizer: every rank updates its shards and gathers the others'.

Parameters become views of one buffer with the layout of the gradient buffer, so a bucket is gathered in place by one
collective.  With overlap the gathers run while the next forward has begun: the first layers are gathered first, and
a part of the model waits for its own buckets when its forward starts.  Whoever else reads parameters (a checkpoint, a
digest) calls `settle`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from megackpt.optim.buffer import GradientBuffer, Part


class ParameterBuffer:
    """The parameters of a `GradientBuffer` in one piece of memory."""

    def __init__(self, buffer: GradientBuffer, *, overlap: bool = False) -> None:
        """Move the parameters in.  Views of their old memory that anyone holds are no longer theirs."""
        self._buffer, self._overlap = buffer, overlap
        kind = buffer.entries[0].parameter.dtype if buffer.entries else buffer.flat.dtype
        self.flat = torch.zeros(buffer.layout.total, dtype=kind, device=buffer.flat.device)
        self._places: dict[int, Tensor] = {}
        for entry in buffer.entries:
            offset = entry.gradient.storage_offset()
            place = self.flat[offset : offset + entry.parameter.numel()]
            place.copy_(entry.parameter.detach().view(-1))
            entry.parameter.data = place.view(entry.parameter.shape)
            self._places[id(entry.parameter)] = place
        self._pending: dict[int, dist.Work] = {}

    def part(self, part: Part) -> Tensor:
        """The elements of a parameter in this rank's shard, 1-dimensional."""
        return self._places[id(part.entry.parameter)][part.first : part.stop]

    def gather(self) -> None:
        """After an update of this rank's shards: begin to fetch the others', and wait unless it overlaps."""
        buffer, layout, dp = self._buffer, self._buffer.layout, self._buffer.dp
        self.settle()
        if dp.size > 1:
            for bucket in reversed(range(len(layout.buckets))):
                whole = self.flat[layout.bounds[bucket] : layout.bounds[bucket + 1]]
                own = self.flat[slice(*layout.shard(bucket, dp.index))]
                work = dist.all_gather_into_tensor(whole, own, group=dp.group, async_op=True)
                self._pending[bucket] = work
        # The flat buffer was written, not the parameters: autograd could not tell that a saved weight changed.
        torch.autograd.graph.increment_version([entry.parameter for entry in buffer.entries])
        if not self._overlap:
            self.settle()

    def settle(self, buckets: Iterable[int] | None = None) -> None:
        """Wait until these buckets (None: all) are here."""
        if self._pending:
            for bucket in list(self._pending) if buckets is None else buckets:
                if (work := self._pending.pop(bucket, None)) is not None:
                    work.wait()

    def guard(self, module: nn.Module, parameters: Iterable[Parameter]) -> None:
        """Let every forward of `module`, which uses `parameters`, wait for them."""
        of = {id(entry.parameter): entry.bucket for entry in self._buffer.entries}
        buckets = sorted({of[id(p)] for p in parameters if id(p) in of})

        def wait(*_: object) -> None:
            self.settle(buckets)

        module.register_forward_pre_hook(wait)
