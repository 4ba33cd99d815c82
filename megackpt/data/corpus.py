"""A corpus of real text that every machine has: the sources of Python's standard library.

One document per file. Documents stand in the order of a hash of their path, so that a limit takes a fair sample
and so that the last documents, which `--split` makes the validation set, are like the first ones.
"""

from __future__ import annotations

import hashlib
import io
import os
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megackpt.config.errors import UsageError
from megackpt.data.documents import split_text

# Not written by hand, not part of every installation, or not of the standard library.
_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"})


@dataclass(frozen=True)
class Document:
    """One text and where it is from (a path relative to the root, or a part number)."""

    text: str
    source: str


def standard_library_root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def source_documents(root: Path, max_bytes: int | None = None) -> Iterator[Document]:
    """Python sources under `root`, until `max_bytes` of UTF-8 are reached; the file that would pass it is left out.

    The order depends on the relative paths alone. Files that are not valid text are left out.
    """
    if not root.is_dir():
        raise UsageError(f"{root} is not a directory of Python sources")
    named = sorted((hashlib.blake2b(name.encode()).digest(), name) for name in _source_names(root))
    used = 0
    for _, name in named:
        text = _read_source(root / name)
        if text is None:
            continue
        size = len(text.encode("utf-8"))
        if max_bytes is not None and used + size > max_bytes:
            continue
        used += size
        yield Document(text, name)


def text_documents(path: Path, document_chars: int, max_bytes: int | None = None) -> Iterator[Document]:
    """Running text of one file, cut into documents at blank lines; see `split_text`."""
    if not path.is_file():
        raise UsageError(f"--text {path}: there is no such file")
    used = 0
    with open(path, encoding="utf-8-sig", errors="replace") as stream:
        for number, text in enumerate(split_text(stream, document_chars)):
            used += len(text.encode("utf-8"))
            if max_bytes is not None and used > max_bytes and number > 0:
                return
            yield Document(text, f"{path.name} part {number}")


def _source_names(root: Path) -> Iterator[str]:
    """Relative paths of the Python files below `root`, in no order, without entering what is left out."""
    for directory, below, files in os.walk(root):
        below[:] = [name for name in below if name not in _LEFT_OUT]
        inside = Path(directory).relative_to(root)
        yield from ((inside / name).as_posix() for name in files if name.endswith(".py"))


def _read_source(path: Path) -> str | None:
    """Text of a Python file in its declared encoding, or None if it is empty or cannot be read."""
    try:
        raw = path.read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        text = raw.decode(encoding).replace("\r\n", "\n")
    except (OSError, SyntaxError, UnicodeError, LookupError):
        return None
    return text if text.strip() else None
