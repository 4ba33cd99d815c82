"""The manifest: what a whole checkpoint consists of, so that anything less is noticed.

It names every file with size and crc32 and every tensor with global shape, type and the places of its parts, and
carries a crc32 of its own. It takes the place of DCP's `.metadata`, which is a pickle and knows no digests.

Nothing in it is believed: a name cannot lead out of the folder, every part lies inside its tensor and its file, and
the parts of a tensor cover it.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from megackpt.config.checkpoint_folder import MANIFEST, RUN_FILE
from megackpt.config.persist import FORMATS
from megackpt.persist.agree import CheckpointError
from megackpt.persist.state import group_of
from megackpt.persist.tensor_file import DTYPES, FileDigest
from megackpt.persist.tensor_reader import are_sizes, elements, open_regular, read_header

FORMAT_VERSION = 3
_LARGEST = 256 << 20  # bytes; a million and a half parts
_CHECKED = 1 << 20  # bytes that are read and summed at a time
_FILE_NAME = re.compile(r"(?:\w[\w.-]{0,99}/)?\w[\w.-]{0,99}", re.ASCII)
_CRC = re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True)
class StoredPart:
    """Where one part of a global tensor lies: in `file` under the name `entry`, "" for the tensor's key."""

    file: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    entry: str = ""


@dataclass(frozen=True)
class StoredTensor:
    """A global tensor. `dtype` is safetensors' name; from `valid` on along its padded dimension there is padding."""

    dtype: str
    shape: tuple[int, ...]
    valid: int | None
    parts: tuple[StoredPart, ...]


@dataclass(frozen=True)
class Manifest:
    """`format` is torch_dist (safetensors files, one per rank) or torch (pickled tensors, one per tp and pp rank)."""

    iteration: int
    files: dict[str, FileDigest]
    tensors: dict[str, StoredTensor]
    format: str = "torch_dist"

    @property
    def groups(self) -> set[str]:
        """Which of model, optimizer and rng the checkpoint holds."""
        return {group_of(key) for key in self.tensors}

    def to_bytes(self) -> bytes:
        body = {
            "format_version": FORMAT_VERSION,
            "format": self.format,
            "iteration": self.iteration,
            "files": {name: asdict(digest) for name, digest in sorted(self.files.items())},
            "tensors": {key: _tensor_to_json(tensor) for key, tensor in sorted(self.tensors.items())},
        }
        return f'{{"crc32":"{_crc(body)}","manifest":{_dump(body)}}}\n'.encode()

    @staticmethod
    def from_bytes(content: bytes) -> Manifest:
        """Inverse of to_bytes. Raises CheckpointError if the content is damaged or of a later version."""
        try:
            document = json.loads(content)
            body, crc = document["manifest"], document["crc32"]
            if _crc(body) != crc:
                raise CheckpointError(f"{MANIFEST} does not match its own digest")
            if body["format_version"] != FORMAT_VERSION:
                raise CheckpointError(
                    f"{MANIFEST} has format version {body['format_version']}, not {FORMAT_VERSION}"
                )
            return _manifest(body)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{MANIFEST} is damaged ({error})") from error

    @staticmethod
    def read(directory: Path) -> Manifest:
        """The manifest of a checkpoint directory. Raises CheckpointError saying what is wrong with it."""
        try:
            return Manifest.from_bytes(read_whole(directory / MANIFEST, _LARGEST))
        except FileNotFoundError:
            if directory.is_dir():
                raise CheckpointError(f"it has no {MANIFEST}{_foreign(directory)}") from None
            raise CheckpointError("there is no such directory") from None
        except OSError as error:
            raise CheckpointError(f"{MANIFEST} cannot be read ({error.strerror})") from error

    def fault_of(self, directory: Path, name: str) -> str | None:
        """What is wrong with file `name`, naming tensors that it should hold and does not; None if nothing is."""
        expected, path = self.files[name], directory / name
        try:
            size = path.stat().st_size
            found = digest_of(path) if size == expected.size else FileDigest(size, "")
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if found == expected:
            return None
        fault = (
            f"{name} has {found.size} bytes instead of {expected.size}"
            if found.size != expected.size
            else f"{name} has changed since it was written (its crc32 is {found.crc32}, not {expected.crc32})"
        )
        lost = self._lost(path, name)
        return f"{fault}; it lacks {_some(lost)}" if lost else fault

    def _lost(self, path: Path, name: str) -> list[str]:
        """Keys of which the (safetensors) file should hold parts and does not."""
        parts = [(part, key) for key, tensor in self.tensors.items() for part in tensor.parts]
        expected = {part.entry or key: key for part, key in parts if part.file == name}
        if not expected or self.format != "torch_dist":
            return []
        try:
            descriptor = open_regular(path)
            try:
                return sorted({expected[entry] for entry in expected.keys() - read_header(descriptor).keys()})
            finally:
                os.close(descriptor)
        except (OSError, ValueError):
            return []


def digest_of(path: Path) -> FileDigest:
    """Size and crc32 of the file as it is on disk now, without holding it in memory. Raises OSError."""
    size = crc = 0
    for block in _blocks_of(path):
        crc = zlib.crc32(block, crc)
        size += len(block)
    return FileDigest(size, f"{crc:08x}")


def read_whole(path: Path, limit: int) -> bytes:
    """The content of a file of at most `limit` bytes. Raises OSError, CheckpointError if it is longer."""
    content = bytearray()
    for block in _blocks_of(path):
        content += block
        if len(content) > limit:
            raise CheckpointError(f"{path.name} has more than {limit} bytes")
    return bytes(content)


def _blocks_of(path: Path) -> Iterator[memoryview]:
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        buffer = memoryview(bytearray(min(_CHECKED, max(1, os.fstat(file.fileno()).st_size))))
        while count := file.readinto(buffer):
            yield buffer[:count]


def _manifest(body: dict[str, Any]) -> Manifest:
    """The checked content. Raises ValueError, KeyError, TypeError or AttributeError if it cannot be a manifest."""
    files = {name: _file_from_json(name, entry) for name, entry in body["files"].items()}
    tensors = {key: _tensor_from_json(key, entry, files) for key, entry in body["tensors"].items()}
    if body["format"] not in FORMATS:
        raise ValueError(f"format {str(body['format'])[:40]!r} is none of {', '.join(FORMATS)}")
    if type(body["iteration"]) is not int or RUN_FILE not in files:
        raise ValueError(f"it has no iteration or no {RUN_FILE}")
    return Manifest(body["iteration"], files, tensors, body["format"])


def _file_from_json(name: str, entry: dict[str, Any]) -> FileDigest:
    if not _FILE_NAME.fullmatch(name) or ".." in name:
        raise ValueError(f"a file cannot be named {name[:100]!r}")
    digest = FileDigest(**entry)
    if not are_sizes([digest.size]) or not isinstance(digest.crc32, str) or not _CRC.fullmatch(digest.crc32):
        raise ValueError(f"{name} cannot have size {digest.size!r} and crc32 {digest.crc32!r}")
    return digest


def _tensor_from_json(key: str, entry: dict[str, Any], files: dict[str, FileDigest]) -> StoredTensor:
    dtype, shape, valid = entry["dtype"], entry["shape"], entry.get("valid")
    if dtype not in DTYPES or not are_sizes(shape) or not (valid is None or are_sizes([valid])):
        raise ValueError(f"{key} cannot have type {dtype!r}, shape {shape!r} and {valid!r} of it valid")
    whole = elements(shape)
    parts = tuple(_part_from_json(key, part, shape, DTYPES[dtype].itemsize, files) for part in entry["parts"])
    if not parts or sum(prod(part.shape) for part in parts) != whole or len({p.offsets for p in parts}) != len(parts):
        raise ValueError(f"the parts of {key} do not cover it once")
    return StoredTensor(dtype, tuple(shape), valid, parts)


def _part_from_json(
    key: str, fields: list[Any], whole: list[int], width: int, files: dict[str, FileDigest]
) -> StoredPart:
    file, offsets, shape, entry = fields
    if not are_sizes(offsets) or not are_sizes(shape) or not len(offsets) == len(shape) == len(whole):
        raise ValueError(f"a part of {key} has offsets {str(offsets)[:60]} and shape {str(shape)[:60]}")
    if any(start + length > size for start, length, size in zip(offsets, shape, whole, strict=True)):
        raise ValueError(f"a part of {key} is not inside of it")
    if not isinstance(entry, str) or file not in files or elements(shape) * width > files[file].size:
        raise ValueError(f"a part of {key} cannot be in {str(file)[:60]}")
    return StoredPart(file, tuple(offsets), tuple(shape), entry)


def _foreign(directory: Path) -> str:
    """Whose checkpoint it may be, if it is not one of ours."""
    if next(directory.glob("mp_rank_*"), None):
        return " and looks like one of Megatron-LM (megackpt convert reads those)"
    if (directory / ".metadata").exists():
        return " and looks like one of torch.distributed.checkpoint, whose index is a pickle: it is not read"
    return ""


def _some(keys: list[str], limit: int = 5) -> str:
    more = f" and {len(keys) - limit} more" if len(keys) > limit else ""
    return ", ".join(keys[:limit]) + more


def _tensor_to_json(tensor: StoredTensor) -> dict[str, Any]:
    padding = {} if tensor.valid is None else {"valid": tensor.valid}
    parts = [[part.file, part.offsets, part.shape, part.entry] for part in tensor.parts]
    return {"dtype": tensor.dtype, "shape": tensor.shape, **padding, "parts": parts}


def _dump(body: dict[str, Any]) -> str:
    return json.dumps(body, separators=(",", ":"))


def _crc(body: dict[str, Any]) -> str:
    return f"{zlib.crc32(_dump(body).encode()):08x}"
