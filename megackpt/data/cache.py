"""A cache of index arrays that any number of processes may open at once, without collectives.

An entry is a directory named by the digest of everything its content depends on. It is built in a temporary
directory, synced and renamed into place, so it is either absent or complete; a file lock lets one process build
while the others wait, and the kernel drops the lock if that process dies. Losing the cache only costs time:
what is stored is a pure function of the key, and where nothing can be written it is built in memory.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[np.int64]]

_MAP_ABOVE_BYTES = 64 * 2**20  # smaller arrays are read, so that deleting the cache cannot matter to a run
_LOCK_SECONDS = 600.0
_POLL_SECONDS = 0.02


def digest(key: Mapping[str, Any]) -> str:
    """Hex digest of a JSON-able mapping: independent of key order and of PYTHONHASHSEED."""
    text = json.dumps(key, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def cached_arrays(
    directory: str | os.PathLike[str] | None,
    key: Mapping[str, Any] | None,
    build: Callable[[], Arrays],
    lock_seconds: float = _LOCK_SECONDS,
) -> Arrays:
    """The arrays that `build()` returns for `key`, from the cache in `directory` where they are there already.

    With `directory` None, or one that cannot be written, they are built in memory. A damaged entry is rebuilt.
    """
    if directory is None or key is None:
        return build()
    entry = Path(directory) / digest(key)
    found = _load(entry)
    if found is not None:
        return found
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with _lock(entry.with_suffix(".lock"), lock_seconds) as held:
            found = _load(entry)  # another process may have built it while this one waited
            if found is None:
                arrays = build()
                if held:
                    _store(entry, key, arrays)
                return arrays
            return found
    except OSError:
        return build()


@contextmanager
def _lock(path: Path, seconds: float) -> Iterator[bool]:
    """Hold an exclusive lock on `path`; yields False if it was not free in time, True otherwise.

    A file system without locks counts as held: the rename alone keeps entries whole.
    """
    with open(path, "a") as stream:
        deadline = time.monotonic() + seconds
        held = True
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    held = False
                    break
                time.sleep(_POLL_SECONDS)
            except OSError:
                break
        yield held


def _store(entry: Path, key: Mapping[str, Any], arrays: Arrays) -> None:
    """Write an entry; an OSError (full disk, read-only) leaves the cache as it was."""
    partial: Path | None = None
    try:
        partial = Path(tempfile.mkdtemp(prefix=entry.name + ".partial-", dir=entry.parent))
        os.chmod(partial, 0o755)
        for name, array in arrays.items():
            with open(partial / f"{name}.npy", "wb") as stream:
                np.save(stream, array)
                stream.flush()
                os.fsync(stream.fileno())
        shapes = {name: list(array.shape) for name, array in arrays.items()}
        with open(partial / "entry.json", "w", encoding="utf-8") as text:
            json.dump({"key": dict(key), "shapes": shapes}, text, indent=1, sort_keys=True)
            text.flush()
            os.fsync(text.fileno())
        if entry.exists():  # only a damaged one gets here
            shutil.rmtree(entry, ignore_errors=True)
        os.rename(partial, entry)
    except OSError:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def _load(entry: Path) -> Arrays | None:
    """The arrays of a complete entry, or None."""
    try:
        shapes = json.loads((entry / "entry.json").read_text(encoding="utf-8"))["shapes"]
        arrays: Arrays = {}
        for name, shape in shapes.items():
            path = entry / f"{name}.npy"
            mapped = path.stat().st_size > _MAP_ABOVE_BYTES
            array = np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
            if list(array.shape) != shape or array.dtype != np.int64:
                return None
            arrays[name] = array
        return arrays
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None
