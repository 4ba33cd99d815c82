"""Samples of seq_length + 1 tokens from a document range of one indexed dataset."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megackpt.config.errors import UsageError
from megackpt.data.dataset import Sample, fingerprint_of, segment_ids, training_sample
from megackpt.data.indexed import IndexedDataset
from megackpt.data.sample_index import SampleIndex, build_sample_index


@dataclass(frozen=True)
class SampleFormat:
    """How a sample is cut and masked; the same for all splits of a run."""

    seq_length: int
    """Tokens per sample; seq_length + 1 are read."""
    vocab_size: int | None = None
    """Ids in the data must be below it; None means unchecked."""
    eod: int | None = None
    """End-of-document id; None if the tokenizer has none."""
    pad: int | None = None
    """Labels with this id do not count in the loss; None if the tokenizer has none."""
    eod_mask_loss: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    """Samples say which document each token belongs to (`segments`)."""

    def __post_init__(self) -> None:
        if self.seq_length < 1:
            raise UsageError(f"--seq-length {self.seq_length} must be at least 1")
        for flag, wanted in (
            ("--eod-mask-loss", self.eod_mask_loss),
            ("--reset-position-ids", self.reset_position_ids),
            ("--reset-attention-mask", self.reset_attention_mask),
        ):
            if wanted and self.eod is None:
                raise UsageError(f"{flag} needs a tokenizer with an end-of-document token, this one has none")


def order_fingerprint(indexed: IndexedDataset, documents: range, sample_format: SampleFormat, seed: int) -> str:
    """Digest of what decides the order of samples, independent of path, cache and number of samples."""
    return fingerprint_of(
        {
            "lengths": indexed.digest(),
            "documents": [documents.start, documents.stop],
            "seq_length": sample_format.seq_length,
            "seed": seed,
        }
    )


class GPTDataset:
    """`samples` samples over `documents` of an indexed dataset, in the order of `sample_index`.

    Raises ValueError if the documents hold fewer than seq_length + 1 tokens.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        documents: range,
        sample_format: SampleFormat,
        seed: int,
        samples: int | None = None,
        cache_directory: str | os.PathLike[str] | None = None,
    ) -> None:
        self.indexed = indexed
        self.format = sample_format
        self.index: SampleIndex = build_sample_index(
            indexed.lengths, documents, sample_format.seq_length, seed, samples, cache_directory
        )
        self.fingerprint = order_fingerprint(indexed, documents, sample_format, seed)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        text = self.text(int(self.index.shuffle[index]))
        limit = self.format.vocab_size
        if limit is not None and (int(text.max()) >= limit or int(text.min()) < 0):
            raise UsageError(
                f"{self.indexed.prefix}: holds token ids from {int(text.min())} to {int(text.max())}, but there are"
                f" {limit} ids: was it made with another tokenizer (--tokenizer-model, --vocab-size)?"
            )
        form = self.format
        sample = training_sample(text, form.eod, form.pad, form.eod_mask_loss, form.reset_position_ids)
        if form.reset_attention_mask:
            sample["segments"] = segment_ids(sample["tokens"], form.eod)
        return sample

    def text(self, stream_sample: int) -> NDArray[np.int64]:
        """The seq_length + 1 tokens of a sample by its place in the stream, before shuffling."""
        position, offset = (int(x) for x in self.index.starts[stream_sample])
        out = np.empty(self.format.seq_length + 1, dtype=np.int64)
        filled = 0
        while filled < len(out):
            document = int(self.index.documents[position])
            take = min(int(self.indexed.lengths[document]) - offset, len(out) - filled)
            out[filled : filled + take] = self.indexed.get(document, offset, take)
            filled += take
            position += 1
            offset = 0
        return out
