"""What is in an indexed dataset: figures, and what is wrong with it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megackpt.data.entropy import add_counts, unigram_entropy
from megackpt.data.indexed import IndexedDataset
from megackpt.data.tokenizer import Tokenizer

_CHUNK = 1 << 22  # tokens looked at at once
_LARGEST_VOCABULARY = 1 << 24  # ids above it are no vocabulary, and are not counted one by one
_PERCENTILES = (0, 5, 50, 95, 100)


@dataclass(frozen=True)
class Inspection:
    """Figures of one dataset; `problems` are sentences, none if it can be trained on."""

    prefix: str
    dtype: str
    documents: int
    sequences: int
    tokens: int
    data_bytes: int
    empty: int
    """Documents without a token."""
    lengths: tuple[int, ...]
    """Tokens per document: minimum, 5th percentile, median, 95th percentile, maximum; () without documents."""
    smallest: int
    largest: int
    """Token ids; 0 and -1 if there are none."""
    distinct: int
    entropy: float
    """Of single tokens, in nats."""
    ends: int | None
    """Documents that end with the tokenizer's end-of-document token; None without such a token."""
    problems: tuple[str, ...]


def inspect(prefix: str | os.PathLike[str], tokenizer: Tokenizer | None = None) -> Inspection:
    """Read the whole of a dataset.  Raises UsageError if its files contradict each other or cannot be opened."""
    indexed = IndexedDataset(prefix)
    counts = np.zeros(0, dtype=np.int64)
    smallest, largest = 0, -1
    for chunk in _chunks(indexed):
        low, high = int(chunk.min()), int(chunk.max())
        smallest, largest = (low, high) if largest < 0 else (min(smallest, low), max(largest, high))
        if smallest >= 0 and largest < _LARGEST_VOCABULARY:
            counts = add_counts(counts, np.bincount(chunk.astype(np.int64)))
    used_bytes = indexed.total_tokens * indexed.dtype.itemsize
    data_bytes = os.stat(indexed.prefix + ".bin").st_size
    lengths = indexed.lengths
    quantiles = tuple(int(x) for x in np.percentile(lengths, _PERCENTILES, method="nearest")) if len(lengths) else ()
    problems = list(_problems(indexed, smallest, largest, tokenizer))
    if data_bytes != used_bytes:
        problems.append(f"the .bin file has {data_bytes} bytes, of which the documents are {used_bytes}")
    return Inspection(
        prefix=indexed.prefix,
        dtype=str(indexed.dtype),
        documents=len(indexed),
        sequences=len(indexed.sequence_lengths),
        tokens=indexed.total_tokens,
        data_bytes=data_bytes,
        empty=int((lengths == 0).sum()),
        lengths=quantiles,
        smallest=smallest,
        largest=largest,
        distinct=int((counts > 0).sum()),
        entropy=unigram_entropy(counts),
        ends=_ends(indexed, tokenizer),
        problems=tuple(problems),
    )


def _chunks(indexed: IndexedDataset) -> Iterator[NDArray[np.generic]]:
    for run in indexed.runs():
        for first in range(0, len(run), _CHUNK):
            yield run[first : first + _CHUNK]


def _problems(indexed: IndexedDataset, smallest: int, largest: int, tokenizer: Tokenizer | None) -> Iterator[str]:
    if indexed.total_tokens == 0:
        yield "there is not a single token"
    if smallest < 0:
        yield f"token ids go down to {smallest}: ids are never negative"
    if largest >= _LARGEST_VOCABULARY:
        yield f"token ids go up to {largest}: no vocabulary is that large"
    elif tokenizer is not None and largest >= tokenizer.vocab_size:
        yield f"token ids go up to {largest}, but the tokenizer has {tokenizer.vocab_size}: it is another one"


def _ends(indexed: IndexedDataset, tokenizer: Tokenizer | None) -> int | None:
    """Documents whose last token is the end-of-document token."""
    if tokenizer is None or tokenizer.special.eod is None:
        return None
    return int((indexed.last_tokens().astype(np.int64) == tokenizer.special.eod).sum())


def sample_documents(indexed: IndexedDataset, count: int) -> list[int]:
    """Numbers of `count` documents with tokens, spread evenly from the first to the last."""
    filled = np.flatnonzero(indexed.lengths)
    if count <= 0 or len(filled) == 0:
        return []
    places = np.linspace(0, len(filled) - 1, min(count, len(filled))).round().astype(np.int64)
    return [int(d) for d in filled[places]]
