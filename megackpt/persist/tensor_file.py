"""One rank's tensors in one safetensors file, written as a stream and summed on the way.

The library's own writer wants all tensors as bytes in memory at once; this one holds a single tensor, copies views
of flat buffers without the buffer around them, and knows the file's crc32 when the last byte is out. The header
carries each part's place in its global tensor in the form of torch's HuggingFaceStorageWriter, so torch's reader,
and anything else that reads safetensors, reads these files as well.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Sequence
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
_BLOCK = 8 << 20  # bytes per write and checksum call
_LONGEST_HEADER = 100 << 20  # the format's own limit


@dataclass(frozen=True)
class FileDigest:
    """Size in bytes and crc32 (8 hex digits) of a file's content."""

    size: int
    crc32: str


@dataclass(frozen=True)
class Part:
    """A tensor to be written. `resolve` returns it on the host when its turn comes; `offsets` is its place."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    resolve: Callable[[], Tensor]

    @property
    def size(self) -> int:
        """Bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class _SummedFile:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = 0
        self.crc = 0

    def write(self, data: memoryview | bytes) -> None:
        view = memoryview(data)
        for start in range(0, len(view), _BLOCK):
            block = view[start : start + _BLOCK]
            self._file.write(block)
            self.crc = zlib.crc32(block, self.crc)
            self.size += len(block)


def write_tensors(path: Path, parts: Sequence[Part]) -> FileDigest:
    """Write `parts` (keys all different) to a new file and make it durable. Raises OSError, e.g. when disk is full."""
    ordered = sorted(
        parts, key=lambda part: (-part.dtype.itemsize, part.key)
    )  # widest first keeps all aligned
    with path.open("xb") as file:
        summed = _SummedFile(file)
        summed.write(_header(ordered))
        for part in ordered:
            summed.write(_bytes_of(part))
        file.flush()
        os.fsync(file.fileno())
    return FileDigest(summed.size, f"{summed.crc:08x}")


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
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
            size += len(block)
    return FileDigest(size, f"{crc:08x}")


def stored_keys(path: Path) -> set[str]:
    """Names in a safetensors file's header. Raises OSError or ValueError if it has no readable header."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _LONGEST_HEADER:
            raise ValueError(f"{path.name} has no safetensors header")
        header = json.loads(file.read(length))
    return set(header) - {"__metadata__"}


def _header(parts: Sequence[Part]) -> bytes:
    entries: dict[str, Any] = {
        "__metadata__": {
            "format": "pt",
            "DCP_VERSION": "1.0",
            "DCP_SHARDING_INFO": _compact({part.key: {"saved_offsets": part.offsets} for part in parts}),
        }
    }
    end = 0
    for part in parts:
        start, end = end, end + part.size
        entries[part.key] = {
            "dtype": DTYPE_NAMES[part.dtype],
            "shape": part.shape,
            "data_offsets": [start, end],
        }
    text = _compact(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _bytes_of(part: Part) -> memoryview:
    tensor = part.resolve()
    if tensor.dtype != part.dtype or tuple(tensor.shape) != part.shape:
        raise ValueError(f"{part.key} changed from {part.dtype} {part.shape} while it was being saved")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
