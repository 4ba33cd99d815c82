"""How many tokens a run has, and tokens of another tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megackpt.config.errors import UsageError
from megackpt.data.indexed_writer import IndexedWriter
from tests.layouts import SMALL_GPT, Flags, Layout, built, logged, train_all
from tests.pool import run_distributed


def _flags(folder: Path, highest: int) -> Flags:
    """A run over documents whose tokens go up to `highest`, each ended by it."""
    with IndexedWriter(folder / "data", np.dtype("<u2")) as writer:
        for first in range(40):
            writer.add([*range(first, first + 20), highest])
    given = {key: value for key, value in SMALL_GPT.items() if key != "mock-data"}
    return given | {"data-path": str(folder / "data"), "train-iters": 2, "split": "1,0,0"}


def test_null_tokenizer_counts_its_end_of_document(tmp_path: Path) -> None:
    """--vocab-size is the user's ids, 0 to 508; the end of a document is 509, which a run can be trained on."""
    flags = _flags(tmp_path, 509) | {"tokenizer-type": "NullTokenizer", "metrics-file": str(tmp_path / "log.jsonl")}
    run_distributed(train_all, 1, flags, Layout())
    assert [number for (number,) in logged(tmp_path / "log.jsonl", "iteration")] == [1, 2]


def _refused(rank: int, world_size: int, flags: Flags, layout: Layout) -> str:
    with pytest.raises(UsageError) as refusal:
        built(flags, layout)
    return str(refusal.value)


def test_data_of_another_tokenizer_is_refused_before_the_first_step(tmp_path: Path) -> None:
    first, second = run_distributed(_refused, 2, _flags(tmp_path, 509), Layout(pp=2))
    assert first == second
    assert f"{tmp_path}/data: holds token ids from" in first and "to 509, but there are 509 ids" in first
