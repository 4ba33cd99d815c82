"""Text files to indexed datasets: what `tools/preprocess_data.py` does."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from megackpt.config.errors import UsageError
from megackpt.data.documents import DocumentReader
from megackpt.data.indexed import IndexedWriter, token_dtype
from megackpt.data.tokenizer import Tokenizer

_BATCH_DOCUMENTS = 512
_BATCH_CHARS = 4_000_000


@dataclass
class PreprocessReport:
    """What was written, and what was not and why."""

    documents: dict[str, int] = field(default_factory=dict)
    """Written documents by key."""
    tokens: dict[str, int] = field(default_factory=dict)
    """Written tokens by key, end-of-document tokens included."""
    odd: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    prefixes: dict[str, str] = field(default_factory=dict)
    """`--data-path` of each key."""


def output_prefix(prefix: str, key: str) -> str:
    """Megatron's name: `<prefix>_<key>_document`, so `corpus_text_document` for the usual key."""
    return f"{prefix}_{key}_document"


def preprocess(
    inputs: Sequence[str | os.PathLike[str]],
    prefix: str,
    tokenizer: Tokenizer,
    keys: Sequence[str] = ("text",),
    append_eod: bool = False,
    workers: int = 1,
    input_format: str = "auto",
    document_chars: int = 16_384,
    say: Callable[[str], None] = lambda line: None,
    interval_s: float = 2.0,
) -> PreprocessReport:
    """Tokenise the documents of `inputs` into one indexed dataset per key.

    Documents keep their order. Empty and unreadable ones are left out and counted. `append_eod` ends each
    document with the tokenizer's eod. `say` gets progress lines about every `interval_s` seconds. Raises
    UsageError, leaving no files, if a key has no document at all.
    """
    if not keys or len(set(keys)) != len(keys):
        raise UsageError(f"--json-keys {' '.join(keys)}: give one or more different keys")
    ending = [tokenizer.eod] if append_eod else []
    readers = [DocumentReader(path, keys, input_format, document_chars) for path in inputs]
    report = PreprocessReport()
    progress = _Progress(readers, say, interval_s)
    with ExitStack() as stack:
        dtype = token_dtype(tokenizer.vocab_size)
        writers = {key: stack.enter_context(IndexedWriter(output_prefix(prefix, key), dtype)) for key in keys}
        for reader in readers:
            for batch in _batches(reader):
                for key, writer in writers.items():
                    texts = [document[key] for document in batch if key in document]
                    for ids in _encode(tokenizer, texts, workers, reader):
                        if ids:
                            writer.add(ids + ending)
                        else:
                            reader.note(f"{key!r} gives no tokens", f"document {writer.documents}")
                progress.step(sum(writer.documents for writer in writers.values()), writers)
            report.odd.update(reader.odd)
            report.examples.extend(reader.examples)
        for key, writer in writers.items():
            if writer.documents == 0:
                reasons = ", ".join(f"{count} x {reason}" for reason, count in sorted(report.odd.items())) or "no lines"
                raise UsageError(f"no document with text under the key {key!r} in the input ({reasons})")
            report.documents[key] = writer.documents
            report.tokens[key] = writer.total_tokens
            report.prefixes[key] = writer.prefix
    return report


def _batches(documents: Iterable[dict[str, str]]) -> Iterator[list[dict[str, str]]]:
    batch: list[dict[str, str]] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += sum(map(len, document.values()))
        if len(batch) >= _BATCH_DOCUMENTS or size >= _BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode(tokenizer: Tokenizer, texts: Sequence[str], workers: int, reader: DocumentReader) -> list[list[int]]:
    """Ids of each text; if one of them cannot be read the batch is taken apart and that one is left out."""
    try:
        return tokenizer.tokenize_batch(texts, workers)
    except UsageError:
        out = []
        for text in texts:
            try:
                out.append(tokenizer.tokenize(text))
            except UsageError as error:
                reader.note("cannot be tokenised", str(error))
        return out


class _Progress:
    def __init__(self, readers: Sequence[DocumentReader], say: Callable[[str], None], interval_s: float) -> None:
        self._readers = readers
        self._say = say
        self._interval = interval_s
        self._start = self._last = time.monotonic()
        compressed = any(reader.path.suffix == ".gz" for reader in readers)
        self._total = 0 if compressed else sum(reader.path.stat().st_size for reader in readers)

    def step(self, documents: int, writers: dict[str, IndexedWriter]) -> None:
        now = time.monotonic()
        if now - self._last < self._interval:
            return
        self._last = now
        done = sum(reader.bytes_read for reader in self._readers)
        tokens = sum(writer.total_tokens for writer in writers.values())
        rate = done / 1e6 / (now - self._start)
        share = f"{100 * done / self._total:5.1f} % | " if self._total else ""
        left = f" | {(self._total - done) / 1e6 / rate:.0f} s left" if self._total and rate > 0 else ""
        self._say(f"{share}{documents:,} documents | {tokens:,} tokens | {done / 1e6:.1f} MB, {rate:.2f} MB/s{left}")
