"""Checkpoints on disk."""

from __future__ import annotations

from dataclasses import dataclass

from megackpt.config.checks import at_least, one_of
from megackpt.config.errors import UsageError
from megackpt.config.parallel import ParallelConfig

FORMATS = ("torch_dist", "torch")
STRICTNESS = ("raise_all", "raise_unexpected", "assume_ok_unexpected", "log_all", "log_unexpected", "ignore_all")


def check_torch_format(parallel: ParallelConfig) -> None:
    """Its files are written by one data-parallel rank each, which must have all optimizer state.  Raises UsageError."""
    if parallel.distributed_optimizer and parallel.data > 1:
        raise UsageError(
            f"--ckpt-format torch contradicts --use-distributed-optimizer over {parallel.data} data-parallel ranks:"
            " none of them has the optimizer state that one file would hold. Use --ckpt-format torch_dist, or"
            " --no-save-optim."
        )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where the state of a run is written and read."""

    save: str | None = None
    """Folder to write to; the end of training always saves."""
    save_interval: int | None = None
    """Iterations between two saves; None = only at the end."""
    async_save: bool = False
    """Training goes on while a checkpoint is written; costs host memory of the size of what the rank writes."""
    retain_interval: int | None = None
    """Of older checkpoints keep those whose iteration is a multiple of this (and the last ones)."""
    retain_last: int | None = None
    """Keep this many of the newest; None = all, or with ``retain_interval`` one."""
    format: str = "torch_dist"
    """One file per rank and any layout (torch_dist), or Megatron's folders of torch files (torch)."""
    load: str | None = None
    """Folder to continue from; an empty one starts afresh."""
    step: int | None = None
    """Iteration to load; None = the newest whole checkpoint."""
    pretrained: str | None = None
    """Folder whose weights a run begins with that has nothing in ``load`` yet."""
    exit_on_missing: bool = False
    """Refuse to start afresh where ``load`` has no checkpoint."""
    strictness: str = "raise_all"
    """What becomes of tensors that only the run or only the checkpoint has."""
    save_optim: bool = True
    save_rng: bool = True
    load_optim: bool = True
    load_rng: bool = True
    finetune: bool = False
    """Load the weights only, and begin at iteration 0."""

    def __post_init__(self) -> None:
        at_least("--save-interval", self.save_interval, 1)
        at_least("--save-retain-interval", self.retain_interval, 1)
        at_least("--save-retain-last", self.retain_last, 1)
        at_least("--ckpt-step", self.step, 0)
        one_of("--ckpt-format", self.format, FORMATS)
        one_of("--dist-ckpt-strictness", self.strictness, STRICTNESS)
        self._check_partners()

    def _check_partners(self) -> None:
        """A flag that would do nothing without another one."""
        to_write, to_read = "--save: the folder to write to", "--load: the folder to continue from"
        for given, partner, flag, needs in (
            (self.save_interval, self.save, f"--save-interval {self.save_interval}", to_write),
            (self.async_save, self.save, "--async-save", to_write),
            (self.retain_interval, self.save, f"--save-retain-interval {self.retain_interval}", to_write),
            (self.retain_last, self.save, f"--save-retain-last {self.retain_last}", to_write),
            (self.step is not None, self.load, f"--ckpt-step {self.step}", to_read),
            (self.exit_on_missing, self.load or self.pretrained, "--exit-on-missing-checkpoint", to_read),
        ):
            if given and not partner:
                raise UsageError(f"{flag} needs {needs}. Add it, or leave {flag.split()[0]} out.")
