"""Data by split, sets without weights, and several validation sets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megackpt.config.errors import UsageError
from megackpt.data.build import SampleCounts, build_datasets, build_split_datasets
from megackpt.data.dataset import document_lengths
from megackpt.data.gpt_dataset import GPTDataset, SampleFormat
from tests.data_room.test_build import SEED, tokens, used
from tests.data_room.tools import numbered, write_documents


def sets(folder: Path, **lengths: list[int]) -> dict[str, str]:
    """Datasets whose tokens tell them apart: 1000 x their place in the call."""
    out = {}
    for place, (name, own) in enumerate(lengths.items()):
        write_documents(folder / name, [[t + 1000 * place for t in d] for d in numbered(own)])
        out[name] = str(folder / name)
    return out


def test_each_split_has_its_own_data_and_all_of_it(tmp_path: Path) -> None:
    paths = sets(tmp_path, a=[10] * 4, b=[10] * 3, c=[11])
    by_split = {"train": [paths["a"]], "valid": [paths["b"]], "test": [paths["c"]]}
    data = build_split_datasets(by_split, SampleCounts(8, 6, 2), SampleFormat(5), SEED)
    assert used(data.train) == set(range(40)) and used(data.valid) == set(range(1000, 1030))
    assert used(data.test) <= set(range(2000, 2011)) and len(data.test or ()) == 2
    assert (data.notes, data.description, data.valid_sets) == ((), paths["a"], ())
    alone = build_datasets([paths["a"]], "1,0,0", SampleCounts(8), SampleFormat(5), SEED)
    assert tokens(alone.train) == tokens(data.train) and alone.train.fingerprint == data.train.fingerprint


def test_split_without_data_is_said_and_too_little_is_refused(tmp_path: Path) -> None:
    paths = sets(tmp_path, a=[10] * 4, b=[3])
    data = build_split_datasets({"train": [paths["a"]]}, SampleCounts(8, 6), SampleFormat(5), SEED)
    assert data.valid is None and data.notes == ("there is no valid data, so nothing is evaluated on it",)
    with pytest.raises(UsageError, match=r"--train-data-path gives train 1 of the 1 documents of .*b, 3 tokens"):
        build_split_datasets({"train": [paths["b"]]}, SampleCounts(8), SampleFormat(5), SEED)
    missing = {"train": [paths["a"]], "valid": [paths["b"], f"{tmp_path}/c"]}
    with pytest.raises(UsageError, match=rf"^--valid-data-path {tmp_path}/c: there is no file "):
        build_split_datasets(missing, SampleCounts(8, 6), SampleFormat(5), SEED)


@pytest.mark.parametrize("explicit", [False, True])
def test_sets_without_weights_count_by_their_size(tmp_path: Path, explicit: bool) -> None:
    """60 and 20 tokens: of any N samples 3 in 4 come from the first, to within one."""
    paths = sets(tmp_path, a=[10] * 6, b=[5] * 4)
    given = ["60", paths["a"], "20", paths["b"]] if explicit else list(paths.values())
    data = build_datasets(given, "1,0,0", SampleCounts(40), SampleFormat(5), SEED)
    first = np.cumsum([text[0] < 1000 for text in tokens(data.train)])
    assert np.abs(first - 0.75 * np.arange(1, 41)).max() < 1 and first[-1] == 30


def test_several_validation_sets_are_apart(tmp_path: Path) -> None:
    paths = sets(tmp_path, a=[10] * 4, b=[10] * 3, c=[11], d=[2])
    by_split = {"train": [paths["a"]], "valid": [paths["b"], paths["c"], paths["d"]]}
    data = build_split_datasets(by_split, SampleCounts(8, 6), SampleFormat(5), SEED, multiple_validation_sets=True)
    assert data.valid is None and [name for name, _ in data.valid_sets] == ["b", "c"]
    assert [len(dataset) for _, dataset in data.valid_sets] == [6, 6]
    assert used(data.valid_sets[0][1]) == set(range(1000, 1030)) and used(data.valid_sets[1][1]) <= set(
        range(2000, 2011)
    )
    assert len(data.notes) == 1 and "left out of valid" in data.notes[0] and "d, 2 tokens" in data.notes[0]


def test_segments_of_a_sample(tmp_path: Path) -> None:
    indexed = write_documents(tmp_path / "d", [[5, 6, 9, 7, 9, 9, 8, 8]])
    form = SampleFormat(7, eod=9, reset_attention_mask=True, reset_position_ids=True)
    sample = GPTDataset(indexed, range(1), form, 1, 1)[0]
    assert sample["tokens"].tolist() == [5, 6, 9, 7, 9, 9, 8]
    assert sample["segments"].tolist() == [0, 0, 0, 1, 1, 2, 3]
    assert sample["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 0]
    assert document_lengths(sample["segments"][None]) == [[3, 2, 1, 1]]
    with pytest.raises(UsageError, match="--reset-attention-mask needs a tokenizer with an end-of-document token"):
        SampleFormat(7, reset_attention_mask=True)
