"""Unigram entropy of a tokenised corpus: the loss of the best model that looks at no context.

A language model whose validation loss is below it has learned something about context.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megackpt.data.indexed import IndexedDataset

_CHUNK = 1 << 24  # tokens counted at once


@dataclass(frozen=True)
class UnigramStatistics:
    tokens: int
    distinct: int
    """Number of different ids that occur."""
    entropy: float
    """Nats per token."""


def unigram_entropy(counts: NDArray[np.int64]) -> float:
    """Entropy in nats of the distribution that `counts` (one per id, zeros allowed) describes; 0.0 if empty."""
    used = counts[counts > 0].astype(np.float64)
    if len(used) == 0:
        return 0.0
    share = used / used.sum()
    return float(max(0.0, -(share * np.log(share)).sum()))


def token_counts(indexed: IndexedDataset, documents: range | None = None) -> NDArray[np.int64]:
    """Occurrences of every id in the documents (default all): int64 [largest id + 1]. Ids must not be negative."""
    counts = np.zeros(0, dtype=np.int64)
    for part in _chunks(indexed, documents if documents is not None else range(len(indexed))):
        counts = add_counts(counts, np.bincount(part.astype(np.int64)))
    return counts


def _chunks(indexed: IndexedDataset, documents: range) -> Iterator[NDArray[np.generic]]:
    """The tokens of the documents in pieces of about _CHUNK, whatever the lengths of the documents."""
    held: list[NDArray[np.generic]] = []
    size = 0
    for document in documents:
        length = int(indexed.lengths[document])
        for start in range(0, length, _CHUNK):
            held.append(indexed.get(document, start, min(_CHUNK, length - start)))
            size += len(held[-1])
            if size >= _CHUNK:
                yield np.concatenate(held)
                held, size = [], 0
    if held:
        yield np.concatenate(held)


def add_counts(a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sum of two count arrays of different lengths."""
    longer, shorter = (a, b) if len(a) >= len(b) else (b, a)
    total = longer.copy()
    total[: len(shorter)] += shorter
    return total


def corpus_statistics(prefixes: Sequence[str | os.PathLike[str]]) -> UnigramStatistics:
    """Statistics over all documents of one or several indexed datasets."""
    total = np.zeros(0, dtype=np.int64)
    for prefix in prefixes:
        total = add_counts(total, token_counts(IndexedDataset(prefix)))
    return UnigramStatistics(int(total.sum()), int((total > 0).sum()), unigram_entropy(total))
