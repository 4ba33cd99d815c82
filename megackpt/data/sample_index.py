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

import numpy as np
from numpy.typing import NDArray

from megackpt.data.cache import Arrays, cached_arrays
from megackpt.data.hashing import epoch_permutations, shuffle_within_groups

Int64 = NDArray[np.int64]

_FORMAT = 1  # part of every key: raise it when the order changes


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
    lengths: Int64,
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
    own = np.ascontiguousarray(lengths[documents.start : documents.stop], dtype=np.int64)
    tokens = int(own.sum())
    if tokens < seq_length + 1:
        raise ValueError(f"{tokens} tokens cannot fill a sample of {seq_length + 1}")
    count = samples_per_epoch(tokens, seq_length) if samples is None else samples
    epochs = max(1, epochs_needed(tokens, seq_length, count))
    key = {
        "what": "samples",
        "format": _FORMAT,
        "lengths": hashlib.blake2b(own.tobytes(), digest_size=16).hexdigest(),
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


def _build(own: Int64, first_document: int, seq_length: int, seed: int, epochs: int) -> Arrays:
    tokens = int(own.sum())
    # The last sample of the last epoch runs into the next one; tokens > seq_length, so one more is enough.
    order = epoch_permutations(seed, "documents", epochs + 1, len(own)).reshape(-1)
    # Epoch e owns the samples whose first token lies in it: bounds are ceil(e * tokens / seq_length).
    bounds = -(-(np.arange(epochs + 1, dtype=np.int64) * tokens) // seq_length)
    count = int(bounds[-1])

    lengths = own[order]
    ends = np.cumsum(lengths)
    token = np.arange(count + 1, dtype=np.int64) * seq_length
    # The first document that ends behind the token holds it; empty documents never do.
    position = np.searchsorted(ends, token, side="right")
    offset = token - (ends[position] - lengths[position])
    used = int(np.searchsorted(ends, count * seq_length, side="right")) + 1
    return {
        "documents": order[:used] + first_document,
        "starts": np.stack([position, offset], axis=1),
        "shuffle": shuffle_within_groups(seed, "samples", bounds),
    }
