"""The file format, byte for byte, its validation, and offsets past 2 and 4 GiB."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from megackpt.config.errors import UsageError
from megackpt.data.indexed import IndexedDataset
from megackpt.data.indexed_writer import IndexedWriter, token_dtype
from tests.data_room.tools import write_documents

DOCUMENTS = [[7, 8, 9], [], [500], [1, 2]]


def index_bytes(
    lengths: list[int],
    pointers: list[int],
    bounds: list[int],
    code: int = 8,
    version: int = 1,
    magic: bytes = b"MMIDIDX\0\0",
) -> bytes:
    head = magic + struct.pack("<QBQQ", version, code, len(lengths), len(bounds))
    return head + struct.pack(f"<{len(lengths)}i{len(pointers)}q{len(bounds)}q", *lengths, *pointers, *bounds)


def test_bytes_on_disk(tmp_path: Path) -> None:
    write_documents(tmp_path / "d", DOCUMENTS)
    assert (tmp_path / "d.bin").read_bytes() == struct.pack("<6H", 7, 8, 9, 500, 1, 2)
    assert (tmp_path / "d.idx").read_bytes() == index_bytes([3, 0, 1, 2], [0, 6, 6, 8], [0, 1, 2, 3, 4])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d.bin", "d.idx"]


@pytest.mark.parametrize("dtype", ["<u1", "<i1", "<i2", "<i4", "<i8", "<u2"])
def test_read_back(tmp_path: Path, dtype: str) -> None:
    documents = [[7, 8, 9], [], [100], [1, 2]]
    read = write_documents(tmp_path / "d", documents, dtype)
    assert [read.get(i).tolist() for i in range(len(read))] == documents
    assert read.lengths.tolist() == [3, 0, 1, 2] and read.total_tokens == 6 and read.dtype == np.dtype(dtype)
    assert read.get(0, 1, 2).tolist() == [8, 9]
    with pytest.raises(IndexError, match="tokens 2 to 4 of document 0, which has 3"):
        read.get(0, 2, 2)


def test_a_document_of_several_sequences_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "d.bin").write_bytes(struct.pack("<6H", 1, 2, 3, 4, 5, 6))
    (tmp_path / "d.idx").write_bytes(index_bytes([1, 2, 3], [0, 2, 6], [0, 2, 3]))
    read = IndexedDataset(tmp_path / "d")
    assert [read.get(i).tolist() for i in range(2)] == [[1, 2, 3], [4, 5, 6]]


def test_modes_are_allowed_and_no_documents_too(tmp_path: Path) -> None:
    (tmp_path / "d.bin").write_bytes(struct.pack("<2H", 1, 2))
    (tmp_path / "d.idx").write_bytes(index_bytes([1, 1], [0, 2], [0, 1, 2]) + b"\0\1")
    assert IndexedDataset(tmp_path / "d").get(1).tolist() == [2]
    assert len(write_documents(tmp_path / "empty", [])) == 0
    assert write_documents(tmp_path / "hollow", [[], []]).lengths.tolist() == [0, 0]


FAULTS = {
    "magic": (index_bytes([1], [0], [0, 1], magic=b"XMIDIDX\0\0"), "not an indexed dataset"),
    "version": (index_bytes([1], [0], [0, 1], version=2), "index version 2"),
    "dtype": (index_bytes([1], [0], [0, 1], code=9), "token type code 9"),
    "float": (index_bytes([1], [0], [0, 1], code=7), "token type code 7"),
    "short": (b"MMIDIDX", "7 bytes is less than the header"),
    "cut": (index_bytes([1, 1], [0, 2], [0, 1, 2])[:-1], "damaged or cut off"),
    "bounds": (index_bytes([1, 1], [0, 2], [0, 1, 3]), "must rise from 0 to the number of sequences, 2"),
    "bounds fall": (index_bytes([1, 1], [0, 2], [0, 2, 1, 2]), "must rise from 0"),
    "negative": (index_bytes([1, -1], [0, 2], [0, 1, 2]), "sequence 1 has the length -1"),
    "offsets fall": (index_bytes([1, 1], [2, 0], [0, 1, 2]), "byte offsets must rise"),
    "overlap": (index_bytes([2, 1], [0, 2], [0, 1, 2]), "byte offsets must rise"),
    "odd offset": (index_bytes([1], [1], [0, 1]), "multiples of 2"),
    "past the end": (index_bytes([1, 3], [0, 2], [0, 1, 2]), "ends at byte 8, but .*d.bin has 6"),
    "gap in a document": (index_bytes([1, 1], [0, 4], [0, 2]), "must lie next to each other"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_damaged_index_is_refused(tmp_path: Path, fault: str) -> None:
    content, message = FAULTS[fault]
    (tmp_path / "d.bin").write_bytes(bytes(6))
    (tmp_path / "d.idx").write_bytes(content)
    with pytest.raises(UsageError, match=message):
        IndexedDataset(tmp_path / "d")


def test_missing_file_names_the_likely_prefix(tmp_path: Path) -> None:
    write_documents(tmp_path / "c_text_document", DOCUMENTS)
    for wrong in ("c", "c_text_document.bin"):
        with pytest.raises(UsageError, match=r"there is no file .*; did you mean .*c_text_document$"):
            IndexedDataset(tmp_path / wrong)
    with pytest.raises(UsageError, match="preprocess_data.py makes such files"):
        IndexedDataset(tmp_path / "nothing")


@pytest.mark.parametrize("first_gib", [2, 4])
def test_document_past_gibibytes(tmp_path: Path, first_gib: int) -> None:
    """DI-13: byte offsets are 64-bit. The file is sparse."""
    start = first_gib * 2**30
    lengths = [2**29] * (first_gib // 2) + [3]  # int32 tokens: 2 GiB each
    with open(tmp_path / "d.bin", "wb") as stream:
        stream.seek(start)
        stream.write(struct.pack("<3i", 11, 12, 13))
    pointers = [2**31 * k for k in range(len(lengths))]
    (tmp_path / "d.idx").write_bytes(index_bytes(lengths, pointers, list(range(len(lengths) + 1)), code=4))
    read = IndexedDataset(tmp_path / "d")
    assert pointers[-1] == start
    assert read.get(len(lengths) - 1).tolist() == [11, 12, 13]
    assert read.get(0, 2**29 - 2, 2).tolist() == [0, 0]
    assert read.total_tokens == sum(lengths)


def test_token_type_by_vocabulary() -> None:
    assert [str(token_dtype(v)) for v in (65_499, 65_500, None)] == ["uint16", "int32", "int32"]


def test_writer_refuses_ids_that_do_not_fit_and_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match="65536 do not fit into uint16"),
        IndexedWriter(tmp_path / "d", np.dtype("<u2")) as w,
    ):
        w.add([1])
        w.add([65_536])
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_rewrite_keeps_the_old_files(tmp_path: Path) -> None:
    write_documents(tmp_path / "d", DOCUMENTS)
    with pytest.raises(KeyboardInterrupt), IndexedWriter(tmp_path / "d", np.dtype("<u2")) as writer:
        writer.add([1])
        raise KeyboardInterrupt
    assert IndexedDataset(tmp_path / "d").get(0).tolist() == [7, 8, 9]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d.bin", "d.idx"]
