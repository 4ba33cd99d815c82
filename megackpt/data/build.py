"""From flags to datasets: the one place where splits, blends, indices and the cache meet."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megackpt.config.data import parse_data_path, parse_split
from megackpt.config.errors import UsageError
from megackpt.data.blend import BlendedDataset, cached_blend_order
from megackpt.data.dataset import SampleDataset, fingerprint_of
from megackpt.data.gpt_dataset import GPTDataset, SampleFormat, order_fingerprint
from megackpt.data.indexed import IndexedDataset
from megackpt.data.mock import MockDataset
from megackpt.data.split import SPLITS, split_documents

_CACHE_NAME = "megackpt-cache"


@dataclass(frozen=True)
class SampleCounts:
    """How many samples each split must be able to give; 0 means that the split is not built."""

    train: int
    valid: int = 0
    test: int = 0

    @classmethod
    def of_run(
        cls, train_samples: int, global_batch: int, eval_iters: int, evaluations: int, test: bool = True
    ) -> SampleCounts:
        """Counts for `evaluations` evaluations of `eval_iters` global batches each, and one test."""
        each = eval_iters * global_batch
        return cls(train_samples, each * evaluations, each if test else 0)


@dataclass(frozen=True)
class Datasets:
    """The three splits; valid and test are None if not asked for or too small, and `notes` says why."""

    train: SampleDataset
    valid: SampleDataset | None
    test: SampleDataset | None
    description: str
    """What the data is, in the user's words."""
    notes: tuple[str, ...] = ()
    """Sentences for rank 0 to print."""


@dataclass(frozen=True)
class _Source:
    """One set of the blend: its share of the samples and the documents each split has of it."""

    weight: float
    indexed: IndexedDataset
    documents: dict[str, range]
    cache_directory: str


def build_datasets(
    data_path: Sequence[str],
    split: str,
    counts: SampleCounts,
    sample_format: SampleFormat,
    seed: int,
    data_cache_path: str | os.PathLike[str] | None = None,
) -> Datasets:
    """Training, validation and test data of `--data-path` (one prefix, or `w1 p1 w2 p2 …`) cut by `--split`.

    May be called by all ranks at once, without any order among them. Index arrays are cached in
    `data_cache_path`, or in `megackpt-cache` beside the data. Raises UsageError if the training split cannot fill
    one sample; a validation or test split that cannot is left out, with a note.
    """
    pairs = parse_data_path(data_path)
    shares = parse_split(split)
    sources = []
    for weight, prefix in pairs:
        indexed = IndexedDataset(prefix)
        beside = os.path.join(os.path.dirname(os.path.abspath(prefix)), _CACHE_NAME)
        cache = os.fspath(data_cache_path) if data_cache_path else beside
        sources.append(_Source(weight, indexed, dict(split_documents(shares, len(indexed))), cache))
    built: dict[str, SampleDataset | None] = {}
    notes: list[str] = []
    for name in SPLITS:
        built[name] = _build_split(name, getattr(counts, name), sources, sample_format, seed, split, notes)
    train = built["train"]
    if train is None:
        raise UsageError(f"no training samples are asked for (train samples {counts.train})")
    return Datasets(train, built["valid"], built["test"], " ".join(data_path), tuple(notes))


def build_mock_datasets(counts: SampleCounts, seq_length: int, vocab_size: int, seed: int) -> Datasets:
    """`--mock-data`: the three splits follow one rule and never share a sample."""
    made: dict[str, MockDataset | None] = {}
    for name in SPLITS:
        samples = getattr(counts, name)
        made[name] = MockDataset(samples, seq_length, vocab_size, seed, name) if samples > 0 else None
    train = made["train"]
    if train is None:
        raise UsageError(f"no training samples are asked for (train samples {counts.train})")
    note = f"mock data: a model that learns its rule reaches a loss of {train.entropy():.4f} nats per token"
    return Datasets(train, made["valid"], made["test"], "mock data", (note,))


def _build_split(
    name: str,
    samples: int,
    sources: Sequence[_Source],
    sample_format: SampleFormat,
    seed: int,
    split: str,
    notes: list[str],
) -> SampleDataset | None:
    if samples <= 0:
        return None
    usable = [source for source in sources if source.weight > 0]
    for source in list(usable):
        problem = _too_small(name, source, sample_format.seq_length, split)
        if problem is None:
            continue
        if name == "train":
            raise UsageError(f"{problem}; use more data, a larger share for training, or a smaller --seq-length")
        usable.remove(source)
        notes.append(f"{problem}: it is left out of {name}")
    if not usable:
        notes.append(f"there is no {name} data, so nothing is evaluated on it")
        return None
    if len(usable) == 1:
        only = usable[0]
        return GPTDataset(only.indexed, only.documents[name], sample_format, seed, samples, only.cache_directory)
    total = sum(source.weight for source in usable)
    weights = [source.weight / total for source in usable]
    return _blend(name, samples, usable, weights, sample_format, seed)


def _blend(
    name: str,
    samples: int,
    sources: Sequence[_Source],
    weights: Sequence[float],
    sample_format: SampleFormat,
    seed: int,
) -> BlendedDataset:
    sets = cached_blend_order(weights, samples, sources[0].cache_directory)
    datasets: list[SampleDataset | None] = []
    for k, source in enumerate(sources):
        # Exactly what the blend takes: a set with a tiny weight may give nothing and is not built.
        needed = int((sets == k).sum())
        documents = source.documents[name]
        datasets.append(
            GPTDataset(source.indexed, documents, sample_format, seed, needed, source.cache_directory)
            if needed
            else None
        )
    orders = [order_fingerprint(s.indexed, s.documents[name], sample_format, seed) for s in sources]
    facts = {"sets": orders, "weights": [repr(float(weight)) for weight in weights]}
    return BlendedDataset(sets, datasets, fingerprint_of(facts))


def _too_small(name: str, source: _Source, seq_length: int, split: str) -> str | None:
    documents = source.documents[name]
    tokens = int(source.indexed.lengths[documents.start : documents.stop].sum(dtype=np.int64))
    if tokens >= seq_length + 1:
        return None
    return (
        f"--split {split} gives {name} {len(documents)} of the {len(source.indexed)} documents of"
        f" {source.indexed.prefix}, {tokens} tokens, and one sample needs {seq_length + 1} (--seq-length + 1)"
    )
