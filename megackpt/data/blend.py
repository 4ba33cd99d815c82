"""Blending: `--data-path 30 A 70 B` takes three samples of A for every seven of B.

A weight is a share of *samples*: after N samples, set k has given w_k * N of them, to within less than one, at
every N and for any number of sets. (Weights say nothing about the sizes of the sets; a small set with a large
weight is repeated.) The rule is Tijdeman's (The chairman assignment problem, 1980): among the sets whose deficit
w_k * N - given_k has reached 1/(2K - 2), serve the one whose next sample is due first. Choosing the largest
deficit, as is common, keeps that bound for few sets only.

The choice at N depends on the weights alone, so a longer run begins with a shorter one.
"""

from __future__ import annotations

import heapq
import math
import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megackpt.data.cache import Arrays, cached_arrays
from megackpt.data.dataset import Sample, SampleDataset

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]

_SHORT = 20_000  # samples that are ordered one by one
_WARM_UP = 128  # samples before a block from which on its guess is put right
_ROUNDS = 8  # after which what is not right yet is ordered one by one


def blend_order(weights: Sequence[float], samples: int) -> Int64:
    """Which set each of `samples` samples comes from: int64 [samples]. `weights` sum to 1; zero means never.

    The rule knows no short cut: who is served depends on who was. But all that it remembers is how many samples each
    set has given, and that is known to within one at any place. So long orders are made in blocks, all at once, from
    guesses of what was given before each; a guess is right if it is what the block before leaves, and a block with a
    wrong one is made again.
    """
    chosen = np.flatnonzero(np.asarray(weights, dtype=np.float64) > 0)
    if len(chosen) == 1:
        return np.full(samples, chosen[0], dtype=np.int64)
    rule = _Rule([float(weights[int(k)]) for k in chosen])
    length = math.isqrt(samples)
    if samples < _SHORT:
        return chosen[rule.one_by_one([0] * len(chosen), 0, samples)]
    first = np.arange(0, samples, length)
    given = rule.guess(np.maximum(first - _WARM_UP, 0))
    rule.blocks(given, np.maximum(first - _WARM_UP, 0), np.minimum(first, _WARM_UP))
    start, order = given.copy(), np.empty((len(first), length), dtype=np.int64)
    start[0] = 0
    wrong = np.arange(len(first))
    for _ in range(_ROUNDS):
        given = start[wrong]
        order[wrong] = rule.blocks(given, first[wrong], np.full(len(wrong), length))
        ends = start + np.stack([(order == k).sum(axis=1) for k in range(len(chosen))], axis=1)
        wrong = 1 + np.flatnonzero((ends[:-1] != start[1:]).any(axis=1))
        if not len(wrong):
            return chosen[order.reshape(-1)[:samples]]
        start[wrong] = ends[wrong - 1]
    place = int(first[wrong[0]])
    rest = rule.one_by_one(start[wrong[0]].astype(int).tolist(), place, samples - place)
    return chosen[np.concatenate([order.reshape(-1)[:place], rest])]


class _Rule:
    """Tijdeman's rule for two or more positive weights."""

    def __init__(self, weights: Sequence[float]) -> None:
        self.weights = weights
        self.threshold = 1.0 / (2 * len(weights) - 2)

    def one_by_one(self, given: list[int], first: int, count: int) -> Int64:
        """The sets of samples first + 1 … first + count, where each set has given so many before."""
        weights, threshold = self.weights, self.threshold
        # The next sample of set k may be given from N = (given + threshold) / w on, and is due by
        # N = (given + 1 - threshold) / w, N counted with the sample itself.
        waiting = [((given[k] + threshold) / weights[k], k) for k in range(len(weights))]
        heapq.heapify(waiting)
        ready: list[tuple[float, int]] = []
        out = np.empty(count, dtype=np.int64)
        for n in range(first + 1, first + count + 1):
            # `not ready` is for rounding only: some set always has a deficit of at least the mean.
            while waiting and (waiting[0][0] <= n or not ready):
                k = heapq.heappop(waiting)[1]
                heapq.heappush(ready, ((given[k] + 1 - threshold) / weights[k], k))
            k = heapq.heappop(ready)[1]
            out[n - first - 1] = k
            given[k] += 1
            heapq.heappush(waiting, ((given[k] + threshold) / weights[k], k))
        return out

    def blocks(self, given: Float64, first: Int64, counts: Int64) -> Int64:
        """The same for several beginnings at once: int64 [blocks, counts.max()]; what lies beyond a block's count is
        not set. `given` [blocks, sets] is brought up to date."""
        weights, threshold = np.array(self.weights), self.threshold
        out = np.empty((len(first), int(counts.max())), dtype=np.int64)
        order = np.argsort(-counts, kind="stable")  # those still at work are the first ones
        now = given[order]
        release, due = (now + threshold) / weights, (now + 1 - threshold) / weights
        at_work = np.searchsorted(-counts[order], -np.arange(1, out.shape[1] + 1), side="right").tolist()
        for step, working in enumerate(at_work):
            n, rows = first[order[:working]] + (step + 1), np.arange(working)
            k = np.where(release[:working] <= n[:, None], due[:working], np.inf).argmin(axis=1)
            none = np.flatnonzero(release[rows, k] > n)
            k[none] = release[none].argmin(axis=1)
            out[order[:working], step] = k
            now[rows, k] += 1
            served, weight = now[rows, k], weights[k]
            release[rows, k], due[rows, k] = (served + threshold) / weight, (served + 1 - threshold) / weight
        given[order] = now
        return out

    def guess(self, samples: Int64) -> Float64:
        """How many each set may have given after so many samples: as if served in the order of what is due."""
        weights = np.array(self.weights)
        low, high = samples.astype(np.float64), samples + 1.0 * len(weights)
        for _ in range(60):
            middle = (low + high) / 2
            enough = np.floor(middle[:, None] * weights + self.threshold).sum(axis=1) >= samples
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        given = np.floor(high[:, None] * weights + self.threshold)
        for k in range(len(weights)):  # several may be due at the same time
            given[:, k] -= np.minimum(given[:, k], np.maximum(0, given.sum(axis=1) - samples)).clip(0, 1)
        return given


def cached_blend_order(weights: Sequence[float], samples: int, cache_directory: str | os.PathLike[str] | None) -> Int64:
    """`blend_order` through the index cache."""

    def build() -> Arrays:
        return {"sets": blend_order(weights, samples)}

    # repr of a float is exact, so the key is too.
    key = {"what": "blend", "format": 1, "weights": [repr(float(w)) for w in weights], "samples": samples}
    return cached_arrays(cache_directory, key, build)["sets"]


class BlendedDataset:
    """Samples of several datasets in the order of `sets`; a set that gives no sample may be None."""

    def __init__(self, sets: Int64, datasets: Sequence[SampleDataset | None], fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self._sets = sets
        self._datasets = tuple(datasets)
        self._within = np.empty(len(sets), dtype=np.int64)  # sample number inside its own set
        for k, dataset in enumerate(self._datasets):
            where = np.flatnonzero(sets == k)
            if len(where) > (0 if dataset is None else len(dataset)):
                raise ValueError(f"set {k} must give {len(where)} samples and has fewer")
            self._within[where] = np.arange(len(where))

    def __len__(self) -> int:
        return len(self._sets)

    def __getitem__(self, index: int) -> Sample:
        dataset = self._datasets[int(self._sets[index])]
        if dataset is None:
            raise IndexError(f"sample {index} belongs to a set that was not built")
        return dataset[int(self._within[index])]
