"""Streams that exist on paper: a CPU run pretends to queue its operations on them, and a detector finds what a GPU
would get wrong: a read that no event orders after its write, and memory freed while another stream still reads it.

Every stream has a vector clock: how far it knows each other stream to be.  An event carries a copy of it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from megackpt.recompute.lanes import Streams

Clock = dict[str, int]


def merge(clock: Clock, other: Clock) -> None:
    for name, time in other.items():
        clock[name] = max(clock.get(name, 0), time)


class PaperEvent:
    def __init__(self, paper: PaperStreams, clock: Clock) -> None:
        self.paper, self.clock = paper, clock

    def synchronize(self) -> None:
        merge(self.paper.host, self.clock)


class PaperStream:
    def __init__(self, paper: PaperStreams, name: str) -> None:
        self.paper, self.name = paper, name
        self.clock: Clock = {}
        self.expected: list[PaperEvent] = []  # to be waited for before the next operation

    def tick(self) -> int:
        """One more operation, queued by a host that knows what it has waited for."""
        merge(self.clock, self.paper.host)
        while self.expected:
            self.wait_event(self.expected.pop())
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return self.clock[self.name]

    def record_event(self) -> PaperEvent:
        return PaperEvent(self.paper, dict(self.clock))

    def wait_event(self, event: PaperEvent) -> None:
        merge(self.clock, event.clock)


class Storage:
    """What is known of one: where it was allocated and written, who read it when, who asked that it be held."""

    def __init__(self, stream: PaperStream, time: int) -> None:
        self.stream, self.time = stream, time
        self.reads: Clock = {}
        self.held: set[str] = set()


class PaperStreams(Streams, TorchDispatchMode):
    """To be put in the place of `lanes.STREAMS` and entered around a run; `faults` is what went wrong."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.host: Clock = {}
        self.faults: list[str] = []
        self.main = PaperStream(self, "main")
        self._here = threading.local()
        self._known: dict[int, Storage] = {}
        self._lock = threading.RLock()

    @property
    def current(self) -> PaperStream:
        return getattr(self._here, "stream", self.main)

    # -- what the engine asks ------------------------------------------------------------------------------------

    def of(self, tensor: Tensor) -> PaperStream:
        return self.current

    def new(self, tensor: Tensor) -> PaperStream:
        return PaperStream(self, "copies")

    @contextmanager
    def on(self, stream: PaperStream) -> Iterator[None]:
        before, self._here.stream = self.current, stream
        try:
            yield
        finally:
            self._here.stream = before

    def hold(self, tensor: Tensor, stream: PaperStream) -> None:
        with self._lock:
            if (known := self._known.get(id(tensor.untyped_storage()))) is not None:
                known.held.add(stream.name)

    def host_copy(self, source: Tensor) -> Tensor:
        with self._lock:
            self._read(source, self.current.tick(), "copy to host")
        return source.clone()

    # -- the detector --------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        with self._lock:
            time = self.current.tick()
            for leaf in pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor):
                    self._read(leaf, time, str(func))
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, Tensor) and id(leaf.untyped_storage()) not in self._known:
                    storage = leaf.untyped_storage()
                    self._known[id(storage)] = Storage(self.current, time)
                    weakref.finalize(storage, partial(self._freed, id(storage)))
        return result

    def _read(self, tensor: Tensor, time: int, where: str) -> None:
        known = self._known.get(id(tensor.untyped_storage()))
        if known is None:
            return
        if self.current.clock.get(known.stream.name, 0) < known.time:
            self.faults.append(f"{where} on {self.current.name} reads what {known.stream.name} may not have written")
        known.reads[self.current.name] = time

    def _freed(self, key: int) -> None:
        with self._lock:
            known = self._known.pop(key)
            for name, time in known.reads.items():
                seen = max(known.stream.clock.get(name, 0), self.host.get(name, 0))
                if name != known.stream.name and name not in known.held and seen < time:
                    self.faults.append(f"memory of {known.stream.name} is freed while {name} may read it")


def backward_on(paper: PaperStreams, tensor: Tensor, stream: PaperStream) -> None:
    """Let the node that made `tensor` run its backward on `stream`, as autograd does on a GPU: the node waits for its
    gradients, and the next node waits for it (not yet when what this one saved is released)."""
    node = tensor.grad_fn
    assert node is not None

    def before(grads: Any) -> None:
        came_from = paper.current
        stream.wait_event(came_from.record_event())
        for grad in grads:
            paper.hold(grad, stream)
        paper._here.stream = stream

    def after(inputs: Any, outputs: Any) -> None:
        paper.main.expected.append(stream.record_event())
        for grad in inputs:
            if grad is not None:
                paper.hold(grad, paper.main)
        paper._here.stream = paper.main

    node.register_prehook(before)
    node.register_hook(after)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))
