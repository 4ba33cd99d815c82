"""Documents out of text files: JSON lines, or plain text cut at blank lines."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from megackpt.config.errors import UsageError
from megackpt.data.compressed import is_compressed, open_input

FORMATS = ("auto", "jsonl", "text")
_JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
_MAX_LINE_BYTES = 1 << 28  # a longer line is left out (JSON) or cut (text): it is no document, and memory has an end
_MAX_STRETCH = 4  # a plain-text document may grow to this many times its target before it is cut inside a paragraph


class DocumentReader:
    """Iterates over the documents of one file as {key: text}; nothing odd stops it, everything odd is counted.

    `odd` counts by reason; `examples` holds the first places, for the report. A key that is missing or not a
    string is left out of that document's mapping; a mapping without any key is not yielded. `bytes_read` is the
    progress in the file (uncompressed for .gz and .zst).

    With `part` = (start, stop) only the lines whose first byte lies in that range of the file are read; for JSON
    lines that are not compressed. Raises UsageError if a compressed file is damaged or cut off.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        keys: Sequence[str],
        file_format: str,
        document_chars: int,
        part: tuple[int, int] | None = None,
    ) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise UsageError(f"--input {path}: there is no such file")
        self.keys = tuple(keys)
        self.format = _resolve(self.path, file_format)
        self.document_chars = document_chars
        self.part = part
        self.odd: Counter[str] = Counter()
        self.examples: list[str] = []
        self.bytes_read = 0

    def __iter__(self) -> Iterator[dict[str, str]]:
        if self.format == "jsonl":
            yield from self._json_documents()
        else:
            for text in split_text(self._lines(), self.document_chars):
                yield {self.keys[0]: text}

    def note(self, reason: str, place: str) -> None:
        """Count something odd."""
        self.odd[reason] += 1
        if self.odd[reason] <= 3:
            self.examples.append(f"{self.path.name}, {place}: {reason}")

    @property
    def divisible(self) -> bool:
        """Whether parts of the file can be read on their own."""
        return self.format == "jsonl" and not is_compressed(self.path)

    def _lines(self) -> Iterator[str]:
        start, stop = self.part or (0, None)
        with open_input(self.path) as stream:
            if start:
                stream.seek(start - 1)
                self._skip_line(stream)  # it belongs to the part before
                start = stream.tell()
            while stop is None or start + self.bytes_read < stop:
                raw = stream.readline(_MAX_LINE_BYTES)  # split at \n only: JSON strings may hold other line ends
                if not raw:
                    return
                at_start = start + self.bytes_read == 0
                self.bytes_read += len(raw)
                if len(raw) == _MAX_LINE_BYTES and self.format == "jsonl":
                    self.bytes_read += self._skip_line(stream)
                    self.note(f"a line longer than {_MAX_LINE_BYTES} bytes", f"byte {start + self.bytes_read}")
                    continue
                raw = raw.removeprefix(b"\xef\xbb\xbf") if at_start else raw
                try:
                    yield raw.decode("utf-8")
                except UnicodeDecodeError as error:
                    place = start + self.bytes_read - len(raw) + error.start
                    self.note("bytes that are not UTF-8 replaced", f"byte {place}")
                    yield raw.decode("utf-8", errors="replace")

    @staticmethod
    def _skip_line(stream: BinaryIO) -> int:
        """Read to the next line end; how many bytes that took."""
        skipped = 0
        while raw := stream.readline(_MAX_LINE_BYTES):
            skipped += len(raw)
            if raw.endswith(b"\n"):
                break
        return skipped

    def _json_documents(self) -> Iterator[dict[str, str]]:
        for number, line in enumerate(self._lines(), start=1):
            place = f"line {number}" + (f" after byte {self.part[0]}" if self.part and self.part[0] else "")
            if not line.strip():
                self.note("blank line", place)
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                self.note("not JSON", place)
                continue
            if not isinstance(record, dict):
                self.note("not a JSON object", place)
                continue
            texts: dict[str, str] = {}
            for key in self.keys:
                value = record.get(key)
                if key not in record:
                    self.note(f"no key {key!r}", place)
                elif not isinstance(value, str):
                    self.note(f"{key!r} is not a string", place)
                elif not value.strip():
                    self.note(f"{key!r} is empty", place)
                else:
                    texts[key] = self._clean(value, place)
            if texts:
                yield texts

    def _clean(self, text: str, place: str) -> str:
        """Half of a surrogate pair is legal JSON but no character: replace it, as a decoder would."""
        try:
            text.encode("utf-8")
            return text
        except UnicodeEncodeError:
            self.note("lone surrogate replaced", place)
            return text.encode("utf-8", errors="replace").decode("utf-8")


def split_text(lines: Iterable[str], document_chars: int) -> Iterator[str]:
    """Cut running text into documents of at least `document_chars` characters, at blank lines.

    Without blank lines a document is cut at a line end when it has grown to four times that. 0 keeps the whole
    text as one document. Documents without any visible character are dropped.
    """
    held: list[str] = []
    size = 0
    for line in lines:
        held.append(line)
        size += len(line)
        blank = not line.strip()
        if document_chars > 0 and ((blank and size >= document_chars) or size >= _MAX_STRETCH * document_chars):
            text = "".join(held)
            if text.strip():
                yield text
            held, size = [], 0
    text = "".join(held)
    if text.strip():
        yield text


def _resolve(path: Path, file_format: str) -> str:
    if file_format not in FORMATS:
        raise UsageError(f"--input-format {file_format}: use one of {', '.join(FORMATS)}")
    if file_format != "auto":
        return file_format
    suffix = Path(path.stem).suffix if is_compressed(path) else path.suffix
    return "jsonl" if suffix in _JSON_SUFFIXES else "text"
