"""The smallest command line that can run, for the tests of this room."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megackpt.config.errors import UsageError
from megackpt.config.parse import Parsed, parse_all
from megackpt.config.run import RunConfig

T0 = {
    "--num-layers": "4",
    "--hidden-size": "96",
    "--num-attention-heads": "8",
    "--ffn-hidden-size": "336",
    "--seq-length": "40",
    "--vocab-size": "509",
    "--micro-batch-size": "2",
    "--global-batch-size": "8",
    "--lr": "1e-3",
    "--train-iters": "5",
    "--mock-data": None,
}


def words(*more: str, drop: str = "") -> list[str]:
    """T0's command line without the flags of ``drop`` (names between spaces), then ``more``."""
    kept = {name: value for name, value in T0.items() if name not in drop.split()}
    return [word for pair in kept.items() for word in pair if word is not None] + list(more)


def parsed(line: str = "", *, drop: str = "", world_size: int = 1, args: str | None = None) -> Parsed:
    """The parse of T0 without ``drop`` and with the words of ``line``; ``args`` is MEGACKPT_ARGS."""
    return parse_all(words(*line.split(), drop=drop), {} if args is None else {"MEGACKPT_ARGS": args}, world_size)


def run(line: str = "", *, drop: str = "", world_size: int = 1, args: str | None = None) -> RunConfig:
    """Like ``parsed``, the run alone."""
    return parsed(line, drop=drop, world_size=world_size, args=args).config


Refusal = tuple[str, str, int, str]
"""Flags of T0 left out, flags added, processes, the message."""


def check_refused(case: Refusal) -> None:
    drop, line, world_size, message = case
    with pytest.raises(UsageError) as caught:
        run(line, drop=drop, world_size=world_size)
    assert str(caught.value) == message


def ids_of(table: Sequence[Refusal]) -> list[str]:
    """The line that a refusal is about."""
    return [line or drop for drop, line, _, _ in table]
