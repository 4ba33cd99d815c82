"""Order between the streams of a device.

A GPU runs what is queued on one stream in order; between two streams only events order anything, and the allocator
hands freed memory out again on the stream it came from, whoever else still reads it.  Autograd runs each node of a
backward on the stream of its forward.  So do we: what a step made is made again on the stream of its forward (its
*lane*).  Who reads it on another stream waits for the event recorded after it and tells the allocator of that reader.

A CPU has no streams: there a lane is None, order is that of the calls, and nothing of this costs anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


class Streams:
    """What this room asks of a device's streams; the one place here that names CUDA's."""

    def of(self, tensor: Tensor) -> Any:
        """The stream on which this thread queues work for ``tensor``; None where there are none."""
        return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None

    def new(self, tensor: Tensor) -> Any:
        """A stream of its own on the device of ``tensor``."""
        return torch.cuda.Stream(tensor.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Queue what is called inside on ``stream``."""
        return torch.cuda.stream(stream)

    def hold(self, tensor: Tensor, stream: Any) -> None:
        """Memory of ``tensor`` is given to nobody before ``stream`` has done what is queued on it when it is freed."""
        tensor.record_stream(stream)

    def host_copy(self, source: Tensor) -> Tensor:
        """Copy to pinned host memory, queued on the current stream: not there yet when this returns."""
        return torch.empty(source.shape, dtype=source.dtype, pin_memory=True).copy_(source, non_blocking=True)


STREAMS = Streams()


class Lane:
    """The stream on which a producer works, and the event after what it did last."""

    __slots__ = ("stream", "_done", "_around")

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self._done: Any = None
        self._around: Any = None

    def __enter__(self) -> Lane:
        self._around = STREAMS.on(self.stream)
        self._around.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._done = self.stream.record_event()
        self._around.__exit__(*failure)
        self._around = None

    def join(self, tensor: Tensor) -> None:
        """Call before work that reads ``tensor``, made in this lane, is queued on the current stream."""
        here = STREAMS.of(tensor)
        if self._done is not None and here != self.stream:
            here.wait_event(self._done)
            STREAMS.hold(tensor, here)


def lane_of(values: Iterable[Any]) -> Lane | None:
    """The lane of work on these values now: that of the first tensor that has one."""
    for value in values:
        if isinstance(value, Tensor) and (stream := STREAMS.of(value)) is not None:
            return Lane(stream)
    return None


class HostCopies:
    """Copies from a device to host memory, on a stream beside the one that computes."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def copy(self, source: Tensor, ready: Any) -> Tensor:
        """``source`` in pinned host memory, complete; reads it after the event ``ready``.  Waits for the copy, so
        that the caller knows when nobody reads the source any more."""
        stream = self._streams.get(source.device)
        if stream is None:
            stream = self._streams[source.device] = STREAMS.new(source)
        stream.wait_event(ready)
        with STREAMS.on(stream):
            copy = STREAMS.host_copy(source)
            STREAMS.hold(source, stream)  # should this thread fail before it has waited
            done = stream.record_event()
        done.synchronize()
        return copy
