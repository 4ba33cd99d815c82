"""One part of the input becomes one indexed dataset per key: the unit of work, of parallelism and of going on."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megackpt.config.errors import UsageError
from megackpt.config.tokenizer import TokenizerConfig
from megackpt.data.documents import DocumentReader
from megackpt.data.indexed_writer import IndexedWriter, token_dtype
from megackpt.data.tokenizer import Tokenizer

_BATCH_DOCUMENTS = 512
_BATCH_CHARS = 4_000_000
_MAX_EXAMPLES = 30


@dataclass(frozen=True)
class PreprocessOptions:
    """What of a text becomes which ids."""

    tokenizer: TokenizerConfig
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    """End each document with the tokenizer's end-of-document token."""
    input_format: str = "auto"
    document_chars: int = 16_384
    """Plain text is cut at the first blank line after that many characters; 0 = never."""

    def __post_init__(self) -> None:
        if not self.keys or len(set(self.keys)) != len(self.keys):
            raise UsageError(f"--json-keys {' '.join(self.keys)}: give one or more different keys")
        for key in self.keys:
            if os.sep in key or key in ("", ".", ".."):
                raise UsageError(f"--json-keys {key}: the key becomes part of a file name and cannot hold {os.sep}")


@dataclass(frozen=True)
class Part:
    """A range of bytes of one input file; the whole file if it cannot be divided."""

    path: str
    start: int
    stop: int


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

    def add(self, other: PreprocessReport) -> None:
        """Count another part in."""
        for mine, theirs in ((self.documents, other.documents), (self.tokens, other.tokens)):
            for key, count in theirs.items():
                mine[key] = mine.get(key, 0) + count
        self.odd.update(other.odd)
        self.examples = [*self.examples, *other.examples][:_MAX_EXAMPLES]

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "odd": dict(self.odd)}

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> PreprocessReport:
        return cls(**{**state, "odd": Counter(state["odd"])})


Step = Callable[[int, int, int], None]
"""Told after each batch: bytes read, documents and tokens written by this part so far."""


def output_prefix(prefix: str, key: str) -> str:
    """Megatron's name: `<prefix>_<key>_document`, so `corpus_text_document` for the usual key."""
    return f"{prefix}_{key}_document"


def cut_into_parts(inputs: Sequence[str], options: PreprocessOptions, partitions: int, part_bytes: int) -> list[Part]:
    """The parts of all inputs in order, of at most `part_bytes`, and `partitions` of them if that is possible."""
    readers = [DocumentReader(path, options.keys, options.input_format, options.document_chars) for path in inputs]
    sizes = [reader.path.stat().st_size for reader in readers]
    largest = max(1, min(part_bytes, -(-sum(sizes) // partitions)))
    parts = []
    for reader, size in zip(readers, sizes, strict=True):
        count = -(-size // largest) if reader.divisible else 1
        edges = [size * i // max(1, count) for i in range(max(1, count) + 1)]
        path = os.fspath(reader.path)
        parts += [Part(path, low, high) for low, high in zip(edges, edges[1:], strict=False)]
    return parts


def write_part(
    part: Part, prefix: str, options: PreprocessOptions, tokenizer: Tokenizer, workers: int, step: Step
) -> PreprocessReport:
    """Tokenise one part into `<prefix>_<key>_document`.  The report is written last, as `<prefix>.json`: where it is,
    the part is complete."""
    whole = part.start == 0 and part.stop >= Path(part.path).stat().st_size
    span = None if whole else (part.start, part.stop)
    reader = DocumentReader(part.path, options.keys, options.input_format, options.document_chars, span)
    ending = [tokenizer.eod] if options.append_eod else []
    report = PreprocessReport()
    with ExitStack() as stack:
        dtype = token_dtype(tokenizer.vocab_size)
        writers = {key: stack.enter_context(IndexedWriter(output_prefix(prefix, key), dtype)) for key in options.keys}
        for batch in _batches(reader):
            for key, writer in writers.items():
                texts = [document[key] for document in batch if key in document]
                for ids in _encode(tokenizer, texts, workers, reader):
                    if ids:
                        writer.add(ids + ending)
                    else:
                        reader.note(f"{key!r} gives no tokens", f"document {writer.documents}")
            written = writers.values()
            step(reader.bytes_read, sum(w.documents for w in written), sum(w.total_tokens for w in written))
        report.odd, report.examples = reader.odd, reader.examples
        for key, writer in writers.items():
            report.documents[key], report.tokens[key] = writer.documents, writer.total_tokens
    _write_atomically(Path(prefix + ".json"), json.dumps(report.to_json()))
    return report


def read_part(prefix: str) -> PreprocessReport | None:
    """The report of a part that is complete, or None."""
    try:
        return PreprocessReport.from_json(json.loads(Path(prefix + ".json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _write_atomically(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    with partial.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(partial, path)


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
