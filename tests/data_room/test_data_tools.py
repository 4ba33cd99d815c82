"""The four data tools, through their command lines, on documents of every odd kind."""

from __future__ import annotations

import gzip
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megackpt.config.errors import UsageError
from megackpt.config.tokenizer import TokenizerConfig
from megackpt.data.corpus import source_documents, standard_library_root
from megackpt.data.documents import DocumentReader, split_text
from megackpt.data.entropy import corpus_statistics, token_counts, unigram_entropy
from megackpt.data.indexed import IndexedDataset
from megackpt.data.preprocess import preprocess
from megackpt.data.preprocess_part import PreprocessOptions
from megackpt.data.tokenizer_sentencepiece import SentencePieceTokenizer
from tests.data_room.tools import write_documents
from tests.pool import ROOT


def tool(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / f"{name}.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, cwd="/")


def jsonl(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def documents(prefix: str | Path) -> list[list[int]]:
    read = IndexedDataset(prefix)
    return [read.get(i).tolist() for i in range(len(read))]


def null(vocab_size: int, **more: Any) -> PreprocessOptions:
    return PreprocessOptions(TokenizerConfig(type="NullTokenizer", vocab_size=vocab_size), **more)


NULL = ("--tokenizer-type", "NullTokenizer", "--vocab-size", 100)


def test_three_documents_with_eod(tmp_path: Path) -> None:
    """DI-05: lengths count the eod, and every document ends with it."""
    source = jsonl(tmp_path / "c.jsonl", {"text": "1 2 3"}, {"text": "4"}, {"text": "5 6"})
    done = tool("preprocess_data", "--input", source, "--output-prefix", tmp_path / "o" / "c", "--append-eod", *NULL)
    assert done.returncode == 0, done.stderr
    read = IndexedDataset(tmp_path / "o" / "c_text_document")
    assert documents(tmp_path / "o" / "c_text_document") == [[1, 2, 3, 100], [4, 100], [5, 6, 100]]
    assert read.lengths.sum() == (tmp_path / "o" / "c_text_document.bin").stat().st_size // 2 == 9
    assert "3 documents, 9 tokens" in done.stdout
    assert f"--data-path {tmp_path / 'o' / 'c_text_document'}" in done.stdout


ODD = [
    '{"text": ""}', '{"text": "1"}', "", '{"other": "1"}', '{"text": 5}', '{"text": null}', "{broken", "[1]", '"x"',
    '{"text": " \\t"}', '{"text": "2 x"}', '{"text": "3 \\ud800"}', "[" * 100_000, '{"text": "4"}', '{"text": ""}',
]  # fmt: skip


def test_odd_documents_are_left_out_and_counted(tmp_path: Path) -> None:
    """DI-04: empty documents first, in the middle and last, a blank line, a missing key, text that is none."""
    (tmp_path / "c.jsonl").write_text("\n".join(ODD))
    arguments = ("--input", tmp_path / "c.jsonl", "--output-prefix", tmp_path / "c", "--append-eod", *NULL)
    done = tool("preprocess_data", *arguments)
    assert done.returncode == 0, done.stderr
    assert documents(tmp_path / "c_text_document") == [[1, 100], [4, 100]]
    counts = [line for line in done.stdout.splitlines() if line.startswith("left out or changed")]
    assert counts == [
        "left out or changed: 3 x 'text' is empty",
        "left out or changed: 2 x 'text' is not a string",
        "left out or changed: 1 x blank line",
        "left out or changed: 2 x cannot be tokenised",
        "left out or changed: 1 x lone surrogate replaced",
        "left out or changed: 1 x no key 'text'",
        "left out or changed: 2 x not JSON",
        "left out or changed: 2 x not a JSON object",
    ]
    assert "  c.jsonl, line 4: no key 'text'" in done.stdout
    assert tool("preprocess_data", *arguments, "--strict").returncode == 1


@pytest.mark.parametrize("suffix", ["jsonl", "txt"])
def test_bytes_of_another_encoding_are_counted(tmp_path: Path, suffix: str) -> None:
    text = 'caf\u00e9' if suffix == "txt" else '{"text": "3 4"}\n{"text": "caf\u00e9"}'
    (tmp_path / f"c.{suffix}").write_bytes(text.encode("latin-1") + b"\n")
    reader = DocumentReader(tmp_path / f"c.{suffix}", ["text"], "auto", 0)
    assert [document["text"].strip() for document in reader][-1] == "caf\ufffd"
    place = text.encode("latin-1").index(0xE9)
    assert reader.odd == {"bytes that are not UTF-8 replaced": 1}
    assert reader.examples == [f"c.{suffix}, byte {place}: bytes that are not UTF-8 replaced"]


def test_only_odd_documents_is_an_error_that_leaves_no_files(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text('{"text": ""}\n\n')
    done = tool("preprocess_data", "--input", tmp_path / "c.jsonl", "--output-prefix", tmp_path / "c", *NULL)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        "preprocess_data.py: no document with text under the key 'text' in the input"
        " (1 x 'text' is empty, 1 x blank line)\n"
    )
    assert [p.name for p in tmp_path.iterdir()] == ["c.jsonl"]


def test_other_mistakes_exit_with_two_and_a_sentence(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "c.jsonl", {"text": "1"})
    for arguments, message in [
        (("--input", tmp_path / "x", *NULL), "x: there is no such file"),
        (("--input", source, "--tokenizer-type", "Nonsense"), "or NullTokenizer; got 'Nonsense'"),
        (("--input", source, *NULL, "--json-keys", "a", "a"), "give one or more different keys"),
    ]:
        done = tool("preprocess_data", "--output-prefix", tmp_path / "c", *arguments)
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_outputs_that_cannot_be_written_exit_with_two_and_a_sentence(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "c.jsonl", *({"text": f"{i} apples and {i + 1} pears"} for i in range(50)))
    below = source / "out"  # under a file
    for name, arguments in {
        "preprocess_data": ("--input", source, "--output-prefix", below, "--tokenizer-type", "NullTokenizer"),
        "train_tokenizer": ("--input", source, "--vocab-size", 290, "--output", below),
        "build_corpus": ("--text", source, "--output", below),
    }.items():
        done = tool(name, *arguments, *(("--vocab-size", 9) if name == "preprocess_data" else ()))
        assert done.returncode == 2 and f"{below}: cannot be written" in done.stderr, done.stderr
        assert "Traceback" not in done.stderr


def test_several_files_and_keys_keep_their_order(tmp_path: Path) -> None:
    first = jsonl(tmp_path / "a.jsonl", {"text": "1", "title": "10"}, {"text": "2"})
    second = tmp_path / "b.jsonl.gz"
    with gzip.open(second, "wt") as stream:
        stream.write('\ufeff{"title": "20"}\n{"text": "3", "title": "30"}\n')
    report = preprocess([first, second], str(tmp_path / "c"), null(100, keys=("text", "title")))
    assert documents(tmp_path / "c_text_document") == [[1], [2], [3]]
    assert documents(tmp_path / "c_title_document") == [[10], [20], [30]]
    assert report.documents == {"text": 3, "title": 3} and report.odd == {"no key 'title'": 1, "no key 'text'": 1}


def test_many_documents_pass_batch_borders_and_are_reported(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "c.jsonl", *({"text": f"{i % 90} {i % 7}"} for i in range(1300)))
    said: list[str] = []
    preprocess([source], str(tmp_path / "c"), null(100), say=said.append, interval_s=0.0)
    assert documents(tmp_path / "c_text_document") == [[i % 90, i % 7] for i in range(1300)]
    assert [line.split(" | ")[1] for line in said] == ["512 documents", "1,024 documents", "1,300 documents"]
    assert said[-1].startswith("100.0 % | 1,300 documents | 2,600 tokens")


def test_large_vocabularies_are_stored_as_int32(tmp_path: Path) -> None:
    preprocess([jsonl(tmp_path / "c.jsonl", {"text": "70000"})], str(tmp_path / "c"), null(80_000))
    assert IndexedDataset(tmp_path / "c_text_document").dtype == np.dtype("<i4")
    assert documents(tmp_path / "c_text_document") == [[70_000]]


def test_plain_text_is_cut_at_blank_lines() -> None:
    lines = ["aaaa\n", "bbbb\n", "\n", "cc\n", "\n", "dddddddd\n", "e\n"]
    assert list(split_text(lines, 8)) == ["aaaa\nbbbb\n\n", "cc\n\ndddddddd\ne\n"]
    assert list(split_text(lines, 0)) == ["".join(lines)]
    assert list(split_text(["x" * 9 + "\n"] * 10, 5)) == ["xxxxxxxxx\n" * 2] * 5  # no blank line: cut at 4 x 5
    assert list(split_text(["\n", " \n"], 1)) == [] and list(split_text([], 5)) == []


def test_plain_text_input(tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_bytes(b"\xef\xbb\xbf1 2\n\n3\n\n4 5")
    done = tool(
        "preprocess_data",
        "--input",
        tmp_path / "c.txt",
        "--output-prefix",
        tmp_path / "c",
        "--document-chars",
        2,
        *NULL,
    )
    assert done.returncode == 0, done.stderr
    assert documents(tmp_path / "c_text_document") == [[1, 2], [3], [4, 5]]
    with pytest.raises(UsageError, match="--input-format xml: use one of auto, jsonl, text"):
        DocumentReader(tmp_path / "c.txt", ("text",), "xml", 5)


def test_corpus_of_the_standard_library(tmp_path: Path) -> None:
    outputs = []
    for name in ("a", "b"):
        done = tool("build_corpus", "--output", tmp_path / name, "--max-bytes", 300_000)
        assert done.returncode == 0, done.stderr
        outputs.append((tmp_path / name).read_bytes())
    assert outputs[0] == outputs[1]
    records = [json.loads(line) for line in outputs[0].splitlines()]
    size = sum(len(record["text"].encode()) for record in records)
    assert 270_000 < size <= 300_000 and len(records) > 5
    root = standard_library_root()
    assert all((root / r["source"]).read_text(encoding="utf-8", errors="replace") for r in records)
    assert not any("test" in Path(r["source"]).parts for r in records)
    assert [d.source for d in source_documents(root, 300_000)] == [r["source"] for r in records]
    assert f"{len(records)} documents" in done.stdout


def test_corpus_order_depends_on_relative_paths_only(tmp_path: Path) -> None:
    for place in ("one", "two/deeper"):
        root = tmp_path / place
        (root / "sub" / "test").mkdir(parents=True)
        for name in ("a", "b", "sub/c", "sub/test/d"):
            (root / f"{name}.py").write_text(f"# {name}\n")
        (root / "empty.py").write_text("\n")
        (root / "bad.py").write_bytes(b"# coding: utf-8\n\xff\xfe")
        (root / "latin.py").write_bytes("# coding: latin-1\n# é\n".encode("latin-1"))
    first, second = (list(source_documents(tmp_path / place)) for place in ("one", "two/deeper"))
    assert first == second
    assert sorted(d.source for d in first) == ["a.py", "b.py", "latin.py", "sub/c.py"]
    assert "é" in next(d.text for d in first if d.source == "latin.py")


def test_corpus_of_own_text(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("one\n\ntwo\n\nthree\n")
    done = tool(
        "build_corpus", "--output", tmp_path / "c.jsonl", "--text", tmp_path / "book.txt", "--document-chars", 5
    )
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "c.jsonl").read_text().splitlines()]
    assert records == [
        {"text": "one\n\n", "source": "book.txt part 0"},
        {"text": "two\n\n", "source": "book.txt part 1"},
        {"text": "three\n", "source": "book.txt part 2"},
    ]
    for arguments in (("--text", tmp_path / "none"), ("--sources", tmp_path / "none")):
        done = tool("build_corpus", "--output", tmp_path / "d.jsonl", *arguments)
        assert done.returncode == 2 and "none" in done.stderr and not (tmp_path / "d.jsonl").exists()


def test_corpus_to_tokens_and_entropy(tmp_path: Path) -> None:
    """The quickstart's path: corpus, tokenizer, tokens, entropy; and the text comes back from the tokens."""
    corpus, model, prefix = tmp_path / "c.jsonl", tmp_path / "t.model", tmp_path / "c"
    assert tool("build_corpus", "--output", corpus, "--max-bytes", 200_000).returncode == 0
    done = tool("train_tokenizer", "--input", corpus, "--vocab-size", 512, "--output", model)
    assert done.returncode == 0 and "512 pieces" in done.stdout, done.stderr
    tokenizer = ("--tokenizer-type", "GPTSentencePieceTokenizer", "--tokenizer-model", model)
    done = tool("preprocess_data", "--input", corpus, "--output-prefix", prefix, "--append-eod", *tokenizer)
    assert done.returncode == 0, done.stderr
    found = documents(f"{prefix}_text_document")
    reader = SentencePieceTokenizer(model)
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    assert [reader.detokenize(ids[:-1]) for ids in found] == texts and {ids[-1] for ids in found} == {2}
    flat = np.concatenate(found)
    share = np.bincount(flat)[np.bincount(flat) > 0] / len(flat)
    expected = -(share * np.log(share)).sum()
    done = tool("corpus_entropy", f"{prefix}_text_document", "--number-only")
    assert float(done.stdout) == pytest.approx(expected, abs=1e-6)
    assert 3.0 < expected < math.log(512)
    assert tool("corpus_entropy", tmp_path / "none").returncode == 2


def test_entropy_of_known_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert unigram_entropy(np.array([5, 0, 5])) == pytest.approx(math.log(2))
    assert unigram_entropy(np.array([0, 7])) == 0.0 and unigram_entropy(np.array([], dtype=np.int64)) == 0.0
    monkeypatch.setattr("megackpt.data.entropy._CHUNK", 3)
    indexed = write_documents(tmp_path / "a", [[1, 1, 1, 1, 5], [], [0], [5, 5, 2]])
    assert token_counts(indexed).tolist() == [1, 4, 1, 0, 0, 3]
    assert token_counts(indexed, range(2, 4)).tolist() == [1, 0, 1, 0, 0, 2]
    write_documents(tmp_path / "b", [[7] * 3])
    both = corpus_statistics([tmp_path / "a", tmp_path / "b"])
    expected = -sum(n / 12 * math.log(n / 12) for n in (1, 4, 1, 3, 3))
    assert (both.tokens, both.distinct) == (12, 5) and both.entropy == pytest.approx(expected)
