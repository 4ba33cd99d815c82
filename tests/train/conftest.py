"""Reference runs, made once per session and shared through files."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.layouts import FAMILIES, STEPS, Flags, built, rate_of, steps
from tests.pool import run_distributed

ReferenceRun = Callable[[str, str, int], Path]


def _train_alone(rank: int, world_size: int, flags: Flags, gradients_of: int, path: Path) -> None:
    steps(built(flags), STEPS, gradients_of=gradients_of).save(path)


@pytest.fixture(scope="session")
def reference_run() -> Iterator[ReferenceRun]:
    """R0 of a family, number format and global batch: the path of its trace, with the gradients of all steps in fp64
    and of the first in fp32."""
    with tempfile.TemporaryDirectory(prefix="megackpt-r0-") as folder:

        @cache
        def run(family: str, dtype: str, global_batch: int) -> Path:
            path = Path(folder, f"{family}-{dtype}-{global_batch}.pt")
            flags = FAMILIES[family] | {
                "params-dtype": dtype,
                "lr": rate_of(dtype),
                "micro-batch-size": global_batch,
                "global-batch-size": global_batch,
            }
            run_distributed(_train_alone, 1, flags, STEPS if dtype == "fp64" else 1, path)
            return path

        yield run
