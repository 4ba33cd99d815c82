"""What all ranks learn together: one rank's failure is every rank's failure, and nobody waits for the dead.

Each phase of a save or load runs on some ranks and ends with an exchange of how it went. A rank that raised inside
a phase still takes part in the exchange, so its peers raise too instead of waiting in the next collective.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megackpt.config.errors import UsageError

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. Raised on every rank, with the ranks that failed and why."""


@dataclass(frozen=True)
class _Failure:
    message: str
    usage: bool


@dataclass(frozen=True)
class Ranks:
    """The processes that save or load together. `group` None means the default group (or one lone process)."""

    group: dist.ProcessGroup | None = None

    @property
    def connected(self) -> bool:
        return dist.is_available() and dist.is_initialized()

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group) if self.connected else 0

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group) if self.connected else 1

    def gather(self, value: T) -> list[T]:
        """`value` of every rank, by rank. Values are small picklable objects."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_to_first(self, value: T) -> list[T] | None:
        """`value` of every rank on rank 0, None elsewhere. For what grows with the number of ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, dst=self._first, group=self.group)
        return values

    def all_true(self, flag: bool) -> bool:
        """Whether `flag` is true on every rank: one small all-reduce on the host."""
        if self.size == 1:
            return flag
        value = torch.tensor(int(flag))
        dist.all_reduce(value, op=dist.ReduceOp.MIN, group=self.group)
        return bool(value.item())

    @property
    def _first(self) -> int:
        return dist.get_global_rank(self.group, 0) if self.group is not None else 0

    def together(self, phase: str, work: Callable[[], T]) -> T:
        """Run `work` on every rank and return this rank's result; raise on all if it failed on any.

        UsageError if every failure is one, else CheckpointError naming the phase and the ranks.
        """
        result, cause = _attempt(work)
        failures = self.gather(_failure(cause))
        if any(failures):
            raise _combined(phase, failures) from cause
        return result  # type: ignore[return-value]

    def collect(self, phase: str, work: Callable[[], T]) -> list[T]:
        """Like `together`, with the (picklable) results of all ranks, by rank."""
        result, cause = _attempt(work)
        outcomes = self.gather((result, _failure(cause)))
        failures = [failure for _, failure in outcomes]
        if any(failures):
            raise _combined(phase, failures) from cause
        return [result for result, _ in outcomes]  # type: ignore[misc]

    def from_first(self, phase: str, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 alone and return its (picklable) result on every rank; raise on all if it failed."""
        result, cause = _attempt(work) if self.rank == 0 else (None, None)
        message = [(result, _failure(cause))]
        if self.size > 1:
            dist.broadcast_object_list(message, src=self._first, group=self.group)
        result, failure = message[0]
        if failure is not None:
            raise _combined(phase, [failure]) from cause
        return result  # type: ignore[return-value]


    def from_first_each(self, phase: str, work: Callable[[], list[T]]) -> T:
        """Run `work` on rank 0 alone and give every rank its item of the result; raise on all if it failed."""
        results, cause = _attempt(work) if self.rank == 0 else (None, None)
        failure = _failure(cause)
        mine: list[Any] = [(results[0] if results else None, failure)]
        if self.size > 1:
            each = [(results[rank] if results else None, failure) for rank in range(self.size)]
            dist.scatter_object_list(mine, each if self.rank == 0 else None, src=self._first, group=self.group)
        result, failure = mine[0]
        if failure is not None:
            raise _combined(phase, [failure]) from cause
        return result  # type: ignore[no-any-return]


def coordination_group(timeout: timedelta) -> dist.ProcessGroup | None:
    """A gloo group of all ranks where the default one is of another backend; None where the default serves.

    Plans and digests are small host objects: over NCCL each exchange would go through the device. All ranks call
    this once when a run is built and pass the result to `save` and `load`. `timeout`: that of the run's other groups.
    """
    if not Ranks().connected or dist.get_backend() == "gloo":
        return None
    return dist.new_group(backend="gloo", timeout=timeout)


def describe(error: BaseException) -> str:
    """One line for an error: our own messages as they are, others with their type."""
    own = isinstance(error, (CheckpointError, UsageError))
    return str(error) if own else f"{type(error).__name__}: {error}"


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # of any kind: the peers must learn of it
        return None, error


def _failure(cause: Exception | None) -> _Failure | None:
    return None if cause is None else _Failure(describe(cause), isinstance(cause, UsageError))


def _combined(phase: str, failures: list[_Failure | None]) -> Exception:
    by_message: dict[str, list[int]] = {}
    for rank, failure in enumerate(failures):
        if failure is not None:
            by_message.setdefault(failure.message, []).append(rank)
    if all(failure is None or failure.usage for failure in failures):
        return UsageError("\n".join(by_message))
    lines = [f"rank {', '.join(map(str, ranks))}: {message}" for message, ranks in by_message.items()]
    return CheckpointError(f"could not {phase}: " + "; ".join(lines))
