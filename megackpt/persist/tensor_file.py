"""One rank's tensors in one safetensors file, written as a stream and summed on the way.

The library's own writer wants all tensors as bytes in memory at once; this one holds a block of one tensor, copies
views of flat buffers without the buffer around them, and knows the file's crc32 when the last byte is out. The header
carries each part's place in its global tensor in the form of torch's HuggingFaceStorageWriter, so torch's reader,
and anything else that reads safetensors, reads these files as well.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
BLOCK = 8 << 20
"""Bytes that are copied, written, read and summed at a time: what a save or a load holds on the host."""


@dataclass(frozen=True)
class FileDigest:
    """Size in bytes and crc32 (8 hex digits) of a file's content."""

    size: int
    crc32: str


@dataclass(frozen=True)
class Part:
    """A tensor to be written as `entry`. `resolve` returns it when its turn comes; `offsets` is its place."""

    entry: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    resolve: Callable[[], Tensor]

    @property
    def size(self) -> int:
        """Bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class SummedFile:
    """A file that is written from front to back. `check` is called before each block and may raise, to stop.

    `fault` is what a write raised: whoever writes through another library does not hear of it from there.
    """

    def __init__(self, file: BinaryIO, check: Callable[[], None] = lambda: None) -> None:
        self._file, self._check = file, check
        self._size = self._crc = 0
        self.fault: Exception | None = None

    def write(self, data: memoryview | bytes) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), BLOCK):
            block = view[start : start + BLOCK]
            try:
                self._check()
                self._file.write(block)
            except Exception as error:
                self.fault = self.fault or error
                raise
            self._crc = zlib.crc32(block, self._crc)
        self._size += len(view)
        return len(view)

    def flush(self) -> None:
        self._file.flush()

    def finish(self) -> FileDigest:
        """Make the content durable. Raises OSError, e.g. when the disk is full."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return FileDigest(self._size, f"{self._crc:08x}")


def write_tensors(path: Path, parts: Sequence[Part], check: Callable[[], None] = lambda: None) -> FileDigest:
    """Write `parts` (entries all different) to a new file and make it durable. Raises OSError, e.g. when disk is full.

    Holds one block on the host, whatever device the parts are on. `check`: see SummedFile.
    """
    ordered = sorted(parts, key=lambda part: (-part.dtype.itemsize, part.entry))  # widest first keeps all aligned
    with path.open("xb") as file:
        summed = SummedFile(file, check)
        summed.write(_header(ordered))
        for part in ordered:
            for block in _blocks(part):
                summed.write(block)
        return summed.finish()


def write_bytes(path: Path, content: bytes) -> FileDigest:
    """Write a small new file durably."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FileDigest(len(content), f"{zlib.crc32(content):08x}")


def digest_of(path: Path) -> FileDigest:
    """Size and crc32 of the file as it is on disk now."""
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            crc = zlib.crc32(block, crc)
            size += len(block)
    return FileDigest(size, f"{crc:08x}")


def _header(parts: Sequence[Part]) -> bytes:
    entries: dict[str, Any] = {
        "__metadata__": {
            "format": "pt",
            "DCP_VERSION": "1.0",
            "DCP_SHARDING_INFO": _compact({part.entry: {"saved_offsets": part.offsets} for part in parts}),
        }
    }
    end = 0
    for part in parts:
        start, end = end, end + part.size
        entries[part.entry] = {
            "dtype": DTYPE_NAMES[part.dtype],
            "shape": part.shape,
            "data_offsets": [start, end],
        }
    text = _compact(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _blocks(part: Part) -> Iterator[memoryview]:
    tensor = part.resolve()
    if tensor.dtype != part.dtype or tuple(tensor.shape) != part.shape:
        raise ValueError(f"{part.entry} changed from {part.dtype} {part.shape} while it was being saved")
    flat = tensor.detach().reshape(-1)  # a view of all but transposed tensors
    for elements in flat.split(BLOCK // flat.itemsize):
        yield elements.cpu().contiguous().view(torch.uint8).numpy().data
