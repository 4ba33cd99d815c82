"""Random numbers that can be drawn again.

The problem: a replayed step must see the very numbers its forward saw, on every stream, and must leave every
stream as it found it.  Saving the state of a Mersenne twister (5 KB) around each step is the obvious tool; it is
slow, it dominates toy models, and it has to be repeated for every stream.

The idea: a stream is a seed and a position.  Each draw re-seeds one generator from (seed, position) and moves the
position on by one, so the whole state of a stream is one integer, on CPU and GPU alike, and a mask can be drawn
again from that integer alone, without its step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_MASK = (1 << 64) - 1
_CPU = torch.default_generator
_cuda_in_use = torch.cuda.is_initialized  # else its generators have nothing to restore


def mix(seed: int, position: int) -> int:
    """A well-spread 63-bit seed from a pair of integers (splitmix64's finaliser)."""
    z = (seed * 0xD1342543DE82EF95 + (position + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) >> 1


class Stream:
    """A named, counter-based random stream on one device.  Its whole state is :attr:`position`."""

    __slots__ = ("name", "seed", "position", "device", "_generator")

    def __init__(self, name: str, seed: int, device: torch.device | str = "cpu") -> None:
        self.name = name
        self.seed = seed
        self.position = 0
        self.device = torch.device(device)
        self._generator = torch.Generator(device=self.device)

    def at(self, position: int) -> torch.Generator:
        """The generator as the draw at ``position`` saw it; the stream does not move."""
        return self._generator.manual_seed(mix(self.seed, position))

    def draw(self) -> torch.Generator:
        """A generator for one draw.  It is valid until the next call on this stream."""
        generator = self.at(self.position)
        self.position += 1
        return generator

    @contextmanager
    def lend_default(self) -> Iterator[None]:
        """Let code that knows only torch's default generator (fused attention) draw from this stream once."""
        default = _default_generator(self.device)
        saved = default.get_state()
        default.manual_seed(mix(self.seed, self.position))
        self.position += 1
        try:
            yield
        finally:
            default.set_state(saved)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


Source = torch.Generator | Stream
"""What random numbers are drawn from."""
Sources = tuple[tuple[Source, Any], ...]
"""Some of them, and where each stood."""
Snapshot = tuple[Any, ...]
"""The state of a whole ledger."""


def positions(sources: Iterable[Source]) -> Sources:
    """Where each stands now, for :func:`put_back`."""
    return tuple((s, s.position if isinstance(s, Stream) else s.get_state()) for s in sources)


def put_back(noted: Sources) -> None:
    for source, position in noted:
        if isinstance(source, Stream):
            source.position = position
        else:
            source.set_state(position)


class RngLedger:
    """All the random state that a replay must reproduce: registered streams and torch's default generators.

    ``defaults=False`` leaves torch's own generators out, for a model that is known to draw from streams only:
    then a snapshot is a tuple of integers.
    """

    __slots__ = ("_streams", "_order", "_defaults")

    def __init__(self, *, defaults: bool = True) -> None:
        self._streams: dict[str, Stream] = {}
        self._order: tuple[Stream, ...] = ()
        self._defaults = defaults

    def register(self, stream: Stream) -> Stream:
        if stream.name in self._streams:
            raise ValueError(f"a stream named {stream.name!r} is registered already")
        self._streams[stream.name] = stream
        self._order = tuple(self._streams.values())
        return stream

    def stream(self, name: str) -> Stream:
        return self._streams[name]

    def snapshot(self) -> Snapshot:
        """The state now, to be put back with :meth:`restore`.  Empty where there is none."""
        order = self._order
        positions: tuple[object, ...] = tuple([s.position for s in order]) if order else ()
        if not self._defaults:
            return positions
        if _cuda_in_use():
            # A Philox generator's state is its seed and an offset: two integers instead of a copy from the device.
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            positions += (generator.initial_seed(), generator.get_offset())
        return (*positions, _CPU.get_state())

    def drew_since(self, snapshot: Snapshot) -> bool:
        """Whether numbers may have been drawn since ``snapshot``.  Of torch's generators that must be assumed: code
        that draws and puts the state back (``fork_rng``) leaves no trace in it."""
        if self._defaults:
            return True
        for stream, position in zip(self._order, snapshot):  # noqa: B905, SIM110 (this runs in every step)
            if stream.position != position:
                return True
        return False

    def restore(self, snapshot: Snapshot) -> None:
        if self._order:
            for stream, position in zip(self._order, snapshot, strict=False):
                stream.position = position
        if self._defaults:
            _CPU.set_state(snapshot[-1])
            count = len(self._order)
            if len(snapshot) > count + 1:
                generator = torch.cuda.default_generators[torch.cuda.current_device()]
                generator.manual_seed(snapshot[count])
                generator.set_offset(snapshot[count + 1])

    def state_dict(self) -> dict[str, int]:
        """Position of every stream, by name: what a checkpoint stores."""
        return {name: s.position for name, s in self._streams.items()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if set(state) != set(self._streams):
            raise KeyError(f"streams in the file: {sorted(state)}; streams of this run: {sorted(self._streams)}")
        for name, position in state.items():
            self._streams[name].position = int(position)
