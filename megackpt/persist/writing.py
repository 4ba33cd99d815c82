"""Work beside training: a snapshot of what is to be written, and a thread that writes it.

A thread is enough: copying, summing and writing release the interpreter lock. It calls no collectives; ranks compare
notes when the main threads meet (`Saver.poll`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from megackpt.mesh.device import DeviceSeam

T = TypeVar("T")
_ALIGNMENT = 64  # bytes


class Stopped(Exception):
    """The process leaves without waiting for the write."""


class HostCopy:
    """Host memory of this rank's share of a save. Made at the first snapshot and kept: saves repeat."""

    def __init__(self, seam: DeviceSeam) -> None:
        self._seam = seam
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def take(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies as of now, valid until the next call. Waits until they are made: training may then go on."""
        ends, needed = [], 0
        for tensor in tensors:
            needed = -(-needed // _ALIGNMENT) * _ALIGNMENT + tensor.numel() * tensor.itemsize
            ends.append(needed)
        if len(self._bytes) < needed:
            self._bytes = self._bytes[:0].clone()  # the old memory goes first
            self._bytes = self._seam.host_bytes(needed)
        copies = []
        for tensor, end in zip(tensors, ends, strict=True):
            room = self._bytes[end - tensor.numel() * tensor.itemsize : end]
            copies.append(room.view(tensor.dtype).view(tensor.shape))
            copies[-1].copy_(tensor.detach(), non_blocking=True)
        self._seam.synchronize()
        return copies


class Writing(Generic[T]):
    """Work that runs at once, or beside the caller. It is given a check that raises once it must stop."""

    def __init__(self, work: Callable[[Callable[[], None]], T], *, background: bool) -> None:
        self._work = work
        self._stopped = threading.Event()
        self._result: T | None = None
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        if background:
            self._thread = threading.Thread(target=self._run, name="checkpoint writer")
            self._thread.start()
        else:
            self._run()

    @property
    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def result(self) -> T:
        """What the work returned, or what it raised; waits for it."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def stop(self) -> None:
        """Give up within a block, and wait for that."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._result = self._work(self._check)
        except Exception as error:  # of any kind: it is told to all ranks
            self._error = error

    def _check(self) -> None:
        if self._stopped.is_set():
            raise Stopped("the process left")
