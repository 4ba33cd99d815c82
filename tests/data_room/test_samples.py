"""Masks and positions at document borders, and the mock text."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from megackpt.config.errors import UsageError
from megackpt.data.dataset import collate, segment_ids, training_sample
from megackpt.data.gpt_dataset import GPTDataset, SampleFormat
from megackpt.data.mock import MockDataset
from tests.data_room.tools import write_documents

A, B, C, D, E = 10, 11, 12, 13, 14
EOD, PAD = 2, 3
TEXT = np.array([A, B, EOD, C, D, E])


def test_document_border() -> None:
    """VC-08: [A B eod C D] has positions 0 1 2 0 1, and eod -> C counts unless --eod-mask-loss."""
    sample = training_sample(TEXT, eod=EOD, reset_position_ids=True)
    assert sample["position_ids"].tolist() == [0, 1, 2, 0, 1]
    assert sample["loss_mask"].tolist() == [1, 1, 1, 1, 1]
    masked = training_sample(TEXT, eod=EOD, eod_mask_loss=True)
    assert masked["loss_mask"].tolist() == [1, 1, 0, 1, 1] and masked["position_ids"].tolist() == [0, 1, 2, 3, 4]
    assert masked["labels"].tolist() == [B, EOD, C, D, E]  # B -> eod is learned, eod -> C is not


def test_segments_tell_which_tokens_see_each_other() -> None:
    assert segment_ids(TEXT, EOD).tolist() == [0, 0, 0, 1, 1, 1]
    assert segment_ids(np.array([EOD, EOD, A]), EOD).tolist() == [0, 1, 2]
    assert segment_ids(TEXT, None).tolist() == [0] * 6


@pytest.mark.parametrize(
    ("text", "positions"),
    [
        ([EOD, A, B, C], [0, 0, 1]),
        ([A, EOD, EOD, B], [0, 1, 0]),
        ([A, B, C, EOD], [0, 1, 2]),
        ([A, EOD, B, C], [0, 1, 0]),
    ],
)
def test_positions_at_odd_borders(text: list[int], positions: list[int]) -> None:
    sample = training_sample(np.array(text), eod=EOD, reset_position_ids=True)
    assert sample["position_ids"].tolist() == positions


def test_padding_labels_do_not_count_unless_pad_is_eod() -> None:
    text = np.array([A, B, PAD, PAD])
    assert training_sample(text, eod=EOD, pad=PAD)["loss_mask"].tolist() == [1, 0, 0]
    assert training_sample(np.array([A, EOD, B]), eod=EOD, pad=EOD)["loss_mask"].tolist() == [1, 1]


def test_fully_masked_and_unevenly_masked_samples(tmp_path: Path) -> None:
    """LS-07 and LS-09: the masks that the loss must weigh by tokens."""
    indexed = write_documents(tmp_path / "d", [[EOD] * 10, [*[EOD] * 7, A, B, C], [A] * 10])
    form = SampleFormat(9, eod=EOD, eod_mask_loss=True)
    sums = [GPTDataset(indexed, range(k, k + 1), form, 1, 1)[0]["loss_mask"].sum() for k in range(3)]
    assert sums == [0.0, 2.0, 9.0]


def test_masks_need_an_end_of_document_token() -> None:
    with pytest.raises(UsageError, match="--eod-mask-loss needs a tokenizer with an end-of-document token"):
        SampleFormat(8, eod_mask_loss=True)
    with pytest.raises(UsageError, match="--reset-position-ids needs"):
        SampleFormat(8, reset_position_ids=True)
    with pytest.raises(UsageError, match="--seq-length 0"):
        SampleFormat(0)


def test_collate_stacks_contiguous_arrays() -> None:
    batch = collate([training_sample(TEXT), training_sample(TEXT + 1)])
    assert {name: (a.shape, str(a.dtype), a.flags.c_contiguous) for name, a in batch.items()} == {
        "tokens": ((2, 5), "int64", True),
        "labels": ((2, 5), "int64", True),
        "loss_mask": ((2, 5), "float32", True),
        "position_ids": ((2, 5), "int64", True),
    }
    assert batch["tokens"][1].tolist() == (TEXT[:-1] + 1).tolist()


@pytest.mark.parametrize("vocab_size", [2, 5, 96, 127, 509, 50_257])
def test_mock_text_uses_the_whole_vocabulary_and_follows_one_rule(vocab_size: int) -> None:
    data = MockDataset(400, 40, vocab_size, seed=1)
    texts = np.stack([data.text(i) for i in range(400)])
    assert texts.min() == 0 and texts.max() == vocab_size - 1
    assert len(np.unique(texts)) == data.alphabet == min(127, vocab_size)
    clean = MockDataset(400, 40, vocab_size, seed=2, noise=0.0)
    following: dict[int, set[int]] = {}
    for text in (clean.text(i) for i in range(400)):
        for a, b in zip(text[:-1].tolist(), text[1:].tolist(), strict=True):
            following.setdefault(a, set()).add(b)
    assert all(len(after) == 1 for after in following.values())
    rule = {a: after.pop() for a, after in following.items()}
    right = np.mean([rule[a] == b for t in texts for a, b in zip(t[:-1].tolist(), t[1:].tolist(), strict=True)])
    assert right == pytest.approx(0.9 + 0.1 / data.alphabet, abs=0.01)


def test_mock_entropy_is_that_of_its_rule() -> None:
    """Measured conditional entropy of the text, from pair counts, against the closed form."""
    data = MockDataset(1000, 200, 12, seed=3)
    pairs = np.zeros((12, 12))
    for i in range(1000):
        text = data.text(i)
        np.add.at(pairs, (text[:-1], text[1:]), 1)
    share = pairs / pairs.sum(axis=1, keepdims=True)
    measured = -(pairs * np.log(share)).sum() / pairs.sum()
    assert data.entropy() == pytest.approx(measured, abs=0.005)
    assert MockDataset(1, 4, 12, 1, noise=0.0).entropy() == pytest.approx(0.0)
    assert MockDataset(1, 4, 12, 1, noise=1.0).entropy() == pytest.approx(math.log(12))


def test_mock_sample_depends_on_its_number_alone() -> None:
    long, short = MockDataset(100, 8, 50, 7), MockDataset(3, 8, 50, 7)
    assert [long.text(i).tolist() for i in (2, 0)] == [short.text(i).tolist() for i in (2, 0)]
    assert long.text(1).tolist() == EXPECTED_MOCK
    assert long.fingerprint == short.fingerprint != MockDataset(3, 8, 50, 8).fingerprint
    with pytest.raises(IndexError, match="sample 3 of 3"):
        short[3]
    with pytest.raises(UsageError, match="at least 2 tokens, not 1"):
        MockDataset(1, 8, 1, 0)


EXPECTED_MOCK = [27, 20, 30, 11, 18, 47, 10, 0, 40]
