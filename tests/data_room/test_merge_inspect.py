"""tools/merge_datasets.py and tools/inspect_data.py."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import pytest

from megackpt.config.errors import UsageError
from megackpt.data.indexed import IndexedDataset
from megackpt.data.inspect import inspect, sample_documents
from megackpt.data.merge import merge_datasets
from megackpt.data.tokenizer import NullTokenizer
from tests.data_room.test_data_tools import tool
from tests.data_room.test_indexed import index_bytes
from tests.data_room.tools import write_documents


def test_merged_datasets_are_one_after_another(tmp_path: Path) -> None:
    parts = [[[1, 2], [], [3]], [], [[4], [5, 6, 7]]]
    for number, documents in enumerate(parts):
        write_documents(tmp_path / "in" / f"p{number}", documents)
    write_documents(tmp_path / "whole", [document for part in parts for document in part])
    done = tool("merge_datasets", "--input", tmp_path / "in", "--output-prefix", tmp_path / "all")
    assert done.returncode == 0, done.stderr
    assert "3 datasets, 5 documents, 7 tokens" in done.stdout
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"all.{suffix}").read_bytes() == (tmp_path / f"whole.{suffix}").read_bytes()


def test_merge_keeps_sequences_and_leaves_gaps_out(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(struct.pack("<8H", 1, 2, 3, 99, 98, 4, 97, 5))
    (tmp_path / "a.idx").write_bytes(index_bytes([1, 2, 0, 1, 1], [0, 2, 10, 10, 14], [0, 2, 3, 4, 5]))
    write_documents(tmp_path / "b", [[6, 7]])
    assert merge_datasets([str(tmp_path / "a"), str(tmp_path / "b")], str(tmp_path / "m")) == (5, 7)
    read = IndexedDataset(tmp_path / "m")
    assert [read.get(i).tolist() for i in range(5)] == [[1, 2, 3], [], [4], [5], [6, 7]]
    assert read.sequence_lengths.tolist() == [1, 2, 0, 1, 1, 2] and read.bounds.tolist() == [0, 2, 3, 4, 5, 6]
    assert [run.tolist() for run in IndexedDataset(tmp_path / "a").runs()] == [[1, 2, 3], [4], [5]]


def test_merge_refusals_leave_nothing(tmp_path: Path) -> None:
    write_documents(tmp_path / "a", [[1]])
    write_documents(tmp_path / "b", [[1]], "<i4")
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.iterdir())
    for inputs, output, message in [
        (["a", "b"], "m", "b holds int32 and not uint16"),
        (["a"], "a", "a: is one of the datasets to merge"),
        (["none"], "m", r"^merge_datasets\.py: /\S+/none: there is no file .*none\.idx"),
        (["empty"], "m", "the folder has no .idx files"),
    ]:
        done = tool(
            "merge_datasets", "--input", *(tmp_path / name for name in inputs), "--output-prefix", tmp_path / output
        )
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert re.search(message, done.stderr), done.stderr
    assert sorted(tmp_path.iterdir()) == before
    with pytest.raises(UsageError, match="holds int32"):
        merge_datasets([str(tmp_path / "a"), str(tmp_path / "b")], str(tmp_path / "m"))


def test_figures_of_a_known_dataset(tmp_path: Path) -> None:
    write_documents(tmp_path / "d", [[1, 2, 9], [], [9], [3, 3, 3, 9], [5]])
    found = inspect(tmp_path / "d", NullTokenizer(9))
    assert (found.documents, found.sequences, found.tokens, found.empty, found.data_bytes) == (5, 5, 9, 1, 18)
    assert found.lengths == (0, 0, 1, 4, 4) and (found.smallest, found.largest, found.distinct) == (1, 9, 5)
    share = np.array([1, 1, 3, 1, 3]) / 9
    assert found.entropy == pytest.approx(-(share * np.log(share)).sum())
    assert found.ends == 3 and found.problems == () and inspect(tmp_path / "d").ends is None
    assert inspect(tmp_path / "d", NullTokenizer(8)).problems == (
        "token ids go up to 9, but the tokenizer has 9: it is another one",
    )


def test_what_is_wrong_with_tokens(tmp_path: Path) -> None:
    write_documents(tmp_path / "n", [[-5, 2]], "<i4")
    write_documents(tmp_path / "l", [[2**31 - 1, 2]], "<i4")
    write_documents(tmp_path / "e", [[]])
    write_documents(tmp_path / "t", [[7]])
    with open(tmp_path / "t.bin", "ab") as stream:
        stream.write(bytes(4))
    assert inspect(tmp_path / "n").problems == ("token ids go down to -5: ids are never negative",)
    assert inspect(tmp_path / "l").problems == ("token ids go up to 2147483647: no vocabulary is that large",)
    assert inspect(tmp_path / "e").problems == ("there is not a single token",)
    assert inspect(tmp_path / "t").problems == ("the .bin file has 6 bytes, of which the documents are 2",)


def test_samples_are_spread_over_the_documents(tmp_path: Path) -> None:
    data = write_documents(tmp_path / "d", [[1], [], [1], [1], [1], []])
    assert [sample_documents(data, n) for n in (0, 1, 2, 3, 9)] == [[], [0], [0, 4], [0, 3, 4], [0, 2, 3, 4]]


def test_the_command_says_all_of_it(tmp_path: Path) -> None:
    write_documents(tmp_path / "d", [[1, 2, 5], [3, 5]])
    null = ("--tokenizer-type", "NullTokenizer", "--vocab-size", 5)
    done = tool("inspect_data", tmp_path / "d", *null, "--documents", 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{tmp_path / 'd'}",
        "  2 documents in 2 sequences, 0 of them empty",
        "  5 tokens of type uint16, 10 bytes",
        "  tokens per document: shortest 2, 5 % 2, median 2, 95 % 3, longest 3",
        "  ids 1 to 5, 4 different ones, entropy 1.3322 nats per token",
        "  2 documents end with the end-of-document token",
        "  document 0, 3 tokens: '1 2 5'",
        "  document 1, 2 tokens: '3 5'",
    ]
    (tmp_path / "d.bin").write_bytes(b"12")
    done = tool("inspect_data", tmp_path / "d", tmp_path / "none")
    assert done.returncode == 1 and done.stdout.count("WRONG: ") == 2 and "Traceback" not in done.stderr
    assert tool("inspect_data", tmp_path / "d", "--tokenizer-type", "X").returncode == 2
