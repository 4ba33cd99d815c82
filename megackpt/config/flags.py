"""THE flag table: every flag that is known here, once.  It drives the parser, ``--help`` and ``docs/flags.md``.

The rows stand in ``table_*.py`` by group; a new flag is one row there and one field of a dataclass.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megackpt.config import (
    table_elsewhere,
    table_files,
    table_logging,
    table_model,
    table_parallel,
    table_training,
)
from megackpt.config.flag import Flag

FLAGS: tuple[Flag, ...] = (
    *table_model.ROWS,
    *table_training.ROWS,
    *table_parallel.ROWS,
    *table_files.ROWS,
    *table_logging.ROWS,
    *table_elsewhere.ROWS,
)

GROUPS: tuple[str, ...] = tuple(dict.fromkeys(flag.group for flag in FLAGS))

BY_KEY: Mapping[str, Flag] = MappingProxyType({flag.key: flag for flag in FLAGS})

BY_TARGET: Mapping[str, Flag] = MappingProxyType({flag.target: flag for flag in FLAGS if flag.target})

EXCLUSIVE: tuple[frozenset[str], ...] = (
    frozenset({"train-iters", "train-samples"}),
    frozenset({"lr-decay-iters", "lr-decay-samples"}),
    frozenset({"lr-warmup-iters", "lr-warmup-samples", "lr-warmup-fraction"}),
    frozenset({"lr-wsd-decay-iters", "lr-wsd-decay-samples"}),
    frozenset({"data-path", "train-data-path", "mock-data"}),
)
"""Flags of which one is given.  A stronger source that gives one replaces another of a weaker source."""

DETAILS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "recompute-granularity": frozenset(
            {"recompute-method", "recompute-num-layers", "recompute-modules", "recompute-keep"}
        )
    }
)
"""Flags that only detail another: a stronger source that changes the main one drops a weaker source's details."""
