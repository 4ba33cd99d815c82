"""Equal sub-chains of a chain, found once: planners fill one row of their table per *different* sub-chain.

A chain of l stages has l(l+1)/2 sub-chains, but a model repeats its layers: 1,000 equal layers between two other ends
have 3,000 different ones.  Sub-chains are interned by length: the one from s to t is the pair (the one from s to t-1,
the class of stage t).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from megackpt.plan.chains.types import Chain

Ints = NDArray[np.int64]


class SubChains:
    """``ids[s, t]`` numbers the sub-chain of the stages s ... t by its content; ``count`` of them are different."""

    def __init__(self, chain: Chain) -> None:
        length = len(chain)
        classes = self._classes(chain)
        self.ids = np.full((length, length), -1, dtype=np.int64)
        self.count = 0
        self._first: list[Ints] = []  # by length, where each different sub-chain occurs first
        before = np.zeros(length, dtype=np.int64)
        for distance in range(length):
            starts = np.arange(length - distance)
            keys = before[: length - distance] * length + classes[distance:]
            _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
            before = inverse.reshape(-1)
            self.ids[starts, starts + distance] = before + self.count
            self.count += len(first)
            self._first.append(first)

    def by_length(self) -> Iterator[tuple[int, Ints]]:
        """Length less one, and a start of each different sub-chain of that length; shorter ones first."""
        yield from enumerate(self._first)

    @staticmethod
    def _classes(chain: Chain) -> Ints:
        """Stages with equal numbers, the gradient of their input among them, get equal classes."""
        known: dict[object, int] = {}
        keys = [(stage, chain.gradient_bytes(i)) for i, stage in enumerate(chain.stages)]
        return np.array([known.setdefault(key, len(known)) for key in keys], dtype=np.int64)


class Needs:
    """Bytes that the moves of a chain need at once, beside the input of the sub-chain they stand in."""

    def __init__(self, chain: Chain) -> None:
        stages = chain.stages
        length = len(stages)
        self.output = np.array([s.output_bytes for s in stages], dtype=np.int64)
        self.tape = np.array([s.tape_bytes for s in stages], dtype=np.int64)
        self.gradient = np.array([s.gradient_bytes for s in stages], dtype=np.int64)
        tail = np.array([s.tail_bytes for s in stages], dtype=np.int64)
        taping = np.array([s.tape_transient for s in stages], dtype=np.int64)
        backward = np.array([s.backward_transient for s in stages], dtype=np.int64)
        input_gradient = np.array([chain.gradient_bytes(i) for i in range(length)], dtype=np.int64)
        transient = np.array([s.forward_transient for s in stages], dtype=np.int64)
        during = tail + self.gradient + input_gradient + backward
        self.reverse = np.maximum(np.maximum(during, tail + self.gradient), input_gradient)
        self.last = np.maximum(self.reverse, self.tape + self.gradient)  # the loss reads its output
        self.taping = self.tape + taping
        self.tail_taping = tail + taping
        self.running = self.output + transient
        self._running_on = np.concatenate([[0], self.output[:-1]]) + self.running

    def running_to(self, start: int, end: int) -> Ints:
        """Element k: the most that running stages start ... start + k without taping needs; up to stage ``end``."""
        needs = self._running_on[start : end + 1].copy()
        needs[0] = self.running[start]
        return np.maximum.accumulate(needs)

    def keep(self, start: int, end: int) -> int:
        """What keeping stage ``start`` needs in the replay of start ... end, whose output's gradient is there."""
        making = self.tail_taping[start] if start == end else self.taping[start]
        return int(max(self.reverse[start], making + self.gradient[end]))
