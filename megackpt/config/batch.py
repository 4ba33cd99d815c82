"""How many samples a step takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megackpt.config.checks import at_least, nearest_multiples
from megackpt.config.errors import UsageError


@dataclass(frozen=True)
class BatchRamp:
    """The global batch grows from ``start`` by ``increment`` at equal distances over the first ``samples`` samples."""

    start: int
    increment: int
    samples: int

    @staticmethod
    def parse(words: tuple[str, ...], final: int) -> BatchRamp:
        """From the three words of --rampup-batch-size.  Raises UsageError unless they lead to ``final``."""
        given = f"--rampup-batch-size {' '.join(words)}"
        if len(words) != 3 or not all(word.isdecimal() for word in words):
            raise UsageError(
                f"{given}: give three whole numbers, the first batch size, its increment, and the samples over which it"
                " grows, such as --rampup-batch-size 16 16 100000."
            )
        ramp = BatchRamp(*map(int, words))
        if ramp.start < 1 or ramp.increment < 1:
            raise UsageError(f"{given}: the first batch size and its increment must be at least 1.")
        if ramp.start > final:
            raise UsageError(
                f"{given} begins above --global-batch-size {final}. Nearest valid: a first batch size of {final}."
            )
        if (final - ramp.start) % ramp.increment:
            near = ramp.start + (final - ramp.start) // ramp.increment * ramp.increment
            raise UsageError(
                f"{given} never meets --global-batch-size {final}, which is not {ramp.start} and a multiple of"
                f" {ramp.increment}. Nearest valid: --global-batch-size {near} or {near + ramp.increment}."
            )
        return ramp


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Samples, not tokens: a sample has seq_length tokens."""

    micro_batch_size: int
    """Samples of one forward on one data-parallel rank."""
    global_batch_size: int
    """Samples of one optimizer step over all ranks."""
    rampup_batch_size: tuple[str, ...] = ()
    """First global batch, increment, samples over which it grows to global_batch_size; none = it does not."""

    def __post_init__(self) -> None:
        at_least("--micro-batch-size", self.micro_batch_size, 1)
        at_least("--global-batch-size", self.global_batch_size, 1)
        _ = self.ramp  # refuses what is not one

    @cached_property
    def ramp(self) -> BatchRamp | None:
        """How the batch grows, if it does."""
        return BatchRamp.parse(self.rampup_batch_size, self.global_batch_size) if self.rampup_batch_size else None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Every global batch size of the run, ascending."""
        if (ramp := self.ramp) is None:
            return (self.global_batch_size,)
        return tuple(range(ramp.start, self.global_batch_size + 1, ramp.increment))

    def size_at(self, consumed_samples: int) -> int:
        """Samples of the step that starts after ``consumed_samples``: all that a resumed run needs to know."""
        ramp = self.ramp
        if ramp is None or consumed_samples >= ramp.samples:
            return self.global_batch_size
        increments = (self.global_batch_size - ramp.start) // ramp.increment
        return ramp.start + consumed_samples * increments // ramp.samples * ramp.increment

    def steps(self, consumed_samples: int, samples: int) -> tuple[int, int]:
        """Whole steps from ``consumed_samples`` on that end within ``samples``, and the samples consumed then."""
        number, consumed = 0, consumed_samples
        while self.ramp is not None and consumed < self.ramp.samples:
            size = self.size_at(consumed)
            if consumed + size > samples:
                return number, consumed
            number, consumed = number + 1, consumed + size
        rest = max(0, samples - consumed) // self.global_batch_size
        return number + rest, consumed + rest * self.global_batch_size

    def micro_batches(self, data_parallel: int) -> int:
        """Micro-batches of one full step on each data-parallel rank.

        Raises UsageError if the batch, or any size that it grows through, does not divide."""
        per_round = self.micro_batch_size * data_parallel
        if self.global_batch_size % per_round:
            raise UsageError(
                f"--global-batch-size {self.global_batch_size} is not divisible by --micro-batch-size"
                f" {self.micro_batch_size} x data-parallel size {data_parallel} = {per_round}."
                f" Nearest valid: --global-batch-size {nearest_multiples(self.global_batch_size, per_round)}."
            )
        for size in self.sizes:
            if size % per_round:
                raise UsageError(
                    f"--rampup-batch-size {' '.join(self.rampup_batch_size)} passes through a global batch of {size},"
                    f" which is not divisible by --micro-batch-size {self.micro_batch_size} x data-parallel size"
                    f" {data_parallel} = {per_round}. Use a first batch size and an increment that are multiples of"
                    f" {per_round}."
                )
        return self.global_batch_size // per_round
