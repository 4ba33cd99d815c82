"""Which checkpoints stay. Only older ones than the newest ever go, and only once that one is whole on disk."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megackpt.config.checkpoint_folder import MANIFEST, saved_directories
from megackpt.persist.directory import remove


@dataclass(frozen=True)
class Retention:
    """Keep the `last` so many, and those whose iteration is a multiple of `interval`; all, if neither is given.

    `interval` alone keeps the last one beside its multiples, as Megatron's `--save-retain-interval` does.
    """

    last: int | None = None
    interval: int | None = None

    def surplus(self, saved: Iterable[int], newest: int) -> list[int]:
        """The iterations among `saved` that go once `newest` is there, ascending."""
        if self.last is None and self.interval is None:
            return []
        upto = sorted(iteration for iteration in saved if iteration <= newest)
        older = upto[: -(self.last or 1)]
        return [iteration for iteration in older if self.interval is None or iteration % self.interval]

    def apply(self, root: Path, newest: int) -> None:
        """Delete what is surplus under `root`. What is there and is no checkpoint of ours is left alone."""
        saved = saved_directories(root)
        for iteration in self.surplus(saved, newest):
            if (saved[iteration] / MANIFEST).is_file():
                remove(saved[iteration])


KEEP_ALL = Retention()
