"""Work beside training: a snapshot of what is to be written, and a thread that writes it.

A thread is enough: copying, summing and writing release the interpreter lock. It calls no collectives; ranks compare
notes when the main threads meet (`Saver.poll`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from torch import Tensor

from megackpt.mesh.device import DeviceSeam

T = TypeVar("T")
_ALIGNMENT = 64  # bytes
_BLOCK = 1 << 30  # bytes; torch rounds pinned memory up to a power of two, which of one large piece could be twice it


class Stopped(Exception):
    """The process leaves without waiting for the write."""


class HostCopy:
    """Host memory of this rank's share of a save, in blocks. Made at the first snapshot and kept: saves repeat."""

    def __init__(self, seam: DeviceSeam) -> None:
        self._seam = seam
        self._blocks: list[Tensor] = []

    def take(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies as of now, valid until the next call. Waits until they are made: training may then go on."""
        sizes = [tensor.numel() * tensor.itemsize for tensor in tensors]
        places, blocks = _places(sizes)
        if len(self._blocks) < len(blocks) or any(len(a) < b for a, b in zip(self._blocks, blocks, strict=False)):
            self._blocks.clear()  # the old memory goes first
            self._blocks = [self._seam.host_bytes(count) for count in blocks]
        copies = []
        for tensor, size, (block, offset) in zip(tensors, sizes, places, strict=True):
            room = self._blocks[block][offset : offset + size]
            copies.append(room.view(tensor.dtype).view(tensor.shape))
            copies[-1].copy_(tensor.detach(), non_blocking=True)
        self._seam.synchronize()
        return copies


def _places(sizes: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Block and offset of each of so many bytes, and the sizes of the blocks; what is larger than a block is one."""
    places: list[tuple[int, int]] = []
    blocks: list[int] = []
    for size in sizes:
        offset = -(-blocks[-1] // _ALIGNMENT) * _ALIGNMENT if blocks else 0
        if not blocks or offset + size > _BLOCK:
            blocks.append(0)
            offset = 0
        places.append((len(blocks) - 1, offset))
        blocks[-1] = offset + size
    return places, blocks


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
