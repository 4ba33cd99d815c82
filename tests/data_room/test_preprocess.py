"""Parts, processes, going on after a stop, and compressed input."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import zstandard

from megackpt.config.errors import UsageError
from megackpt.config.tokenizer import TokenizerConfig
from megackpt.data.documents import DocumentReader
from megackpt.data.indexed import IndexedDataset
from megackpt.data.preprocess import preprocess
from megackpt.data.preprocess_part import PreprocessOptions, cut_into_parts
from tests.pool import ROOT

OPTIONS = PreprocessOptions(TokenizerConfig(type="NullTokenizer", vocab_size=100_000), append_eod=True)


def corpus(path: Path, documents: int = 400) -> list[list[int]]:
    """Lines of very different lengths, odd ones among them; returns the token lists."""
    lines, expected = ["", '{"text": ""}'], []
    for i in range(documents):
        ids = [(i * 7 + j) % 90_000 for j in range(i * i % 23 + 1)]
        lines.append(json.dumps({"text": " ".join(map(str, ids)), "other": "é" * (i % 5)}, ensure_ascii=False))
        expected.append([*ids, 100_000])
        if i % 50 == 3:
            lines.append("{broken")
    path.write_text("\n".join(lines), encoding="utf-8")  # no line end after the last
    return expected


def documents(prefix: Path | str) -> list[list[int]]:
    read = IndexedDataset(prefix)
    return [read.get(i).tolist() for i in range(len(read))]


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("part_bytes", [60, 1000, 10**9])
def test_parts_of_any_size_give_the_same_bytes(tmp_path: Path, part_bytes: int) -> None:
    expected = corpus(tmp_path / "c.jsonl", 60)
    whole = preprocess([tmp_path / "c.jsonl"], str(tmp_path / "whole"), OPTIONS)
    cut = preprocess([tmp_path / "c.jsonl"], str(tmp_path / "cut"), OPTIONS, part_bytes=part_bytes)
    assert documents(tmp_path / "whole_text_document") == expected
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"cut_text_document.{suffix}").read_bytes() == (
            tmp_path / f"whole_text_document.{suffix}"
        ).read_bytes()
    assert (cut.documents, cut.tokens, cut.odd) == (whole.documents, whole.tokens, whole.odd)
    assert whole.odd == {"blank line": 1, "'text' is empty": 1, "not JSON": 2}
    assert files(tmp_path) == {"c.jsonl", *(f"{n}_text_document.{s}" for n in ("cut", "whole") for s in ("bin", "idx"))}


def test_every_line_belongs_to_one_part(tmp_path: Path) -> None:
    """Cut points before, on and after line ends, and parts that hold no line at all."""
    (tmp_path / "c.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "1"}\n\n{"text": "22"}\n{"text": "3"}')
    size = (tmp_path / "c.jsonl").stat().st_size
    for low in range(size + 1):
        for high in (low, min(size, low + 5), size):
            parts = [(0, low), (low, high), (high, size)]
            found = [d["text"] for p in parts for d in DocumentReader(tmp_path / "c.jsonl", ("text",), "auto", 0, p)]
            assert found == ["1", "22", "3"], parts


def test_processes_give_the_same_files_and_report(tmp_path: Path) -> None:
    expected = corpus(tmp_path / "c.jsonl") + corpus(tmp_path / "d.jsonl", 30)
    said: list[str] = []
    report = preprocess(
        [tmp_path / "*.jsonl"], str(tmp_path / "o"), OPTIONS, 2, 3, say=said.append, interval_s=0, part_bytes=2000
    )
    assert documents(tmp_path / "o_text_document") == expected
    assert report.documents == {"text": 430} and report.tokens == {"text": sum(map(len, expected))}
    assert report.odd["not JSON"] == 9 and said and "documents" in said[-1]
    parts = [(part.start, part.stop) for part in cut_into_parts([str(tmp_path / "c.jsonl")], OPTIONS, 3, 10**9)]
    assert len(parts) == 3 and parts[0][1] == parts[1][0] and parts[2][1] == (tmp_path / "c.jsonl").stat().st_size


def test_an_error_in_a_process_comes_out_here_and_ends_the_others(tmp_path: Path) -> None:
    corpus(tmp_path / "a.jsonl", 30)
    whole = gzip.compress(b'{"text": "1"}\n' * 5000)
    (tmp_path / "b.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    for partitions in (1, 2):
        with pytest.raises(UsageError, match=r"b.jsonl.gz: is damaged or cut off"):
            preprocess([tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"], str(tmp_path / "o"), OPTIONS, 1, partitions)
    assert files(tmp_path) == {"a.jsonl", "b.jsonl.gz", "o.preprocess"}
    (tmp_path / "b.jsonl.gz").write_bytes(whole)
    report = preprocess([tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"], str(tmp_path / "o"), OPTIONS)
    assert report.documents == {"text": 5030} and not (tmp_path / "o.preprocess").exists()


def test_stopped_runs_go_on_with_the_parts_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = corpus(tmp_path / "c.jsonl")
    import megackpt.data.preprocess_pool as pool

    real, written = pool.write_part, []

    def stop_at_fourth(part: Any, prefix: str, *rest: Any) -> Any:
        if len(written) == 3:
            written.append(None)
            raise KeyboardInterrupt
        written.append(prefix)
        return real(part, prefix, *rest)

    monkeypatch.setattr(pool, "write_part", stop_at_fourth)
    arguments = ([tmp_path / "c.jsonl"], str(tmp_path / "o"), OPTIONS)
    with pytest.raises(KeyboardInterrupt):
        preprocess(*arguments, part_bytes=3000)
    assert not (tmp_path / "o_text_document.idx").exists()
    (tmp_path / "o.preprocess" / "part-00003_text_document.partial-1.bin").write_bytes(b"left by a killed run")
    said: list[str] = []
    report = preprocess(*arguments, part_bytes=10**9, say=said.append)  # the parts are those of the first run
    count = len(written)
    assert said == [f"going on: 3 of {count - 1} parts are there, in {tmp_path / 'o.preprocess'}"]
    assert len({name for name in written if name}) == count - 1 > 5  # each part once
    assert documents(tmp_path / "o_text_document") == expected and report.documents == {"text": 400}
    assert files(tmp_path) == {"c.jsonl", "o_text_document.bin", "o_text_document.idx"}


def test_parts_of_another_input_or_other_options_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus(tmp_path / "c.jsonl", 40)
    import megackpt.data.preprocess as module

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "_join", stop)
        with pytest.raises(KeyboardInterrupt):
            preprocess([tmp_path / "c.jsonl"], str(tmp_path / "o"), OPTIONS, part_bytes=300)
    said: list[str] = []
    plain = PreprocessOptions(OPTIONS.tokenizer)
    preprocess([tmp_path / "c.jsonl"], str(tmp_path / "o"), plain, say=said.append)
    assert said == [f"{tmp_path / 'o.preprocess'} is of another input or other options: starting afresh"]
    assert all(100_000 not in document for document in documents(tmp_path / "o_text_document"))


def test_two_runs_for_one_output_are_refused(tmp_path: Path) -> None:
    import fcntl

    corpus(tmp_path / "c.jsonl", 5)
    (tmp_path / "o.preprocess").mkdir()
    with open(tmp_path / "o.preprocess" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match=r"o.preprocess is in use: another run writes to the same --output-prefix"):
            preprocess([tmp_path / "c.jsonl"], str(tmp_path / "o"), OPTIONS)
    preprocess([tmp_path / "c.jsonl"], str(tmp_path / "o"), OPTIONS)


def test_killed_command_goes_on_and_leaves_no_process(tmp_path: Path) -> None:
    """kill -9 of the parent in the middle: its workers end too, and the same command completes the work."""
    expected = corpus(tmp_path / "c.jsonl", 30_000)
    code = """
import sys
from megackpt.config.tokenizer import TokenizerConfig
from megackpt.data.preprocess import preprocess
from megackpt.data.preprocess_part import PreprocessOptions
options = PreprocessOptions(TokenizerConfig(type="NullTokenizer", vocab_size=100_000), append_eod=True)
preprocess([sys.argv[1]], sys.argv[2], options, partitions=2, part_bytes=100_000)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "c.jsonl"), str(tmp_path / "o")]
    started = subprocess.Popen(command, cwd=ROOT)
    folder = tmp_path / "o.preprocess"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not list(folder.glob("part-*.json")):
        time.sleep(0.01)
    workers = children(started.pid)
    started.send_signal(signal.SIGKILL)
    started.wait()
    assert len(workers) >= 2
    while time.monotonic() < deadline and any(alive(pid) for pid in workers):
        time.sleep(0.05)
    assert not any(alive(pid) for pid in workers)
    done = len(list(folder.glob("part-*.json")))
    assert 0 < done < 25
    said: list[str] = []
    preprocess([tmp_path / "c.jsonl"], str(tmp_path / "o"), OPTIONS, partitions=2, say=said.append)
    assert said[0].startswith(f"going on: {done} of ")
    assert documents(tmp_path / "o_text_document") == expected and not folder.exists()


def children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) == pid:
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# -- compressed input -------------------------------------------------------------------------------------------------


def texts(path: Path) -> list[str]:
    return [document["text"] for document in DocumentReader(path, ("text",), "auto", 0)]


def test_gz_and_zst_are_read_in_several_members_and_frames(tmp_path: Path) -> None:
    halves = [b'{"text": "a"}\n{"text": ', b'"' + b"b" * 300_000 + b'"}\n{"text": "c"}\n']
    (tmp_path / "c.jsonl.gz").write_bytes(b"".join(map(gzip.compress, halves)))
    compressor = zstandard.ZstdCompressor()
    (tmp_path / "c.jsonl.zst").write_bytes(b"".join(compressor.compress(half) for half in halves))
    for name in ("c.jsonl.gz", "c.jsonl.zst"):
        assert texts(tmp_path / name) == ["a", "b" * 300_000, "c"]
        reader = DocumentReader(tmp_path / name, ("text",), "auto", 0)
        assert not reader.divisible and len(list(reader)) == 3
        assert reader.bytes_read == sum(map(len, halves))
    (tmp_path / "c.txt.zst").write_bytes(compressor.compress(b"one\n\ntwo\n"))
    assert [d["text"] for d in DocumentReader(tmp_path / "c.txt.zst", ("text",), "auto", 2)] == ["one\n\n", "two\n"]
    (tmp_path / "empty.jsonl.zst").write_bytes(b"")
    assert texts(tmp_path / "empty.jsonl.zst") == []


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_damaged_archives_are_errors_and_never_short_texts(tmp_path: Path, suffix: str) -> None:
    lines = b"".join(b'{"text": "%d"}\n' % i for i in range(20_000))
    whole = gzip.compress(lines) if suffix == "gz" else zstandard.ZstdCompressor(write_checksum=True).compress(lines)
    path = tmp_path / f"c.jsonl.{suffix}"
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 64]) + whole[middle + 1 :]
    for content in (whole[:middle], whole[:-1], flipped, b"no archive", whole + b"trailing rubbish"):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=rf"--input .*c.jsonl.{suffix}: is damaged"):
            texts(path)
    path.write_bytes(whole)
    assert len(texts(path)) == 20_000


def test_a_line_without_an_end_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megackpt.data.documents._MAX_LINE_BYTES", 100)
    (tmp_path / "c.jsonl").write_text('{"text": "a"}\n{"text": "' + "x" * 1000 + '"}\n{"text": "b"}\n')
    reader = DocumentReader(tmp_path / "c.jsonl", ("text",), "auto", 0)
    assert [d["text"] for d in reader] == ["a", "b"]
    assert reader.odd == {"a line longer than 100 bytes": 1}
    assert reader.bytes_read == (tmp_path / "c.jsonl").stat().st_size


def test_keys_become_file_names(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot hold /"):
        PreprocessOptions(OPTIONS.tokenizer, ("../x",))
    assert os.listdir(tmp_path) == []
