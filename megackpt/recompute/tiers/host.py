"""The host tier: a writer thread copies storages away, and back when they are asked for.

On a GPU the copy goes to pinned memory on a stream of its own, after what was queued when the tensor was put, and
the writer waits for its end before it lets go of the source.  On a CPU both ends are host memory, so the tier shows
the mechanism (order, lifetime, errors), not a gain.  A delay in the writer can be injected to prove that nothing
depends on how fast it is.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import torch
from torch import Tensor

from megackpt.recompute import lanes
from megackpt.recompute.handle import version_of
from megackpt.recompute.tiers.base import check_unchanged


class _HostTicket:
    __slots__ = ("_source", "_version", "_device", "_ready", "_copy", "done", "_error")

    def __init__(self, base: Tensor) -> None:
        self._source: Tensor | None = base  # keeps the storage alive until it is copied
        self._version = version_of(base)
        self._device = base.device
        stream = lanes.STREAMS.of(base)
        self._ready: Any = None if stream is None else stream.record_event()
        self._copy: Tensor | None = None
        self._error: BaseException | None = None
        self.done = threading.Event()

    def write(self, copies: lanes.HostCopies) -> None:
        """The writer's part.  It never raises: an error waits for whoever asks."""
        try:
            source = self._source
            assert source is not None
            copy = source.to("cpu", copy=True) if self._ready is None else copies.copy(source, self._ready)
            check_unchanged(source, self._version, "host memory")
            self._copy = copy
        except BaseException as error:  # it must reach the thread that asks, whatever it is
            self._error = error
        finally:
            self._source = None
            self.done.set()

    def ahead(self) -> None:
        return None

    def get(self) -> Tensor:
        self.done.wait()
        if self._error is not None:
            raise RuntimeError(f"moving a kept tensor to host memory failed: {self._error}") from self._error
        assert self._copy is not None
        # From pinned memory without waiting: whoever reads it does so on this stream, or waits (lanes.py).
        return self._copy.to(self._device, copy=True, non_blocking=self._ready is not None)

    def held_bytes(self) -> int:
        source = self._source
        return 0 if source is None else source.untyped_storage().nbytes()


class HostTier:
    """``delay_s`` makes the writer wait before each copy.  Use as a context manager, or :meth:`close` it.

    A GPU runs behind the calls that fill its queue, and what it has not reached is not copied yet: :meth:`settle`, now
    and then, bounds the bytes that wait for that."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self._delay_s = delay_s
        self._queue: queue.SimpleQueue[_HostTicket | None] = queue.SimpleQueue()
        self._last: threading.Event | None = None
        self._thread = threading.Thread(target=self._work, name="host tier", daemon=True)
        self._thread.start()

    def put(self, base: Tensor) -> _HostTicket:
        ticket = _HostTicket(base)
        self._last = ticket.done
        self._queue.put(ticket)
        return ticket

    def settle(self) -> None:
        """Wait until all that was put is away."""
        if self._last is not None:
            self._last.wait()

    def _work(self) -> None:
        torch.set_num_threads(1)
        copies = lanes.HostCopies()
        while (ticket := self._queue.get()) is not None:
            if self._delay_s:
                time.sleep(self._delay_s)
            ticket.write(copies)
            del ticket  # a ticket nobody holds any more frees its copy now, not at the next put

    def close(self) -> None:
        """Finish what was put and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def __enter__(self) -> HostTier:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()
