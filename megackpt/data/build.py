"""From flags to datasets: the one place where splits, blends, indices and the cache meet."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
    valid_sets: tuple[tuple[str, SampleDataset], ...] = ()
    """With --multiple-validation-sets, instead of `valid`: (name, dataset) of each."""


@dataclass(frozen=True)
class _Source:
    """One set of a split's blend: its share of the samples (None: by its size) and its documents."""

    weight: float | None
    indexed: IndexedDataset
    documents: range
    cache_directory: str
    origin: str
    """What gave it these documents, in the user's words."""


def build_datasets(
    data_path: Sequence[str],
    split: str,
    counts: SampleCounts,
    sample_format: SampleFormat,
    seed: int,
    data_cache_path: str | os.PathLike[str] | None = None,
) -> Datasets:
    """Training, validation and test data of `--data-path` (prefixes, or `w1 p1 w2 p2 …`) cut by `--split`.

    May be called by all ranks at once, without any order among them. Index arrays are cached in
    `data_cache_path`, or in `megackpt-cache` beside the data. Raises UsageError if the training split cannot fill
    one sample; a validation or test split that cannot is left out, with a note.
    """
    opened = _open("--data-path", data_path, data_cache_path)
    parts = [split_documents(parse_split(split), len(indexed)) for _, indexed, _ in opened]
    sources = {
        name: [
            _Source(weight, indexed, part[name], cache, f"--split {split} gives")
            for (weight, indexed, cache), part in zip(opened, parts, strict=True)
        ]
        for name in SPLITS
    }
    return _build(sources, " ".join(data_path), counts, sample_format, seed)


def build_split_datasets(
    paths: Mapping[str, Sequence[str]],
    counts: SampleCounts,
    sample_format: SampleFormat,
    seed: int,
    data_cache_path: str | os.PathLike[str] | None = None,
    multiple_validation_sets: bool = False,
) -> Datasets:
    """The same of `--train-data-path`, `--valid-data-path` and `--test-data-path`, by `train`, `valid`, `test`.

    With `multiple_validation_sets` each set of validation is a dataset of its own, in `valid_sets`.
    """
    sources = {
        name: [
            _Source(weight, indexed, range(len(indexed)), cache, f"--{name}-data-path gives")
            for weight, indexed, cache in _open(f"--{name}-data-path", paths.get(name, ()), data_cache_path)
        ]
        for name in SPLITS
    }
    description = " ".join(paths["train"])
    if not multiple_validation_sets:
        return _build(sources, description, counts, sample_format, seed)
    own = sources | {"valid": []}
    built = _build(own, description, replace(counts, valid=0), sample_format, seed)
    notes = list(built.notes)
    sets = []
    for source, name in zip(sources["valid"], _names(paths["valid"]), strict=True):
        own_notes: list[str] = []
        dataset = _build_split("valid", counts.valid, [source], sample_format, seed, own_notes)
        if dataset is not None:
            sets.append((name, dataset))
        notes += own_notes[:1]  # why it is left out; that nothing is left concerns all sets
    return replace(built, valid_sets=tuple(sets), notes=tuple(notes))


def _names(prefixes: Sequence[str]) -> list[str]:
    """Short names of datasets: the last part of the path, or all of it where two would be alike."""
    short = [os.path.basename(prefix.rstrip(os.sep)) for prefix in prefixes]
    return [prefix if short.count(name) > 1 else name for prefix, name in zip(prefixes, short, strict=True)]


def _open(
    flag: str, data_path: Sequence[str], data_cache_path: str | os.PathLike[str] | None
) -> list[tuple[float | None, IndexedDataset, str]]:
    opened = []
    for weight, prefix in parse_data_path(data_path) if data_path else ():
        beside = os.path.join(os.path.dirname(os.path.abspath(prefix)), _CACHE_NAME)
        cache = os.fspath(data_cache_path) if data_cache_path else beside
        opened.append((weight, IndexedDataset(prefix, flag), cache))
    return opened


def _build(
    sources: Mapping[str, Sequence[_Source]],
    description: str,
    counts: SampleCounts,
    sample_format: SampleFormat,
    seed: int,
) -> Datasets:
    built: dict[str, SampleDataset | None] = {}
    notes: list[str] = []
    for name in SPLITS:
        built[name] = _build_split(name, getattr(counts, name), sources[name], sample_format, seed, notes)
    train = built["train"]
    if train is None:
        raise UsageError(f"no training samples are asked for (train samples {counts.train})")
    return Datasets(train, built["valid"], built["test"], description, tuple(notes))


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
    notes: list[str],
) -> SampleDataset | None:
    if samples <= 0:
        return None
    usable = [source for source in sources if source.weight is None or source.weight > 0]
    for source in list(usable):
        problem = _too_small(name, source, sample_format.seq_length)
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
        return GPTDataset(only.indexed, only.documents, sample_format, seed, samples, only.cache_directory)
    weights = [float(_tokens(source)) if source.weight is None else source.weight for source in usable]
    total = sum(weights)
    return _blend(samples, usable, [weight / total for weight in weights], sample_format, seed)


def _blend(
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
        datasets.append(
            GPTDataset(source.indexed, source.documents, sample_format, seed, needed, source.cache_directory)
            if needed
            else None
        )
    orders = [order_fingerprint(s.indexed, s.documents, sample_format, seed) for s in sources]
    facts = {"sets": orders, "weights": [repr(float(weight)) for weight in weights]}
    return BlendedDataset(sets, datasets, fingerprint_of(facts))


def _tokens(source: _Source) -> int:
    return int(source.indexed.lengths[source.documents.start : source.documents.stop].sum(dtype=np.int64))


def _too_small(name: str, source: _Source, seq_length: int) -> str | None:
    tokens = _tokens(source)
    if tokens >= seq_length + 1:
        return None
    return (
        f"{source.origin} {name} {len(source.documents)} of the {len(source.indexed)} documents of"
        f" {source.indexed.prefix}, {tokens} tokens, and one sample needs {seq_length + 1} (--seq-length + 1)"
    )
