"""What only an update may change, sealed between updates.

A shard of an optimizer has no copy, and the low bits of an fp32 master do not show in its bf16 parameter: comparing
copies (`train/guard.py`) finds no flipped bit there.  So a digest of everything that an update writes is taken when it
ends, compared just before the next one reads it, and again at every check.

Parameters need one thing more.  A sharded optimizer gathers them anew after each update, which heals a flipped bit in a
copy after it has spoiled one gradient.  Before each update their digests therefore enter a history, which copies must
have in common as well.

An update costs two reads of its parameters and their state and one more of the parameters, and no wait: what was found
stays on the device until a check asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megackpt.optim import MasterOptimizer

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 22
_ODD = 0x9E3779B97F4A7C1  # multiplying by an odd number modulo 2^64 loses nothing


def digest(tensor: Tensor) -> Tensor:
    """Sum of the tensor's bytes, in order, as 8-byte integers modulo 2^64, so that one flipped bit always changes it:
    an int64 scalar on its device.

    No temporary of the tensor's size exists, wherever it lies in memory."""
    flat = tensor.detach().contiguous().view(-1)
    per_word = 8 // flat.element_size()
    whole = flat.numel() // per_word * per_word
    aligned = flat.storage_offset() % per_word == 0
    if aligned and whole == flat.numel():
        return flat.view(torch.int64).sum()
    parts = [flat[:whole]] if aligned else [part.clone() for part in flat[:whole].split(_CHUNK)]
    tail = flat[whole:].view(_INTEGERS[flat.element_size()])
    return torch.stack([*(part.view(torch.int64).sum() for part in parts), tail.sum(dtype=torch.int64)]).sum()


def digests(tensors: Sequence[Tensor]) -> Tensor:
    """[len(tensors)] int64; of none, on the CPU."""
    return torch.stack([digest(tensor) for tensor in tensors]) if tensors else torch.empty(0, dtype=torch.int64)


class Seal:
    """The seal of one rank.

    Attributes:
        history: [len(parameters)] int64: what the parameters were before each update so far.
    """

    def __init__(self, optimizer: MasterOptimizer, parameters: Sequence[Tensor], settle: Callable[[], None]) -> None:
        """`parameters`: those that have copies, whole; `settle` waits for those that are still on their way."""
        self._optimizer, self._parameters, self._settle = optimizer, parameters, settle
        written = optimizer.written()
        self.keys, self._tensors = list(written), list(written.values())
        device = parameters[0].device if parameters else None
        self.history = torch.zeros(len(parameters), dtype=torch.int64, device=device)
        self.close()
        self._broken = torch.zeros_like(self._seal)  # 1 + the number of updates before the change was seen; 0: none

    def close(self) -> None:
        """An update is over: until the next `open` nothing may change."""
        self._seal = digests(self._tensors)

    def open(self) -> None:
        """The next update is about to read what the last one wrote."""
        self._settle()
        self._look()
        self.history.mul_(_ODD).add_(digests(self._parameters))

    def broken(self) -> list[str]:
        """What has changed outside of an update since the start, in words."""
        self._look()
        seen = [(key, number - 1) for key, number in zip(self.keys, self._broken.tolist(), strict=True) if number]
        return [f"{key} has changed after update {number}" for key, number in seen]

    def _look(self) -> None:
        changed = (digests(self._tensors) != self._seal) & (self._broken == 0)
        self._broken.add_(changed, alpha=self._optimizer.step_count + 1)
