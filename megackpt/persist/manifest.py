"""The manifest: what a whole checkpoint consists of, so that anything less is noticed.

It names every file with size and crc32 and every tensor with global shape, type and the places of its parts, and
carries a crc32 of its own. It takes the place of DCP's `.metadata`, which is a pickle and knows no digests.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megackpt.persist.agree import CheckpointError
from megackpt.persist.directory import MANIFEST
from megackpt.persist.state import group_of
from megackpt.persist.tensor_file import FileDigest, digest_of, stored_keys

FORMAT_VERSION = 1


@dataclass(frozen=True)
class StoredPart:
    """Where one part of a global tensor lies: in `file` under the tensor's key."""

    file: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A global tensor. `dtype` is safetensors' name; rows from `valid_rows` on (along dimension 0) are padding."""

    dtype: str
    shape: tuple[int, ...]
    valid_rows: int | None
    parts: tuple[StoredPart, ...]


@dataclass(frozen=True)
class Manifest:
    iteration: int
    files: dict[str, FileDigest]
    tensors: dict[str, StoredTensor]

    @property
    def groups(self) -> set[str]:
        """Which of model, optimizer and rng the checkpoint holds."""
        return {group_of(key) for key in self.tensors}

    def to_bytes(self) -> bytes:
        body = {
            "format_version": FORMAT_VERSION,
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
            return Manifest(
                body["iteration"],
                {name: FileDigest(**digest) for name, digest in body["files"].items()},
                {key: _tensor_from_json(tensor) for key, tensor in body["tensors"].items()},
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{MANIFEST} is damaged ({error})") from error

    @staticmethod
    def read(directory: Path) -> Manifest:
        """The manifest of a checkpoint directory. Raises CheckpointError saying what is wrong with it."""
        try:
            return Manifest.from_bytes((directory / MANIFEST).read_bytes())
        except FileNotFoundError:
            reason = f"it has no {MANIFEST}" if directory.is_dir() else "there is no such directory"
            raise CheckpointError(reason) from None
        except OSError as error:
            raise CheckpointError(f"{MANIFEST} cannot be read ({error.strerror})") from error

    def fault_of(self, directory: Path, name: str) -> str | None:
        """What is wrong with file `name`, naming tensors that it should hold and does not; None if nothing is."""
        expected, path = self.files[name], directory / name
        try:
            size = path.stat().st_size
            if size == expected.size and digest_of(path) == expected:
                return None
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        fault = (
            f"{name} has {size} bytes instead of {expected.size}"
            if size != expected.size
            else f"{name} has changed since it was written (its crc32 is not {expected.crc32})"
        )
        lost = self._lost_keys(path, name)
        return f"{fault}; it lacks {_some(lost)}" if lost else fault

    def _lost_keys(self, path: Path, name: str) -> list[str]:
        expected = {
            key for key, tensor in self.tensors.items() if any(part.file == name for part in tensor.parts)
        }
        try:
            return sorted(expected - stored_keys(path)) if expected else []
        except (OSError, ValueError):
            return []


def _some(keys: list[str], limit: int = 5) -> str:
    more = f" and {len(keys) - limit} more" if len(keys) > limit else ""
    return ", ".join(keys[:limit]) + more


def _tensor_to_json(tensor: StoredTensor) -> dict[str, Any]:
    padding = {} if tensor.valid_rows is None else {"valid_rows": tensor.valid_rows}
    parts = [[part.file, part.offsets, part.shape] for part in tensor.parts]
    return {"dtype": tensor.dtype, "shape": tensor.shape, **padding, "parts": parts}


def _tensor_from_json(entry: dict[str, Any]) -> StoredTensor:
    parts = tuple(StoredPart(file, tuple(offsets), tuple(shape)) for file, offsets, shape in entry["parts"])
    return StoredTensor(entry["dtype"], tuple(entry["shape"]), entry.get("valid_rows"), parts)


def _dump(body: dict[str, Any]) -> str:
    return json.dumps(body, separators=(",", ":"))


def _crc(body: dict[str, Any]) -> str:
    return f"{zlib.crc32(_dump(body).encode()):08x}"
