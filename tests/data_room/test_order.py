"""Which tokens make up which sample: borders, overlap, epochs, 64 bits, and independence of everything else."""

from __future__ import annotations

import itertools
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megackpt.data.gpt_dataset import GPTDataset, SampleFormat
from megackpt.data.hashing import epoch_permutations, hash64, shuffle_within_groups
from megackpt.data.indexed import IndexedDataset
from megackpt.data.sample_index import build_sample_index, epochs_needed, samples_per_epoch
from tests.data_room.tools import numbered, write_documents
from tests.pool import ROOT

LENGTHS = [5, 0, 1, 12, 3, 0, 7, 2]  # 30 tokens
SEED = 1234


def texts(dataset: GPTDataset) -> list[list[int]]:
    """Tokens and last label of every sample in the order of the run."""
    samples = [dataset[i] for i in range(len(dataset))]
    return [[*s["tokens"].tolist(), int(s["labels"][-1])] for s in samples]


def stream(lengths: list[int], epochs: int, seed: int = SEED) -> list[int]:
    """The endless text, written out the slow way from the document permutations alone."""
    documents = numbered(lengths)
    order = epoch_permutations(seed, "documents", epochs, len(lengths))
    return [token for epoch in order for d in epoch for token in documents[d]]


@pytest.mark.parametrize("seq_length", [1, 2, 3, 4, 7, 10, 13, 28, 29])
def test_samples_are_the_stream_cut_at_every_seq_length(tmp_path: Path, seq_length: int) -> None:
    indexed = write_documents(tmp_path / "d", numbered(LENGTHS))
    samples = 100 // seq_length + 3
    dataset = GPTDataset(indexed, range(8), SampleFormat(seq_length), SEED, samples)
    epochs = epochs_needed(30, seq_length, samples)
    flat = stream(LENGTHS, epochs + 1)
    expected = [flat[j * seq_length : (j + 1) * seq_length + 1] for j in range(-(-epochs * 30 // seq_length))]
    assert [dataset.text(j).tolist() for j in range(len(expected))] == expected
    assert texts(dataset) == [expected[j] for j in dataset.index.shuffle]
    # Each epoch shuffles the samples that start in it.
    bounds = [-(-e * 30 // seq_length) for e in range(epochs + 1)]
    full = shuffle_within_groups(SEED, "samples", np.array(bounds)).tolist()
    assert dataset.index.shuffle.tolist() == full[:samples]
    assert all(sorted(full[a:b]) == list(range(a, b)) for a, b in itertools.pairwise(bounds))


def test_tokens_and_labels_are_shifted_and_samples_share_one_token(tmp_path: Path) -> None:
    """DI-11."""
    indexed = write_documents(tmp_path / "d", numbered(LENGTHS))
    dataset = GPTDataset(indexed, range(8), SampleFormat(4), SEED, 7)
    for i in range(7):
        sample = dataset[i]
        assert sample["tokens"][1:].tolist() == sample["labels"][:-1].tolist()
        assert {name: (array.shape, str(array.dtype)) for name, array in sample.items()} == {
            "tokens": ((4,), "int64"),
            "labels": ((4,), "int64"),
            "loss_mask": ((4,), "float32"),
            "position_ids": ((4,), "int64"),
        }
        assert sample["loss_mask"].tolist() == [1.0] * 4 and sample["position_ids"].tolist() == [0, 1, 2, 3]
    parts = [dataset.text(j).tolist() for j in range(7)]
    assert all(a[-1] == b[0] and set(a[:-1]).isdisjoint(b[:-1]) for a, b in itertools.pairwise(parts))
    labels = sorted(token for part in parts for token in part[1:])
    assert len(set(labels)) == 28 and parts[0][0] not in labels  # 7 x 4 of 29: the last one starts the next sample


def test_every_token_is_a_label_once_per_epoch_but_the_first(tmp_path: Path) -> None:
    """DI-11 over three epochs of 30 tokens and samples of 9: 10 samples."""
    indexed = write_documents(tmp_path / "d", numbered(LENGTHS))
    dataset = GPTDataset(indexed, range(8), SampleFormat(9), SEED, 10)
    labels = [token for text in texts(dataset) for token in text[1:]]
    counts = np.bincount(labels, minlength=30)
    flat = stream(LENGTHS, 4)
    expected = np.bincount(flat[1:91], minlength=30)
    assert counts.tolist() == expected.tolist() and counts.sum() == 90


def test_whole_epoch_by_default(tmp_path: Path) -> None:
    indexed = write_documents(tmp_path / "d", numbered(LENGTHS))
    assert len(GPTDataset(indexed, range(8), SampleFormat(4), SEED)) == samples_per_epoch(30, 4) == 7
    assert [samples_per_epoch(t, 4) for t in (0, 4, 5, 8, 9)] == [0, 0, 1, 1, 2]


def test_a_longer_run_begins_with_a_shorter_one(tmp_path: Path) -> None:
    indexed = write_documents(tmp_path / "d", numbered(LENGTHS))
    runs = [texts(GPTDataset(indexed, range(8), SampleFormat(4), SEED, n)) for n in (3, 7, 8, 20, 50)]
    assert all(longer[: len(shorter)] == shorter for shorter, longer in itertools.pairwise(runs))


def test_seed_and_epoch_change_the_order(tmp_path: Path) -> None:
    indexed = write_documents(tmp_path / "d", numbered([10] * 30))
    first, second = (GPTDataset(indexed, range(30), SampleFormat(10), seed, 60) for seed in (1, 2))
    assert texts(first) != texts(second) and first.fingerprint != second.fingerprint
    order = first.index.documents
    assert order[:30].tolist() != order[30:60].tolist()
    assert sorted(order[:30]) == sorted(order[30:60]) == list(range(30))
    assert first.index.shuffle[:30].tolist() != list(range(30))


def test_a_part_of_the_documents_is_all_that_is_read(tmp_path: Path) -> None:
    indexed = write_documents(tmp_path / "d", numbered([6] * 10))
    dataset = GPTDataset(indexed, range(4, 7), SampleFormat(5), SEED, 20)
    assert {token for text in texts(dataset) for token in text} == set(range(24, 42))
    assert set(dataset.index.documents.tolist()) == {4, 5, 6}


def test_too_few_tokens_are_refused_at_once(tmp_path: Path) -> None:
    indexed = write_documents(tmp_path / "d", numbered(LENGTHS))
    with pytest.raises(ValueError, match="30 tokens cannot fill a sample of 31"):
        GPTDataset(indexed, range(8), SampleFormat(30), SEED, 5)
    with pytest.raises(ValueError, match="0 tokens"):
        GPTDataset(indexed, range(1, 2), SampleFormat(1), SEED, 5)


def test_more_than_two_to_the_31_tokens(tmp_path: Path) -> None:
    """DI-01: token and byte offsets are 64-bit. 2.4e9 tokens of a sparse file."""
    lengths = [800_000_000] * 3
    with open(tmp_path / "d.bin", "wb") as data:
        data.truncate(2 * sum(lengths))
        data.seek(2 * sum(lengths) - 2)
        data.write(struct.pack("<H", 77))
    pointers = [0, 1_600_000_000, 3_200_000_000]
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 3, 4)
    (tmp_path / "d.idx").write_bytes(head + struct.pack("<3i3q4q", *lengths, *pointers, 0, 1, 2, 3))
    indexed = IndexedDataset(tmp_path / "d")
    seq_length = 2048
    dataset = GPTDataset(indexed, range(3), SampleFormat(seq_length), SEED)
    count = (sum(lengths) - 1) // seq_length
    assert len(dataset) == count > 2**20
    starts = dataset.index.starts
    token = starts[:, 0] * 800_000_000 + starts[:, 1]
    assert token.dtype == np.int64 and (np.diff(token) == seq_length).all()
    assert int(token[-1]) > 2**31
    for j in (0, 390_624, 390_625, 781_249, count - 1):
        assert len(dataset.text(j)) == seq_length + 1
    # The last token of document 2 is the only one that is not 0.
    place = dataset.index.documents[:3].tolist().index(2) * 800_000_000 + 799_999_999
    assert int(dataset.text(place // seq_length)[place % seq_length]) == 77


def test_many_epochs_of_little_data() -> None:
    """DI-01: 2^31 documents x epochs are reached in small; here 30,000 epochs of 3 documents, exact everywhere."""
    lengths = np.array([3, 1, 2], dtype=np.int64)
    index = build_sample_index(lengths, range(3), 5, SEED, 36_000)
    token = np.concatenate([[0], np.cumsum(lengths[index.documents])])[index.starts[:, 0]] + index.starts[:, 1]
    assert token.tolist() == list(range(0, 36_000 * 5 + 1, 5))
    assert (index.starts[:, 1] < lengths[index.documents[index.starts[:, 0]]]).all()
    assert sorted(index.shuffle.tolist()) == list(range(36_000))


def test_permutations_are_what_they_are() -> None:
    """Fixed values: a change of the order would break every resumed run, so it must be seen."""
    assert epoch_permutations(1234, "documents", 2, 6).tolist() == EXPECTED_PERMUTATIONS
    assert hash64(0, "samples", np.int64(3), np.arange(2)).tolist() == EXPECTED_KEYS


EXPECTED_PERMUTATIONS = [[1, 2, 3, 0, 4, 5], [5, 0, 2, 3, 1, 4]]
EXPECTED_KEYS = [2359956617791645118, 15598482808181102273]


def test_permutations_are_even() -> None:
    """Each element is at each place equally often, to within six standard deviations."""
    rows = epoch_permutations(5, "documents", 20_000, 7)
    assert (np.sort(rows, axis=1) == np.arange(7)).all()
    counts = np.array([np.bincount(rows[:, place], minlength=7) for place in range(7)])
    expected = 20_000 / 7
    assert np.abs(counts - expected).max() < 6 * np.sqrt(expected * 6 / 7)


def test_chunked_shuffle_is_the_shuffle_of_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = np.array([0, 3, 3, 10, 11, 30, 32])
    whole = shuffle_within_groups(9, "samples", bounds)
    monkeypatch.setattr("megackpt.data.hashing._CHUNK", 8)
    assert shuffle_within_groups(9, "samples", bounds).tolist() == whole.tolist()
    assert (
        epoch_permutations(9, "documents", 7, 5)[3:].tolist() == epoch_permutations(9, "documents", 7, 5).tolist()[3:]
    )


def test_order_does_not_depend_on_the_process(tmp_path: Path) -> None:
    """Another PYTHONHASHSEED, no cache, another directory: the same samples and the same fingerprint."""
    code = """
import json, sys
from megackpt.data import GPTDataset, IndexedDataset, SampleFormat
d = GPTDataset(IndexedDataset(sys.argv[1]), range(8), SampleFormat(4), 1234, 25, sys.argv[2] or None)
print(json.dumps([d.fingerprint, [d[i]["tokens"].tolist() for i in range(25)]]))
assert "torch" not in sys.modules
"""
    out = set()
    for run, (seed, cache) in enumerate([("0", ""), ("1", str(tmp_path / "cache")), ("77", str(tmp_path / "cache"))]):
        prefix = tmp_path / str(run) / "d"
        write_documents(prefix, numbered(LENGTHS))
        env = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", code, str(prefix), cache]
        out.add(subprocess.run(command, env=env, cwd=ROOT, check=True, capture_output=True, timeout=60).stdout)
    assert len(out) == 1 and len(json.loads(out.pop())[1]) == 25
