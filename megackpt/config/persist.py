"""Checkpoints on disk."""

from __future__ import annotations

from dataclasses import dataclass

from megackpt.config.checks import at_least
from megackpt.config.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where the state of a run is written and read."""

    save: str | None = None
    """Folder to write to; the end of training always saves."""
    save_interval: int | None = None
    """Iterations between two saves; None = only at the end."""
    load: str | None = None
    """Folder to continue from; an empty one starts afresh."""
    save_optim: bool = True
    save_rng: bool = True
    load_optim: bool = True
    load_rng: bool = True
    finetune: bool = False
    """Load the weights only, and begin at iteration 0."""

    def __post_init__(self) -> None:
        at_least("--save-interval", self.save_interval, 1)
        if self.save_interval is not None and self.save is None:
            raise UsageError(
                f"--save-interval {self.save_interval} needs --save: the folder to write to."
                " Add it, or leave --save-interval out."
            )
