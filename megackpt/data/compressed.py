"""Input files, compressed or not, as a stream of bytes.  A damaged or truncated one is an error, never a short text."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from megackpt.config.errors import UsageError

GZIP, ZSTD = ".gz", ".zst"
_CHUNK = 1 << 17
_MAX_WINDOW = 1 << 31  # what `zstd --long=31` needs


def is_compressed(path: Path) -> bool:
    """By its name."""
    return path.suffix in (GZIP, ZSTD)


@contextmanager
def open_input(path: Path) -> Iterator[BinaryIO]:
    """A readable stream of the uncompressed bytes of ``path``; seekable if the file is not compressed."""
    try:
        if path.suffix == GZIP:
            with gzip.open(path, "rb") as unpacked:
                yield cast(BinaryIO, unpacked)
        elif path.suffix == ZSTD:
            with path.open("rb") as packed, io.BufferedReader(_ZstdStream(packed, path), _CHUNK) as unpacked:
                yield cast(BinaryIO, unpacked)
        else:
            with path.open("rb") as plain:
                yield plain
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(f"--input {path}: is damaged or cut off ({error})") from error


class _ZstdStream(io.RawIOBase):
    """Frames one after another; unlike the package's own reader it notices a last frame that is not whole."""

    def __init__(self, packed: BinaryIO, path: Path) -> None:
        try:
            import zstandard  # optional package
        except ImportError as error:
            raise UsageError(f"--input {path}: .zst files need the package zstandard ({error})") from error
        self._packed, self._path = packed, path
        self._error: type[Exception] = zstandard.ZstdError
        self._decompressor: Any = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
        self._frame: Any = None
        self._input = b""  # packed bytes that no frame has taken yet
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """As io.RawIOBase says; 0 at the end."""
        while not self._ready:
            if not self._input:
                self._input = self._packed.read(_CHUNK)
                if not self._input:
                    if self._frame is not None:
                        raise UsageError(f"--input {self._path}: is damaged or cut off (the last frame is not whole)")
                    return 0
            self._unpack()
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _unpack(self) -> None:
        try:
            if self._frame is None:
                self._frame = self._decompressor.decompressobj(write_size=_CHUNK)
            # Small steps: a chunk of a few bytes may unpack to very many.
            step, self._input = self._input[:1024], self._input[1024:]
            self._ready = memoryview(self._frame.decompress(step))
            if self._frame.eof:
                self._input = self._frame.unused_data + self._input
                self._frame = None
        except self._error as error:
            raise UsageError(f"--input {self._path}: is damaged ({error})") from error
