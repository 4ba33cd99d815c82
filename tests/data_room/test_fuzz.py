"""Damaged files of every kind: an error with a name, never a crash, a hang or a wild allocation.

Each format is fuzzed in one process of its own, whose memory is limited: what would take gigabytes dies, and is seen.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megackpt.config.errors import UsageError
from megackpt.config.tokenizer import TokenizerConfig
from megackpt.data.indexed import IndexedDataset
from megackpt.data.inspect import inspect
from megackpt.data.tokenizer import build_tokenizer
from tests.data_room.test_indexed import index_bytes
from tests.data_room.test_tokenizer import train
from tests.data_room.tokenizer_files import gpt2_files, hugging_face, rank_file
from tests.data_room.tools import write_documents

EXTRA_MEMORY = 1 << 30
TEXT = "the cat  sat on 12 MATs\n é\U0001f600 <|endoftext|>"
QUICK = settings(deadline=20_000, database=None, derandomize=True, suppress_health_check=list(HealthCheck))

# What happens to a file: bytes changed, a stretch cut out or doubled, rubbish put in, cut off.
EDITS = st.lists(
    st.tuples(st.sampled_from(["set", "cut", "double", "insert", "truncate"]), st.floats(0, 1), st.integers(0, 255),
              st.binary(min_size=1, max_size=9)),
    min_size=1, max_size=4,
)  # fmt: skip
WORDS = st.sampled_from(
    [b"\xff" * 8, b"\0" * 8, b"\x7f" + b"\xff" * 7, b"1e308", b"-1", b"null", b'""', b"[[[[", b"9" * 20]
)


def edited(raw: bytes, edits: list[tuple[str, float, int, bytes]]) -> bytes:
    for what, place, number, rubbish in edits:
        at = int(place * len(raw))
        if what == "set":
            raw = raw[:at] + bytes([number]) + raw[at + 1 :]
        elif what == "cut":
            raw = raw[:at] + raw[at + number :]
        elif what == "double":
            raw = raw[:at] + raw[at : at + number] * 2 + raw[at + number :]
        elif what == "insert":
            raw = raw[:at] + rubbish + raw[at + len(rubbish) * (number % 2) :]
        else:
            raw = raw[:at]
    return raw


def index(folder: Path) -> tuple[Path, Callable[[], object]]:
    write_documents(folder / "d", [[7, 8, 9], [], [500], [1, 2]])
    raw = index_bytes([1, 2, 0, 1, 1], [0, 2, 6, 6, 8], [0, 2, 3, 4, 5])
    (folder / "d.idx").write_bytes(raw)

    def use() -> None:
        read = IndexedDataset(folder / "d")
        total = sum(len(read.get(i)) for i in range(len(read)))
        assert total == read.total_tokens == sum(map(len, read.runs())) <= 6
        inspect(folder / "d")

    return folder / "d.idx", use


def tokenizer(kind: str, **files: str) -> Callable[[], object]:
    def use() -> None:
        made = build_tokenizer(TokenizerConfig(type=kind, **files))  # type: ignore[arg-type]
        ids = made.tokenize_batch([TEXT, ""])[0]
        assert all(0 <= i < made.vocab_size for i in ids)
        for value in vars(made.special).values():
            assert value is None or 0 <= value < made.vocab_size
        made.detokenize(ids)

    return use


def vocabulary(folder: Path) -> tuple[Path, Callable[[], object]]:
    vocab, merges = gpt2_files(folder)
    return Path(vocab), tokenizer("GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)


def merges(folder: Path) -> tuple[Path, Callable[[], object]]:
    vocab, merge_file = gpt2_files(folder)
    return Path(merge_file), tokenizer("GPT2BPETokenizer", vocab_file=vocab, merge_file=merge_file)


def tokenizer_json(folder: Path) -> tuple[Path, Callable[[], object]]:
    hugging_face(folder / "h", template=True, eos_token="<s>")
    return folder / "h" / "tokenizer.json", tokenizer("HuggingFaceTokenizer", model=str(folder / "h"))


def tokenizer_config(folder: Path) -> tuple[Path, Callable[[], object]]:
    hugging_face(folder / "h", eos_token="<s>", bos_token={"content": "<s>"})
    return folder / "h" / "tokenizer_config.json", tokenizer("HuggingFaceTokenizer", model=str(folder / "h"))


def ranks_json(folder: Path) -> tuple[Path, Callable[[], object]]:
    path = rank_file(folder / "r.json")
    return Path(path), tokenizer("TikTokenizer", model=path)


def ranks_lines(folder: Path) -> tuple[Path, Callable[[], object]]:
    path = rank_file(folder / "r.tiktoken")
    return Path(path), tokenizer("TikTokenizer", model=path)


def sentencepiece(folder: Path) -> tuple[Path, Callable[[], object]]:
    path = train(folder / "m.model")
    return Path(path), tokenizer("Llama2Tokenizer", model=path)


FORMATS: dict[str, tuple[Callable[[Path], tuple[Path, Callable[[], object]]], int]] = {
    "idx": (index, 400),
    "vocab.json": (vocabulary, 120),
    "merges.txt": (merges, 120),
    "tokenizer.json": (tokenizer_json, 120),
    "tokenizer_config.json": (tokenizer_config, 120),
    "ranks.json": (ranks_json, 80),
    "ranks.tiktoken": (ranks_lines, 80),
    "sentencepiece": (sentencepiece, 120),
}


def _fuzz(name: str, examples: int, answer: object) -> None:
    """In a process with limited memory.  Answers with the number of files that were refused and of those read."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + EXTRA_MEMORY, used + EXTRA_MEMORY))
    counts = {"refused": 0, "read": 0}
    with tempfile.TemporaryDirectory() as folder:
        path, use = FORMATS[name][0](Path(folder))
        whole = path.read_bytes()
        use()

        @settings(QUICK, max_examples=examples)
        @given(EDITS, st.one_of(st.none(), WORDS), st.floats(0, 1))
        def damaged(edits: list[tuple[str, float, int, bytes]], word: bytes | None, place: float) -> None:
            raw = edited(whole, edits)
            if word is not None:  # a number of the file becomes a strange one
                at = int(place * len(raw))
                raw = raw[:at] + word + raw[at + len(word) :]
            path.write_bytes(raw)
            try:
                use()
                counts["read"] += 1
            except UsageError as error:
                assert str(path.with_suffix("")) in str(error) or str(path.parent) in str(error), error
                counts["refused"] += 1

        damaged()
    answer.put(counts)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files(name: str, request: pytest.FixtureRequest) -> None:
    examples = FORMATS[name][1] * (4 if request.config.getoption("--full") else 1)
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=_fuzz, args=(name, examples, answer))
    process.start()
    process.join(100)
    hung = process.is_alive()
    process.kill()
    process.join()
    assert not hung and process.exitcode == 0, f"{name}: exit code {process.exitcode}, still running: {hung}"
    counts = answer.get(timeout=5)
    assert counts["refused"] > 0 and sum(counts.values()) >= examples // 2


def test_counts_that_would_fill_memory_are_refused_at_once(tmp_path: Path) -> None:
    """Sizes are compared with the file before anything is allocated: 2^40 sequences in 34 bytes."""
    (tmp_path / "d.bin").write_bytes(b"")
    for sequences, documents in [(2**40, 1), (1, 2**60), (2**63 - 1, 2**63 - 1), (0, 2**64 - 1)]:
        head = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + b"\x08"
        (tmp_path / "d.idx").write_bytes(head + sequences.to_bytes(8, "little") + documents.to_bytes(8, "little"))
        with pytest.raises(UsageError, match="the file is damaged or cut off"):
            IndexedDataset(tmp_path / "d")
    assert sys.getsizeof(np.empty(0)) < 1000
