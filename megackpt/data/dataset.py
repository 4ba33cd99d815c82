"""What a dataset is to the rest of the program: numbered samples, and a fingerprint of their order.

A sample is a dictionary of arrays of length s = seq_length, see `training_sample`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megackpt.data.cache import digest

Sample = dict[str, NDArray[Any]]
"""tokens, labels, position_ids: int64 [s]; loss_mask: float32 [s]; with --reset-attention-mask segments: int64 [s]"""
Batch = dict[str, NDArray[Any]]
"""the same, [b, s]"""


class SampleDataset(Protocol):
    """A finite, numbered sequence of samples; reading one neither depends on nor changes any state."""

    @property
    def fingerprint(self) -> str:
        """Digest of all that decides which sample has which number, except how many there are."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


def fingerprint_of(facts: Mapping[str, Any]) -> str:
    """Digest of JSON-able facts, the same in every process and on every machine."""
    return digest(facts)


def position_ids(tokens: NDArray[np.int64], eod: int | None, reset: bool) -> NDArray[np.int64]:
    """0 … s-1, or counted anew after every end-of-document token when `reset`: [A B eod C D] -> 0 1 2 0 1."""
    positions = np.arange(len(tokens), dtype=np.int64)
    if not reset or eod is None:
        return positions
    starts = np.zeros(len(tokens), dtype=np.int64)
    starts[1:] = np.where(tokens[:-1] == eod, positions[1:], 0)
    return positions - np.maximum.accumulate(starts)


def segment_ids(tokens: NDArray[np.int64], eod: int | None) -> NDArray[np.int64]:
    """Number of the document, within the sample, that each token belongs to; an eod closes its own document.

    Two tokens may attend to each other under --reset-attention-mask exactly if their numbers are equal.
    """
    segments = np.zeros(len(tokens), dtype=np.int64)
    if eod is not None:
        np.cumsum(tokens[:-1] == eod, out=segments[1:])
    return segments


def document_lengths(segments: NDArray[np.int64]) -> list[list[int]]:
    """Tokens of each document of each sample, in order, of segment numbers [b, s]."""
    return [np.bincount(row).tolist() for row in segments]


def training_sample(
    text: NDArray[np.int64],
    eod: int | None = None,
    pad: int | None = None,
    eod_mask_loss: bool = False,
    reset_position_ids: bool = False,
) -> Sample:
    """tokens, labels, loss_mask, position_ids of the s + 1 tokens in `text`.

    The loss at a position counts (1.0) unless the label is `pad`, or unless `eod_mask_loss` and the *input* is
    the end of a document: what begins the next document cannot be predicted from this one.
    """
    tokens, labels = text[:-1], text[1:]
    mask = np.ones(len(tokens), dtype=np.float32)
    if eod_mask_loss and eod is not None:
        mask[tokens == eod] = 0.0
    if pad is not None and pad != eod:
        mask[labels == pad] = 0.0
    return {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": mask,
        "position_ids": position_ids(tokens, eod, reset_position_ids),
    }


def collate(samples: Sequence[Sample]) -> Batch:
    """Stack samples into contiguous arrays [b, s]."""
    return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
