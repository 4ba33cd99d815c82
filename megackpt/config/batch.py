"""How many samples a step takes."""

from __future__ import annotations

from dataclasses import dataclass

from megackpt.config.checks import at_least, nearest_multiples
from megackpt.config.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Samples, not tokens: a sample has seq_length tokens."""

    micro_batch_size: int
    """Samples of one forward on one data-parallel rank."""
    global_batch_size: int
    """Samples of one optimizer step over all ranks."""

    def __post_init__(self) -> None:
        at_least("--micro-batch-size", self.micro_batch_size, 1)
        at_least("--global-batch-size", self.global_batch_size, 1)

    def micro_batches(self, data_parallel: int) -> int:
        """Micro-batches of one step on each data-parallel rank.  Raises UsageError if the batch does not divide."""
        per_round = self.micro_batch_size * data_parallel
        if self.global_batch_size % per_round:
            raise UsageError(
                f"--global-batch-size {self.global_batch_size} is not divisible by --micro-batch-size"
                f" {self.micro_batch_size} x data-parallel size {data_parallel} = {per_round}."
                f" Nearest valid: --global-batch-size {nearest_multiples(self.global_batch_size, per_round)}."
            )
        return self.global_batch_size // per_round
