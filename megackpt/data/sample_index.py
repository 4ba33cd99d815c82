"""The order of samples: which tokens make up sample i.

Documents are laid end to end, one shuffled epoch after another, into one endless stream:

    epoch 0                         epoch 1
    |doc 7   |doc 2|doc 5      |... |doc 1 |doc 7   |...
    |--- sample 0 ---|--- sample 1 ---|--- sample 2 ---|        sample j starts at token j * seq_length
                     ^ shared token                             and has seq_length + 1 of them

The samples that start in one epoch are then shuffled among themselves. Every step is a pure function of (seed,
epoch), so the order does not depend on how many samples a run asks for: a longer run begins with a shorter one,
and the number of consumed samples is all the state there is. (Megatron-LM shuffles over all epochs at once, so
its order changes with --train-iters.) Every token is a label once per epoch, but for the very first.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megackpt.data.cache import Arrays, cached_arrays
from megackpt.data.hashing import epoch_permutations, permutation, shuffle_within_groups

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Lengths = NDArray[np.signedinteger[Any]]

_FORMAT = 2  # part of every key: raise it when the order changes
_CHUNK = 1 << 16  # documents, and samples, looked at at once: they stay in the processor's cache
_LEVELS = 2  # documents are looked at in groups of up to 2**2, where samples are rarer than they


@dataclass(frozen=True)
class SampleIndex:
    """Three 64-bit arrays; sample i of the run is stream sample `shuffle[i]`."""

    documents: Int64
    """[stream documents] document ids in stream order, over all epochs that were built."""
    starts: Int64
    """[stream samples + 1, 2] where each stream sample starts: (position in `documents`, token offset there)."""
    shuffle: Int64
    """[samples] stream sample of every sample of the run."""

    def __len__(self) -> int:
        return len(self.shuffle)


def samples_per_epoch(tokens: int, seq_length: int) -> int:
    """Whole samples in one pass over `tokens` tokens: the first token is never a label."""
    return max(0, (tokens - 1) // seq_length)


def build_sample_index(
    lengths: Int32 | Int64,
    documents: range,
    seq_length: int,
    seed: int,
    samples: int | None,
    cache_directory: str | os.PathLike[str] | None = None,
) -> SampleIndex:
    """Index of `samples` samples of seq_length + 1 tokens over the documents in `documents`.

    `lengths` is the token count of every document of the file. `samples` None means the whole samples of one
    epoch. The documents must hold at least seq_length + 1 tokens together (ValueError otherwise).
    """
    own = lengths[documents.start : documents.stop]
    tokens = int(own.sum(dtype=np.int64))
    if tokens < seq_length + 1:
        raise ValueError(f"{tokens} tokens cannot fill a sample of {seq_length + 1}")
    count = samples_per_epoch(tokens, seq_length) if samples is None else samples
    epochs = max(1, epochs_needed(tokens, seq_length, count))
    key = None
    if cache_directory is not None:
        key = {
            "what": "samples",
            "format": _FORMAT,
            "lengths": hashlib.blake2b(own.astype(np.int64).data, digest_size=16).hexdigest(),
            "first_document": documents.start,
            "seq_length": seq_length,
            "seed": seed,
            "epochs": epochs,
        }
    arrays = cached_arrays(cache_directory, key, lambda: _build(own, documents.start, seq_length, seed, epochs))
    return SampleIndex(arrays["documents"], arrays["starts"], arrays["shuffle"][:count])


def epochs_needed(tokens: int, seq_length: int, samples: int) -> int:
    """Fewest epochs in which `samples` samples start: ceil(epochs * tokens / seq_length) >= samples."""
    return 0 if samples <= 0 else (samples - 1) * seq_length // tokens + 1


def _build(own: Int32 | Int64, first_document: int, seq_length: int, seed: int, epochs: int) -> Arrays:
    tokens = int(own.sum(dtype=np.int64))
    # Epoch e owns the samples whose first token lies in it: bounds are ceil(e * tokens / seq_length).
    bounds = -(-(np.arange(epochs + 1, dtype=np.int64) * tokens) // seq_length)
    order = _document_order(own, seq_length, seed, epochs)
    starts, used = _sample_starts(own, order, seq_length, int(bounds[-1]))
    documents = order[:used]
    documents += first_document
    return {"documents": documents, "starts": starts, "shuffle": shuffle_within_groups(seed, "samples", bounds)}


def _document_order(own: Int32 | Int64, seq_length: int, seed: int, epochs: int) -> Int64:
    """Documents of all epochs, and the first ones of the next: the last sample of the last epoch runs into it."""
    n, count = len(own), 64
    while True:
        tail = permutation(seed, "documents", epochs, n, np.empty(min(n, count), dtype=np.int64))
        if count >= n or int(own[tail].sum(dtype=np.int64)) > seq_length:  # all of an epoch is always enough
            break
        count *= 8
    order = np.empty(epochs * n + len(tail), dtype=np.int64)
    epoch_permutations(seed, "documents", epochs, n, out=order[: epochs * n].reshape(epochs, n))
    order[epochs * n :] = tail
    return order


def _sample_starts(own: Int32 | Int64, order: Int64, seq_length: int, count: int) -> tuple[Int64, int]:
    """Where samples 0 … count start, and how many documents of the order that takes.

    Chunk by chunk, in 32 bits wherever the tokens of a chunk can be counted with them.
    """
    starts = np.empty((count + 1, 2), dtype=np.int64)
    levels = min(_LEVELS, (len(order) // (8 * count + 8)).bit_length())
    whole = -(-min(_CHUNK, len(order)) >> levels) << levels  # documents, so many that pairs come out even
    sizes = np.zeros(whole, dtype=own.dtype)
    longest, limit = int(own.max()), 2**31 - seq_length
    filled = before = 0  # samples placed, tokens of the chunks before
    for first in range(0, len(order), _CHUNK):
        part = order[first : first + _CHUNK]
        own.take(part, out=sizes[: len(part)], mode="clip")  # (clip: no copy of `out`; all indices are valid)
        sizes[len(part) :] = 0
        narrow = longest * len(part) < limit or int(sizes.sum(dtype=np.int64)) < limit
        tree = _pair_sums(sizes, levels, np.int32 if narrow else np.int64)
        edges = np.zeros(len(tree[-1]) + 1, dtype=tree[-1].dtype)  # tokens of the chunk before each group
        tree[-1].cumsum(out=edges[1:])
        after = before + int(edges[-1])
        stop = min(count + 1, -(-after // seq_length))
        for low in range(filled, stop, _CHUNK):  # one round, unless documents are longer than samples
            part_of_starts = starts[low : min(stop, low + _CHUNK)]
            _place(tree, edges, low * seq_length - before, seq_length, first, part_of_starts)
        filled, before = stop, after
        if filled > count:
            break
    assert filled == count + 1
    return starts, int(starts[count, 0]) + 1


def _pair_sums(sizes: Lengths, levels: int, width: type[np.signedinteger[Any]]) -> list[Lengths]:
    """`sizes`, the sums of its pairs, the sums of their pairs, …: `levels` + 1 arrays, the last one of `width`."""
    tree = [sizes if levels else sizes.astype(width, copy=False)]
    for _ in range(levels):
        tree.append(np.add(tree[-1][::2], tree[-1][1::2], dtype=width))
    return tree


def _place(tree: list[Lengths], edges: Lengths, offset: int, seq_length: int, first: int, out: Int64) -> None:
    """Fill `out`, int64 [samples, 2], with the starts of samples, the first of them `offset` tokens into the chunk.

    `tree` is the chunk's documents and their pair sums, `edges` where the groups of its last level begin, `first`
    the number of documents before the chunk. A sample is found in its group, then in the halves of the group: most
    documents are only ever added up.
    """
    token = np.arange(offset, offset + len(out) * seq_length, seq_length, dtype=edges.dtype)
    skipped, last = edges[1:].searchsorted(token[[0, -1]], side="right").tolist()
    position = _holders(edges[skipped : last + 2], offset, seq_length, len(out))
    position += skipped
    token -= edges.take(position, mode="clip")
    for sizes in reversed(tree[:-1]):
        position *= 2
        size = sizes.take(position, mode="clip").astype(token.dtype, copy=False)
        behind = token >= size
        position += behind
        token -= size * behind
    np.add(position, first, out=out[:, 0])
    out[:, 1] = token


def _holders(edges: Lengths, offset: int, seq_length: int, count: int) -> Int64:
    """Which group holds the first token of each of `count` samples, the first of which is `offset`.

    `edges` are the tokens before each group and, last, before what follows; the first group holds the first
    sample, the last one the last. The first group that ends behind a token holds it; empty ones never do.
    """
    begun = edges + edges.dtype.type(seq_length - 1 - offset)
    begun //= edges.dtype.type(seq_length)  # samples that begin before each edge
    begun[0], begun[-1] = 0, count
    if 2 * count < len(edges):  # few: look for the groups in which one begins
        holders = np.flatnonzero(begun[1:] != begun[:-1])
        return holders if len(holders) == count else holders.repeat(begun.take(holders + 1) - begun.take(holders))
    ended = np.bincount(begun[1:], minlength=count)[:count]  # groups that end after one sample's start, by the next
    return ended.cumsum(out=ended)
