"""Names in a folder of checkpoints; torch is not needed to know them."""

from __future__ import annotations

import re
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
RUN_FILE = "run.json"
REPLACED = re.compile(r"\.(?P<name>iter_(?P<iteration>\d{7,15}))\.old-\w+", re.ASCII)
"""A checkpoint that was set aside for a newer one of the same iteration."""
_WHOLE = re.compile(r"iter_(?P<iteration>\d{7,15})", re.ASCII)
_NUMBER = re.compile(r"\d{1,15}", re.ASCII)


def directory_name(iteration: int) -> str:
    """`iter_0000010` for 10."""
    return f"iter_{iteration:07d}"


def saved_directories(root: Path) -> dict[int, Path]:
    """Where each iteration lies under `root`, ascending. Says nothing about whether it is whole.

    While a save replaces a checkpoint there is an instant without `iter_0000010`: then the one set aside stands for it.
    """
    found: dict[int, Path] = {}
    for entry in sorted(root.iterdir(), reverse=True) if root.is_dir() else ():  # "iter…" comes before ".iter…"
        match = _WHOLE.fullmatch(entry.name) or REPLACED.fullmatch(entry.name)
        if match and entry.is_dir():
            found.setdefault(int(match["iteration"]), entry)
    return dict(sorted(found.items()))


def tracked_iteration(root: Path) -> int | None:
    """What the tracker file says; None if there is none. Raises ValueError if it is not a number, OSError."""
    try:
        with (root / TRACKER).open("rb") as file:
            text = file.read(40).decode("ascii", "replace").strip()
    except FileNotFoundError:
        return None
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"{TRACKER} holds {text!r}, not an iteration number")
    return int(text)


def in_order_of_trust(root: Path) -> tuple[list[Path], str | None]:
    """Checkpoints in the order in which a load tries them, and what is wrong with the tracker, if anything.

    The tracker's, older ones from the newest, then newer ones: a run that went back may have left those.
    """
    saved = saved_directories(root)
    newest_first = [*saved][::-1]
    try:
        tracked = tracked_iteration(root)
    except ValueError as error:
        return [saved[i] for i in newest_first], str(error)
    except OSError as error:
        return [saved[i] for i in newest_first], f"{TRACKER} cannot be read ({error.strerror})"
    if tracked is None:
        return [saved[i] for i in newest_first], f"it has no {TRACKER}" if saved else None
    older = [saved[i] for i in newest_first if i < tracked]
    newer = [saved[i] for i in newest_first if i > tracked]
    return [saved.get(tracked, root / directory_name(tracked)), *older, *newer], None
