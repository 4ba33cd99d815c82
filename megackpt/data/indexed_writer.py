"""Writing `<prefix>.bin` and `<prefix>.idx`; the format is described in indexed.py."""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
from numpy.typing import ArrayLike

from megackpt.config.errors import UsageError
from megackpt.data.indexed import DTYPES, MAGIC, VERSION, IndexedDataset

_MAX_SEQUENCE = 2**31 - 1
_COPY_TOKENS = 1 << 22
_INDEX_CHUNK = 1 << 20


def token_dtype(vocab_size: int | None) -> np.dtype[np.generic]:
    """The type that holds a vocabulary on disk: uint16 below 65,500 tokens, else int32."""
    return np.dtype("<u2") if vocab_size is not None and vocab_size < 65_500 else np.dtype("<i4")


class IndexedWriter:
    """Writes `<prefix>.bin` and `<prefix>.idx`; both appear under their names only when complete.

    Use as a context manager: on an exception the partial files are removed. `add(tokens)` appends a document,
    `append(dataset)` all documents of another one, byte for byte.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: np.dtype[np.generic]) -> None:
        code = next((c for c, name in DTYPES.items() if np.dtype(name) == np.dtype(dtype)), None)
        if code is None or np.dtype(dtype).kind == "f":
            raise UsageError(f"tokens cannot be stored as {np.dtype(dtype)}: use uint16 or int32")
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(DTYPES[code])
        self.documents = 0
        self.total_tokens = 0
        self._code = code
        self._lengths = array("i")
        self._bounds = array("q", [0])
        self._limits = np.iinfo(self.dtype)
        self._partial = f"{self.prefix}.partial-{os.getpid()}"
        Path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
        self._data: BinaryIO = Path(self._partial + ".bin").open("wb", buffering=1 << 20)  # noqa: SIM115  closed by close() or abort()

    def add(self, tokens: ArrayLike) -> None:
        """Append one document. Raises UsageError for ids that the type on disk cannot hold."""
        values = np.asarray(tokens, dtype=np.int64)
        if values.size > _MAX_SEQUENCE:
            raise UsageError(f"a document of {values.size} tokens is longer than the format's {_MAX_SEQUENCE}")
        if values.size:
            low, high = int(values.min()), int(values.max())
            if low < self._limits.min or high > self._limits.max:
                raise UsageError(f"token ids {low} to {high} do not fit into {self.dtype} ({self.prefix}.bin)")
        self._data.write(values.astype(self.dtype).tobytes())
        self._lengths.append(values.size)
        self._bounds.append(len(self._lengths))
        self.documents += 1
        self.total_tokens += values.size

    def append(self, other: IndexedDataset) -> None:
        """Append the documents of another dataset. Raises UsageError if its token type is another one."""
        if other.dtype != self.dtype:
            raise UsageError(
                f"{other.prefix} holds {other.dtype} and not {self.dtype}: datasets of one vocabulary size have one"
                " type; tokenise again what has the other"
            )
        for run in other.runs():  # one, unless the file has gaps
            for first in range(0, len(run), _COPY_TOKENS):
                self._data.write(run[first : first + _COPY_TOKENS].tobytes())
        before = len(self._lengths)
        self._lengths.frombytes(np.ascontiguousarray(other.sequence_lengths, np.int32).tobytes())
        self._bounds.frombytes((np.asarray(other.bounds[1:], np.int64) + before).tobytes())
        self.documents += len(other)
        self.total_tokens += other.total_tokens

    def close(self) -> None:
        """Write the index, sync both files and give them their names (the index last)."""
        try:
            _sync_and_close(self._data)
            with Path(self._partial + ".idx").open("wb") as index:
                self._write_index(index)
                index.flush()
                os.fsync(index.fileno())
            # An old index must never be seen beside new tokens.
            Path(self.prefix + ".idx").unlink(missing_ok=True)
            os.replace(self._partial + ".bin", self.prefix + ".bin")
            os.replace(self._partial + ".idx", self.prefix + ".idx")
        except BaseException:
            self.abort()
            raise

    def _write_index(self, index: BinaryIO) -> None:
        lengths = np.frombuffer(self._lengths, dtype=np.int32) if self._lengths else np.empty(0, np.int32)
        bounds = np.frombuffer(self._bounds, dtype=np.int64)
        index.write(MAGIC + VERSION.to_bytes(8, "little") + bytes([self._code]))
        index.write(len(lengths).to_bytes(8, "little") + len(bounds).to_bytes(8, "little"))
        index.write(lengths.astype("<i4", copy=False).data)
        end = 0
        for first in range(0, len(lengths), _INDEX_CHUNK):
            ends = np.cumsum(lengths[first : first + _INDEX_CHUNK], dtype=np.int64) * self.dtype.itemsize + end
            index.write(np.concatenate([[end], ends[:-1]]).astype("<i8").data)
            end = int(ends[-1])
        index.write(bounds.astype("<i8", copy=False).data)

    def abort(self) -> None:
        """Remove what was written so far."""
        self._data.close()
        for suffix in (".bin", ".idx"):
            Path(self._partial + suffix).unlink(missing_ok=True)

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


def _sync_and_close(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())
    stream.close()
