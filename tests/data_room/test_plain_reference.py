"""Samples and blends against references of about 20 lines of plain Python each, written from the rules alone."""

from __future__ import annotations

import time
import tracemalloc
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from megackpt.data.blend import blend_order
from megackpt.data.gpt_dataset import GPTDataset, SampleFormat
from megackpt.data.hashing import permutation
from megackpt.data.sample_index import _sample_starts, build_sample_index
from tests.data_room.tools import write_documents

M64, GOLDEN = 2**64 - 1, 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    """SplitMix64's finaliser."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M64
    return x ^ (x >> 31)


def plain_key(seed: int, purpose: str, group: int, index: int) -> int:
    base = mix(seed & M64)
    for byte in purpose.encode():
        base = mix((base + GOLDEN * (byte + 1)) & M64)
    row = mix((base + (group + 1) * GOLDEN) & M64)
    return mix((row + (index + 1) * GOLDEN) & M64)


def plain_permutation(seed: int, purpose: str, group: int, length: int, first: int = 0) -> list[int]:
    """Of first … first + length - 1: sorted by key, or computed if it is long."""
    if length <= 65_536:
        return sorted(range(first, first + length), key=lambda i: plain_key(seed, purpose, group, i))
    bits = (length - 1).bit_length()
    constants = [plain_key(seed, purpose, group, i) for i in range(10)]
    out = []
    for x in range(2**bits):
        for add, multiply in zip(constants[::2], constants[1::2], strict=True):
            x = (x + add) * (multiply | 1) % 2**bits
            x ^= x >> (bits + 1) // 2
        if x < length:
            out.append(first + x)
    return out


def plain_samples(documents: list[list[int]], seq_length: int, seed: int, samples: int) -> list[list[int]]:
    """All documents, epoch after epoch, laid end to end and cut; the samples of an epoch shuffled among themselves."""
    tokens = sum(map(len, documents))
    text: list[int] = []
    order: list[int] = []
    for epoch in range(samples * seq_length // tokens + 2):
        begin = -(-epoch * tokens // seq_length)
        end = -(-(epoch + 1) * tokens // seq_length)
        order += plain_permutation(seed, "samples", epoch, end - begin, begin)
        text += [t for d in plain_permutation(seed, "documents", epoch, len(documents)) for t in documents[d]]
    return [text[i * seq_length : (i + 1) * seq_length + 1] for i in order[:samples]]


def plain_blend(weights: list[Fraction], samples: int) -> list[int]:
    """Tijdeman 1980: of the sets whose deficit has reached 1/(2K - 2), the one that must be served first."""
    given, out = [0] * len(weights), []
    for n in range(1, samples + 1):
        threshold = Fraction(1, 2 * len(weights) - 2)
        ready = [k for k, w in enumerate(weights) if w * n - given[k] >= threshold]
        due = {k: (given[k] + 1 - threshold) / weights[k] for k in ready}
        chosen = min(ready, key=lambda k: (due[k], k))
        given[chosen] += 1
        out.append(chosen)
    return out


@pytest.mark.parametrize(("seq_length", "samples"), [(1, 90), (4, 40), (7, 30), (29, 9), (13, 1)])
@pytest.mark.parametrize("seed", [0, 1234, 2**63 + 5])
def test_samples_are_those_of_the_reference(tmp_path: Path, seq_length: int, samples: int, seed: int) -> None:
    lengths = [5, 0, 1, 12, 3, 0, 7, 2]
    documents = [[100 * d + t for t in range(length)] for d, length in enumerate(lengths)]
    dataset = GPTDataset(write_documents(tmp_path / "d", documents), range(8), SampleFormat(seq_length), seed, samples)
    found = [[*dataset[i]["tokens"].tolist(), int(dataset[i]["labels"][-1])] for i in range(samples)]
    assert found == plain_samples(documents, seq_length, seed, samples)


def test_long_permutations_are_those_of_the_reference() -> None:
    for group, length in [(0, 65_537), (3, 100_000)]:
        expected = plain_permutation(7, "documents", group, length)
        assert permutation(7, "documents", group, length, np.empty(length, np.int64)).tolist() == expected
        assert permutation(7, "documents", group, length, np.empty(1000, np.int64)).tolist() == expected[:1000]
        assert sorted(expected) == list(range(length))


def test_an_index_of_many_documents_and_samples_is_that_of_the_reference() -> None:
    """More than 65,536 documents and samples: both permutations are computed, and chunks have borders."""
    lengths = np.random.default_rng(5).integers(0, 4, 70_000).astype(np.int32)
    documents = [[(d, t) for t in range(length)] for d, length in enumerate(lengths.tolist())]
    count = 150_000
    index = build_sample_index(lengths, range(70_000), 1, 3, count)
    expected = plain_samples(documents, 1, 3, count)  # type: ignore[arg-type]
    starts = index.starts[index.shuffle]
    found = np.stack([index.documents[starts[:, 0]], starts[:, 1]], axis=1)
    assert found.tolist() == [list(sample[0]) for sample in expected]


LONG = 2**31 - 1  # tokens in the longest document that an index file can hold


@pytest.mark.parametrize("chunk", [8, 1 << 16])
@pytest.mark.parametrize("width", [np.int32, np.int64])
@pytest.mark.parametrize(
    ("lengths", "seq_length"),
    [
        ([0, 1, 2], 1),
        ([0, 1, 2], 7),
        ([0, 3, 9], 26),  # pairs
        ([0, 3, 9], 200),  # pairs of pairs
        ([0, 0, 0, 0, 0, 0, 0, 50], 3),  # several samples in few documents
        ([0, 500, 1], 3),  # more samples in a document than are placed at once
        ([LONG, LONG - 1, 0, 3], LONG // 3),  # more tokens in a chunk than 32 bits count
        ([2**31 // 60, 2**31 // 61, 0], 40_000_019),
    ],
)
def test_starts_are_found_in_every_proportion_of_documents_to_samples(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], seq_length: int, chunk: int, width: type[np.signedinteger]
) -> None:
    """A sample starts in the first document that ends behind its first token."""
    monkeypatch.setattr("megackpt.data.sample_index._CHUNK", chunk)
    random = np.random.default_rng(seq_length)
    for documents in (1, 8, 9, 61, 203):
        own = random.choice(lengths, documents).astype(width)
        own[random.integers(documents)] = max(lengths)
        tokens = int(own.sum(dtype=np.int64))
        if tokens <= seq_length:
            continue
        for seed, samples in enumerate((1, 2, 3, 4, 5, (2 * tokens - 1) // seq_length)):
            index = build_sample_index(own, range(documents), seq_length, seed, samples)
            ends = np.cumsum(own[index.documents], dtype=np.int64)
            token = np.arange(len(index.starts), dtype=np.int64) * seq_length
            position = np.searchsorted(ends, token, side="right")
            assert index.starts[:, 0].tolist() == position.tolist() and position[-1] == len(ends) - 1
            assert index.starts[:, 1].tolist() == (token - ends[position] + own[index.documents[position]]).tolist()


@pytest.mark.parametrize(
    ("sizes", "samples"),
    [
        ([29, 0, 0, 0, 0, 0, 0, 2], 10),  # placed in two rounds: the second begins inside the first document
        ([1, 0, 0, 0, 0, 0, 0, 26], 2),  # a last document with more samples than are wanted
        ([1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 30], 3),
    ],
)
def test_starts_where_a_document_holds_more_samples_than_are_placed(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], samples: int
) -> None:
    monkeypatch.setattr("megackpt.data.sample_index._CHUNK", 8)
    starts, used = _sample_starts(np.array(sizes, dtype=np.int32), np.arange(len(sizes)), 3, samples)
    text = [(document, offset) for document, size in enumerate(sizes) for offset in range(size)]
    assert [tuple(start) for start in starts.tolist()] == text[: 3 * samples + 1 : 3] and used == starts[-1, 0] + 1


@pytest.mark.parametrize(
    "weights", [[1, 1], [3, 7], [5, 3, 2], [98, 1, 1], [1] * 7, [90, *[1] * 30], [25, 20, 15, 10, 10, 8, 7, 5]]
)
def test_blends_are_those_of_the_reference(weights: list[int]) -> None:
    """With exact fractions; sums of powers of two and ties included, doubles decide alike."""
    exact = [Fraction(w, sum(weights)) for w in weights]
    found = blend_order([float(w) for w in exact], 1500)
    same = found == np.array(plain_blend(exact, 1500))
    # Where two deadlines are equal rounding may choose the other: then they change places, and nothing else.
    assert np.bincount(found).tolist() == np.bincount(plain_blend(exact, 1500)).tolist()
    given = np.cumsum(found[:, None] == np.arange(len(weights)), axis=0)
    wanted = np.arange(1, 1501)[:, None] * np.array([float(w) for w in exact])
    assert np.abs(given - wanted).max() < 1 and same.mean() > 0.8


def shares(parts: int, seed: int) -> list[float]:
    drawn = np.random.default_rng(seed).random(parts) ** 3
    return (drawn / drawn.sum()).tolist()


@pytest.mark.parametrize(
    "weights",
    [[0.3, 0.7], [0.5, 0.0, 0.3, 0.2], [1e-5, 1 - 1e-5], [1 / 7] * 7, shares(3, 1), shares(5, 2), shares(12, 3)],
)
@pytest.mark.parametrize(("rounds", "warm_up"), [(8, 128), (8, 0), (1, 0)])
def test_orders_made_in_blocks_are_those_made_one_by_one(
    monkeypatch: pytest.MonkeyPatch, weights: list[float], rounds: int, warm_up: int
) -> None:
    """Where all guesses are right, where some must be put right, and where the rest is made one by one."""
    monkeypatch.setattr("megackpt.data.blend._SHORT", 30_000)
    expected = blend_order(weights, 23_456)
    monkeypatch.setattr("megackpt.data.blend._SHORT", 0)
    monkeypatch.setattr("megackpt.data.blend._ROUNDS", rounds)
    monkeypatch.setattr("megackpt.data.blend._WARM_UP", warm_up)
    for samples in (1, 2, 7, 23_456):
        assert blend_order(weights, samples).tolist() == expected[:samples].tolist()


def test_a_large_index_takes_little_time_and_memory() -> None:
    """100 million tokens in a million documents: within 5 seconds, and at most twice the memory of the index."""
    lengths = np.random.default_rng(1).integers(1, 200, 1_000_000).astype(np.int32)
    samples = int(lengths.sum() - 1) // 2048
    begin = time.monotonic()
    index = build_sample_index(lengths, range(len(lengths)), 2048, 7, samples)
    assert time.monotonic() - begin < 5 and len(index) == samples > 48_000
    size = index.documents.nbytes + index.starts.nbytes + index.shuffle.nbytes
    del index
    tracemalloc.start()
    try:
        build_sample_index(lengths, range(len(lengths)), 2048, 7, samples)
        assert size < tracemalloc.get_traced_memory()[1] <= 2 * size
    finally:
        tracemalloc.stop()


def chi_square(counts: np.ndarray) -> float:
    """Standard deviations by which the spread of the counts exceeds that of chance."""
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum() - counts.size) / np.sqrt(2 * counts.size)


@pytest.mark.parametrize("length", [65_537, 131_072, 300_000])
def test_long_permutations_look_like_chance(length: int) -> None:
    """Neighbours, places and values, low bits, and two epochs against each other, in 32 x 32 cells."""
    for seed in range(3):
        p, q = (permutation(seed, "documents", e, length, np.empty(length, np.int64)) for e in (0, 1))
        cell = lambda x: x * 32 // length  # noqa: E731
        pairs = {
            "neighbours": (cell(p[:-1]), cell(p[1:])),
            "distance 64": (cell(p[:-64]), cell(p[64:])),
            "place and value": (cell(np.arange(length)), cell(p)),
            "low bits": (p[:-1] % 32, p[1:] % 32),
            "epochs": (cell(p), cell(q)),
        }
        for name, (a, b) in pairs.items():
            assert chi_square(np.bincount(a * 32 + b, minlength=1024)) < 6, (name, seed)
