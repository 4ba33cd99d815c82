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
import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megackpt.data.cache import Arrays, cached_arrays
from megackpt.data.dataset import Sample, SampleDataset

Int64 = NDArray[np.int64]


def blend_order(weights: Sequence[float], samples: int) -> Int64:
    """Which set each of `samples` samples comes from: int64 [samples]. `weights` sum to 1; zero means never.

    About a microsecond per sample; callers cache the result.
    """
    chosen = [k for k, weight in enumerate(weights) if weight > 0]
    if len(chosen) == 1:
        return np.full(samples, chosen[0], dtype=np.int64)
    threshold = 1.0 / (2 * len(chosen) - 2)
    given = dict.fromkeys(chosen, 0)
    # The next sample of set k may be given from N = (given + threshold) / w on, and is due by
    # N = (given + 1 - threshold) / w, N counted with the sample itself.
    waiting = [(threshold / weights[k], k) for k in chosen]
    heapq.heapify(waiting)
    ready: list[tuple[float, int]] = []
    out = np.empty(samples, dtype=np.int64)
    for n in range(1, samples + 1):
        # `not ready` is for rounding only: some set always has a deficit of at least the mean.
        while waiting and (waiting[0][0] <= n or not ready):
            k = heapq.heappop(waiting)[1]
            heapq.heappush(ready, ((given[k] + 1 - threshold) / weights[k], k))
        k = heapq.heappop(ready)[1]
        out[n - 1] = k
        given[k] += 1
        heapq.heappush(waiting, ((given[k] + threshold) / weights[k], k))
    return out


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
