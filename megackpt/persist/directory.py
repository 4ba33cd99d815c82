"""Names under a checkpoint root, and the moves between them that a crash cannot tear.

.iter_0000010.tmp-<nonce>   being written or removed   removed at the next start
iter_0000010                whole                      appears by one rename
.iter_0000010.old-<nonce>   replaced by a newer save   exists only between two renames and the removal
latest_checkpointed_iteration.txt                      replaced last, so it never names what is not there
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torch.distributed import ProcessGroup

from megackpt.config.checkpoint_folder import (
    MANIFEST,
    REPLACED,
    TRACKER,
    directory_name,
    saved_directories,
    tracked_iteration,
)
from megackpt.config.errors import UsageError
from megackpt.persist.agree import Ranks

_LEAVING_SECONDS = 20.0  # a killed run's loader processes, which share its lock, look for it every 5
_NEW_TRACKER = f".{TRACKER}.tmp"
_PROBE = re.compile(r"\.writable-[0-9a-f]{8}")
_TEMPORARY = re.compile(r"\.iter_\d{7,}\.tmp-\w+")


def latest_iteration(root: str | Path) -> int | None:
    """The iteration a load would try first: the tracker's if its directory exists, else the newest one. None if none.

    Reads names only; whether the checkpoint is whole is for `load` to find out.
    """
    root = Path(root)
    saved = saved_directories(root)
    try:
        tracked = tracked_iteration(root)
    except (ValueError, OSError):
        tracked = None
    if tracked in saved:
        return tracked
    return max((i for i, path in saved.items() if (path / MANIFEST).is_file()), default=None)


def prepare_directory(root: str | Path, group: ProcessGroup | None = None) -> list[str]:
    """Clear what an interrupted save left under the save root; returns what was done, one line each.

    Called by all ranks at the start of a run that saves, before it loads: never by one that only reads, since the
    root may then belong to a run that is writing. An old checkpoint whose replacement did not arrive is put back.
    Makes the directory. Raises UsageError if nothing can be written there: now, not after hours of training.
    """
    return Ranks(group).from_first("prepare the save directory", lambda: _recover(Path(root)))


@contextmanager
def claimed(root: str | Path | None, group: ProcessGroup | None = None) -> Iterator[list[str]]:
    """As prepare_directory, and no other run saves there meanwhile: two would delete each other's checkpoints.

    The first rank holds a lock that ends with its process. Raises UsageError on all ranks if another run has it; a
    file system without locks is trusted. With `root` None nothing is done.
    """
    with ExitStack() as held:
        if root is None:
            yield []
        else:
            yield Ranks(group).from_first("prepare the save directory", lambda: _claim(Path(root), held))


def _claim(root: Path, held: ExitStack) -> list[str]:
    _prove_writable(root)
    descriptor = os.open(root, os.O_RDONLY)
    held.callback(os.close, descriptor)
    deadline = time.monotonic() + _LEAVING_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise UsageError(
                    f"--save {root}: another run is saving there. Give each run a folder of its own, or wait for it."
                ) from None
            time.sleep(0.1)
            continue
        except OSError:
            pass
        return _recover(root)


def _recover(root: Path) -> list[str]:
    done = []
    _prove_writable(root)
    for entry in sorted(root.iterdir()):
        replaced = REPLACED.fullmatch(entry.name)
        if replaced and not (root / replaced["name"]).exists():
            os.rename(entry, root / replaced["name"])
            done.append(f"put {replaced['name']} back: a save that was to replace it was interrupted")
        elif replaced or _TEMPORARY.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True)
            done.append(f"removed {entry.name}, left over from an interrupted save")
        elif entry.name == _NEW_TRACKER or _PROBE.fullmatch(entry.name):
            entry.unlink()
    if done:
        sync_directory(root)
    return done


def _prove_writable(root: Path) -> None:
    """Make `root` and a file in it: permission bits alone do not tell (mounts, files in the way). UsageError if not."""
    probe = root / f".writable-{secrets.token_hex(4)}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise UsageError(f"--save {root}: nothing can be written there ({error.strerror or error})") from error


def begin(root: Path, iteration: int) -> Path:
    """Make the temporary directory that a save of `iteration` writes into."""
    temporary = root / f".{directory_name(iteration)}.tmp-{secrets.token_hex(4)}"
    temporary.mkdir(parents=True)
    return temporary


def commit(root: Path, temporary: Path, iteration: int) -> Path:
    """Turn a complete temporary directory into the checkpoint of `iteration`, then point the tracker at it."""
    final = root / directory_name(iteration)
    replaced = root / f".{final.name}.old-{secrets.token_hex(4)}" if final.exists() else None
    if replaced is not None:
        os.rename(final, replaced)
    try:
        os.rename(temporary, final)
    except OSError:
        if replaced is not None:
            os.rename(replaced, final)
        raise
    sync_directory(root)
    write_durably(root / TRACKER, str(iteration).encode())
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)
    return final


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint. Its name goes first, so that none that is half there can be taken for one."""
    name = checkpoint.name.lstrip(".").partition(".")[0]
    leaving = checkpoint.with_name(f".{name}.tmp-{secrets.token_hex(4)}")
    try:
        os.rename(checkpoint, leaving)
    except OSError:
        return  # the next save will try again
    shutil.rmtree(leaving, ignore_errors=True)  # what stays is removed at the next start


def write_durably(path: Path, content: bytes) -> None:
    """Replace the file at `path` so that after a crash either the old or the new content is there."""
    temporary = path.with_name(f".{path.name}.tmp")  # for the tracker: _NEW_TRACKER
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames and new names in `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
