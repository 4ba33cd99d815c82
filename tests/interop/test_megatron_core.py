"""Our datasets in megatron-core's hands and its datasets in ours, with the real package."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megackpt.config.tokenizer import TokenizerConfig
from megackpt.data.indexed import IndexedDataset
from megackpt.data.indexed_writer import IndexedWriter, token_dtype
from megackpt.data.merge import merge_datasets
from megackpt.data.preprocess import preprocess
from megackpt.data.preprocess_part import PreprocessOptions
from megackpt.data.sample_index import build_sample_index
from tests.pool import ROOT

THEIRS = ROOT / ".interop"
pytestmark = pytest.mark.skipif(not (THEIRS / "megatron").is_dir(), reason="megatron-core is not installed")

Documents = list[list[list[int]]]
PLAIN: Documents = [[[7, 8, 9]], [[]], [[500]], [[1, 2]], [[]]]
PARTS: Documents = [[[1], [2, 3]], [[4, 5, 6]], [[], [7]]]
WIDE: Documents = [[[70_000, 1]], [[2**31 - 1]]]
WRITE = {"plain": ("uint16", PLAIN), "parts": ("uint16", PARTS), "wide": ("int32", WIDE), "bytes": ("uint8", PLAIN[3:])}
VOCABULARIES = [1, 65_499, 65_500, 200_000, None]
SPARSE = [2**29, 2**29, 3]  # int32 tokens: the last begins at byte 4 GiB
SAMPLES = [
    ([5, 0, 1, 12, 3, 0, 7, 2], 4, 3),
    ([5, 0, 1, 12, 3, 0, 7, 2], 29, 2),
    ([5, 0, 1, 12, 3, 0, 7, 2], 2, 1),
    ([int(n) for n in np.random.default_rng(3).integers(0, 300, 5000)], 64, 2),
    ([int(n) for n in np.random.default_rng(4).integers(1, 4, 40_000)], 2048, 5),
]
OPTIONS = PreprocessOptions(TokenizerConfig(type="NullTokenizer", vocab_size=900), append_eod=True)


def write(prefix: Path, dtype: str, documents: Documents) -> None:
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for sequences in documents:
            writer.add([token for sequence in sequences for token in sequence])


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """One run of the driver: importing megatron-core takes seconds."""
    folder = tmp_path_factory.mktemp("interop")
    write(folder / "ours_plain", "<u2", PLAIN)
    write(folder / "ours_wide", "<i4", WIDE)
    (folder / "c.jsonl").write_text("".join(json.dumps({"text": f"{i} {2 * i}"}) + "\n" for i in range(300)))
    preprocess([folder / "c.jsonl"], str(folder / "ours"), OPTIONS, partitions=1, part_bytes=1000)
    with open(folder / "far.bin", "wb") as stream:
        stream.seek(4 * sum(SPARSE[:2]))
        stream.write(struct.pack("<3i", 11, 12, 13))
    pointers, bounds = [0, 2**31, 2**32], [0, 1, 2, 3]
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, 3, 4)
    (folder / "far.idx").write_bytes(head + struct.pack("<3i3q4q", *SPARSE, *pointers, *bounds))
    task = {
        "write": WRITE,
        "merge": {"merged": ["plain", "parts", "ours_plain"]},
        "read": ["ours_plain", "ours_wide", "ours_text_document"],
        "far": ["far", 1, 2],
        "sparse": SPARSE,
        "vocabularies": VOCABULARIES,
        "samples": [
            [sizes, order_of(sizes, seq_length, epochs), seq_length, epochs] for sizes, seq_length, epochs in SAMPLES
        ],
    }
    (folder / "task.json").write_text(json.dumps(task))
    driver = Path(__file__).with_name("megatron_driver.py")
    env = {**os.environ, "PYTHONPATH": str(THEIRS)}
    run = subprocess.run(
        [sys.executable, str(driver), str(folder)], env=env, capture_output=True, text=True, timeout=110
    )
    assert run.returncode == 0, run.stderr
    return folder, json.loads((folder / "answer.json").read_text())


def order_of(sizes: list[int], seq_length: int, epochs: int) -> list[int]:
    """Our order of the documents, whole epochs of it."""
    index = build_sample_index(np.array(sizes), range(len(sizes)), seq_length, 9, samples_of(sizes, seq_length, epochs))
    assert len(index.documents) >= epochs * len(sizes) - sizes.count(0)
    rest = sorted(set(range(len(sizes))) - set(index.documents[(epochs - 1) * len(sizes) :].tolist()))
    return [*index.documents[: epochs * len(sizes)].tolist(), *rest][: epochs * len(sizes)]


def samples_of(sizes: list[int], seq_length: int, epochs: int) -> int:
    return (epochs * sum(sizes) - 1) // seq_length


def same_bytes(a: Path, b: Path) -> None:
    for suffix in (".bin", ".idx"):
        assert a.with_name(a.name + suffix).read_bytes() == b.with_name(b.name + suffix).read_bytes()


def test_both_write_the_same_bytes(done: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, _ = done
    same_bytes(folder / "plain", folder / "ours_plain")
    same_bytes(folder / "wide", folder / "ours_wide")
    write(tmp_path / "bytes", "<u1", PLAIN[3:])
    same_bytes(folder / "bytes", tmp_path / "bytes")


def test_we_read_what_it_writes(done: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = done
    for name, (dtype, documents) in WRITE.items():
        read = IndexedDataset(folder / name)
        assert read.dtype == np.dtype(dtype) and len(read) == len(documents)
        assert [read.get(i).tolist() for i in range(len(read))] == [[t for s in d for t in s] for d in documents]


def test_it_reads_what_we_write(done: tuple[Path, dict[str, Any]]) -> None:
    _, answer = done
    assert answer["read"]["ours_plain"] == {
        "sequences": [s for d in PLAIN for s in d], "documents": list(range(6)), "dtype": "uint16"
    }  # fmt: skip
    assert answer["read"]["ours_wide"]["sequences"] == [[70_000, 1], [2**31 - 1]]
    text = answer["read"]["ours_text_document"]
    assert text["sequences"] == [[i, 2 * i, 900] for i in range(300)] and text["documents"] == list(range(301))


def test_both_merge_to_the_same_bytes(done: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = done
    merge_datasets([str(folder / name) for name in ("plain", "parts", "ours_plain")], str(folder / "ours_merged"))
    same_bytes(folder / "merged", folder / "ours_merged")


def test_offsets_past_four_gibibytes_in_both_directions(done: tuple[Path, dict[str, Any]]) -> None:
    """DI-13."""
    folder, answer = done
    assert answer["far"] == [12, 13]
    assert (folder / "sparse.idx").read_bytes() == (folder / "far.idx").read_bytes()
    os.link(folder / "far.bin", folder / "sparse.bin")
    assert IndexedDataset(folder / "sparse").get(2).tolist() == [11, 12, 13]


def test_both_choose_the_same_token_type(done: tuple[Path, dict[str, Any]]) -> None:
    assert [str(token_dtype(v)) for v in VOCABULARIES] == done[1]["dtypes"]


@pytest.mark.parametrize("number", range(len(SAMPLES)))
def test_both_cut_the_same_samples(done: tuple[Path, dict[str, Any]], number: int) -> None:
    """For one order of documents its compiled helper and our index start every sample at the same token."""
    sizes, seq_length, epochs = SAMPLES[number]
    count = samples_of(sizes, seq_length, epochs)
    theirs = np.load(done[0] / f"samples-{number}.npy")
    ours = build_sample_index(np.array(sizes), range(len(sizes)), seq_length, 9, count).starts
    assert theirs.shape == (count + 1, 2)
    assert np.array_equal(theirs, ours[: count + 1])
