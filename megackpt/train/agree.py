"""Ranks that must not differ: what one of them cannot do, all of them refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from megackpt.config.errors import UsageError

T = TypeVar("T")


def together(work: Callable[[], T]) -> T:
    """Run ``work`` on every rank.  If it fails on one (a missing file, a full disk), every rank raises UsageError with
    the words of the lowest one that failed, instead of waiting for it in the next collective."""
    result, failure = None, None
    try:
        result = work()
    except (UsageError, OSError) as error:
        failure = str(error)
    failures = everyone(failure)
    first = next((f for f in failures if f is not None), None)
    if first is not None:
        raise UsageError(first)
    return result  # type: ignore[return-value]


def from_first(work: Callable[[], T]) -> T:
    """What ``work`` gives on rank 0, on every rank; if it fails there, every rank raises UsageError with its words."""
    both: list[object] = [None, None]
    if dist.get_rank() == 0:
        try:
            both[0] = work()
        except (UsageError, OSError) as error:
            both[1] = str(error)
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(both, src=0)
    found, failure = both
    if failure is not None:
        raise UsageError(str(failure))
    return found  # type: ignore[return-value]


def agree(value: str, what: str) -> None:
    """Stop when ranks differ in something that decides the order of their collectives."""
    values = everyone(value)
    odd = [rank for rank, other in enumerate(values) if other != values[0]]
    if odd:
        raise UsageError(f"rank 0 and rank{'s' * (len(odd) > 1)} {', '.join(map(str, odd))} have different {what}s")


def everyone(value: T) -> list[T]:
    """One small picklable value of every rank, in rank order."""
    values: list[T] = [value] * dist.get_world_size()
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values
