"""Splits, blends and what happens when there is too little data."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from megackpt.config.data import parse_split
from megackpt.config.errors import UsageError
from megackpt.data.blend import BlendedDataset, blend_order
from megackpt.data.build import SampleCounts, build_datasets, build_mock_datasets
from megackpt.data.dataset import SampleDataset
from megackpt.data.gpt_dataset import GPTDataset, SampleFormat
from megackpt.data.split import split_documents
from tests.data_room.tools import numbered, write_documents

SEED = 1234


def tokens(dataset: SampleDataset) -> list[list[int]]:
    return [dataset[i]["tokens"].tolist() for i in range(len(dataset))]


def used(dataset: SampleDataset | None) -> set[int]:
    assert dataset is not None
    return {token for text in tokens(dataset) for token in text}


@pytest.mark.parametrize(
    ("text", "documents", "expected"),
    [
        ("949,50,1", 1000, [(0, 949), (949, 999), (999, 1000)]),
        ("969,30,1", 314, [(0, 304), (304, 314), (314, 314)]),
        ("9998,1,1", 10, [(0, 10), (10, 10), (10, 10)]),
        ("1,1,1", 10, [(0, 3), (3, 7), (7, 10)]),
        ("0.7,0.2,0.1", 10, [(0, 7), (7, 9), (9, 10)]),
        ("90,10", 5, [(0, 4), (4, 5), (0, 0)]),
        ("1", 5, [(0, 5), (0, 0), (0, 0)]),
        ("1,0,1", 5, [(0, 2), (0, 0), (2, 5)]),
    ],
)
def test_split(text: str, documents: int, expected: list[tuple[int, int]]) -> None:
    """Bounds are Megatron's: round(cumulative share * documents), halves to even."""
    ranges = split_documents(parse_split(text), documents)
    assert [(r.start, r.stop) for r in ranges.values()] == expected
    assert sum(map(len, ranges.values())) == documents


def test_splits_hold_their_own_documents(tmp_path: Path) -> None:
    write_documents(tmp_path / "d", numbered([10] * 20))
    data = build_datasets([str(tmp_path / "d")], "80,15,5", SampleCounts(40, 12, 4), SampleFormat(5), SEED)
    assert (len(data.train), data.notes) == (40, ())
    assert used(data.train) == set(range(160))
    assert used(data.valid) == set(range(160, 190)) and used(data.test) == set(range(190, 200))
    assert os.listdir(tmp_path / "megackpt-cache")


def test_split_that_is_not_asked_for_is_not_built(tmp_path: Path) -> None:
    write_documents(tmp_path / "d", numbered([10] * 2))
    data = build_datasets([str(tmp_path / "d")], "1,0,0", SampleCounts(3), SampleFormat(5), SEED, tmp_path / "c")
    assert (data.valid, data.test, data.notes, data.description) == (None, None, (), str(tmp_path / "d"))
    assert not (tmp_path / "megackpt-cache").exists() and (tmp_path / "c").is_dir()


def test_empty_splits_are_left_out_with_a_note_and_without_a_loop(tmp_path: Path) -> None:
    """DI-06."""
    write_documents(tmp_path / "d", numbered([5] * 10))
    begin = time.monotonic()
    data = build_datasets([str(tmp_path / "d")], "9998,1,1", SampleCounts(1000, 8, 8), SampleFormat(40), SEED)
    assert time.monotonic() - begin < 10
    assert len(data.train) == 1000 and data.valid is None and data.test is None
    assert data.notes == (
        f"--split 9998,1,1 gives valid 0 of the 10 documents of {tmp_path / 'd'}, 0 tokens, and one sample needs 41"
        " (--seq-length + 1): it is left out of valid",
        "there is no valid data, so nothing is evaluated on it",
        f"--split 9998,1,1 gives test 0 of the 10 documents of {tmp_path / 'd'}, 0 tokens, and one sample needs 41"
        " (--seq-length + 1): it is left out of test",
        "there is no test data, so nothing is evaluated on it",
    )


def test_training_split_that_cannot_fill_a_sample_is_refused(tmp_path: Path) -> None:
    write_documents(tmp_path / "d", numbered([5] * 8))
    with pytest.raises(UsageError, match=r"gives train 8 of the 8 documents .* 40 tokens, and one sample needs 41"):
        build_datasets([str(tmp_path / "d")], "1,0,0", SampleCounts(3), SampleFormat(40), SEED)
    with pytest.raises(UsageError, match="no training samples are asked for"):
        build_datasets([str(tmp_path / "d")], "1,0,0", SampleCounts(0), SampleFormat(4), SEED)


WEIGHTS = [
    [0.3, 0.7],
    [0.5, 0.3, 0.2],
    [0.98, 0.01, 0.01],
    [0.6180339887, 0.2360679775, 0.1458980338],
    [1 / 7] * 7,
    [0.9, *[0.1 / 30] * 30],
    [0.25, 0.2, 0.15, 0.1, 0.1, 0.08, 0.07, 0.05],
]


@pytest.mark.parametrize("weights", WEIGHTS, ids=lambda w: f"{len(w)} sets")
def test_every_prefix_of_a_blend_is_within_one_of_its_weights(weights: list[float]) -> None:
    """DI-10, at every N and not only at the end."""
    order = blend_order(weights, 3000)
    given = np.cumsum(order[:, None] == np.arange(len(weights)), axis=0)
    wanted = np.arange(1, 3001)[:, None] * np.array(weights)
    assert np.abs(given - wanted).max() < 1
    assert order[:700].tolist() == blend_order(weights, 700).tolist()


def test_blend_of_equal_weights_takes_turns_and_zero_means_never() -> None:
    assert blend_order([0.5, 0.5], 6).tolist() in ([0, 1] * 3, [1, 0] * 3)
    assert blend_order([0.0, 1.0], 3).tolist() == [1, 1, 1]
    assert np.bincount(blend_order([0.25, 0.0, 0.75], 100)).tolist() == [25, 0, 75]


def test_blend_reads_each_set_in_its_own_order(tmp_path: Path) -> None:
    first = write_documents(tmp_path / "a", numbered([10] * 4))
    second = write_documents(tmp_path / "b", [[t + 1000 for t in d] for d in numbered([10] * 4)])
    path = ["3", str(tmp_path / "a"), "1", str(tmp_path / "b")]
    data = build_datasets(path, "1,0,0", SampleCounts(40), SampleFormat(5), SEED)
    texts = tokens(data.train)
    own = [tokens(GPTDataset(d, range(4), SampleFormat(5), SEED, n)) for d, n in ((first, 30), (second, 10))]
    assert [t for t in texts if t[0] < 1000] == own[0] and [t for t in texts if t[0] >= 1000] == own[1]
    longer = build_datasets(path, "1,0,0", SampleCounts(100), SampleFormat(5), SEED)
    assert tokens(longer.train)[:40] == texts and longer.train.fingerprint == data.train.fingerprint
    other = build_datasets(["1", *path[1:]], "1,0,0", SampleCounts(40), SampleFormat(5), SEED)
    assert other.train.fingerprint != data.train.fingerprint


def test_set_that_gives_no_sample_is_not_built(tmp_path: Path) -> None:
    """DI-09: weights 1e-6 and 1, 100 samples."""
    write_documents(tmp_path / "a", numbered([10]))
    write_documents(tmp_path / "b", [[t + 1000 for t in range(60)]])
    path = ["1e-6", str(tmp_path / "a"), "1", str(tmp_path / "b")]
    data = build_datasets(path, "1,0,0", SampleCounts(100), SampleFormat(5), SEED)
    assert len(data.train) == 100 and used(data.train) == set(range(1000, 1060))

    path[0] = "1e-3"
    few, more = (build_datasets(path, "1,0,0", SampleCounts(n), SampleFormat(5), SEED).train for n in (100, 1500))
    assert sum(int(more[i]["tokens"][0]) < 1000 for i in range(1500)) == 1
    assert few.fingerprint == more.fingerprint  # whether the small set was built or not


def test_set_too_small_for_validation_is_left_out_there_only(tmp_path: Path) -> None:
    write_documents(tmp_path / "a", numbered([10] * 2))
    write_documents(tmp_path / "b", [[t + 1000 for t in d] for d in numbered([10] * 10)])
    path = ["1", str(tmp_path / "a"), "1", str(tmp_path / "b")]
    data = build_datasets(path, "90,10,0", SampleCounts(20, 6), SampleFormat(5), SEED)
    assert {t < 1000 for t in used(data.train)} == {True, False}
    assert min(used(data.valid)) >= 1090 and len(data.notes) == 1 and "left out of valid" in data.notes[0]


def test_blend_that_asks_for_more_than_there_is_is_an_error() -> None:
    with pytest.raises(ValueError, match="set 1 must give 2 samples and has fewer"):
        BlendedDataset(np.array([1, 1]), [None, None], "")


def test_tokens_outside_the_vocabulary_are_named(tmp_path: Path) -> None:
    write_documents(tmp_path / "d", numbered([30]))
    form = SampleFormat(29, vocab_size=29)
    data = build_datasets([str(tmp_path / "d")], "1,0,0", SampleCounts(1), form, SEED)
    with pytest.raises(UsageError, match=r"d: holds token ids from 0 to 29, but there are 29 ids"):
        data.train[0]
    form = SampleFormat(29, vocab_size=30)
    assert build_datasets([str(tmp_path / "d")], "1,0,0", SampleCounts(1), form, SEED).train[0]["tokens"].max() == 28


def test_samples_outside_the_dataset_are_an_error(tmp_path: Path) -> None:
    data = GPTDataset(write_documents(tmp_path / "d", numbered([30])), range(1), SampleFormat(5), SEED, 4)
    for index in (-1, 4):
        with pytest.raises(IndexError, match=f"sample {index} of 4"):
            data[index]


def test_counts_of_a_run() -> None:
    assert SampleCounts.of_run(800, 8, eval_iters=5, evaluations=3) == SampleCounts(800, 120, 40)
    assert SampleCounts.of_run(800, 8, eval_iters=0, evaluations=3) == SampleCounts(800, 0, 0)


def test_mock_splits(tmp_path: Path) -> None:
    data = build_mock_datasets(SampleCounts(6, 6, 0), 16, 509, SEED)
    assert data.test is None and data.valid is not None and tokens(data.train) != tokens(data.valid)
    assert data.train.fingerprint != data.valid.fingerprint and "nats per token" in data.notes[0]
