"""A trainer that is let go is gone, with its process groups: a group that something holds keeps three threads, which
wake a hundred times a second."""

from __future__ import annotations

import gc
import os

import pytest

from tests.layouts import SMALL_LLAMA, Flags, Layout, built, steps
from tests.pool import run_distributed

SHARDED: Flags = {"use-distributed-optimizer": True, "overlap-grad-reduce": True, "overlap-param-gather": True}
CASES = {
    "dp, sharded": (SHARDED, Layout(dp=2)),
    "tp sp, full": ({"recompute-granularity": "full"}, Layout(tp=2, sp=True)),
    "chunks": ({"num-layers": 4, "num-virtual-stages-per-pipeline-rank": 2}, Layout(pp=2)),
    "zero bubble": ({"pipeline-schedule": "zb-h1", "recompute-granularity": "full"}, Layout(pp=2)),
}


def _train(rank: int, world_size: int, flags: Flags, layout: Layout) -> None:
    steps(built(flags, layout), 2)


def _threads(rank: int, world_size: int) -> int:
    gc.collect()
    return len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize(("flags", "layout"), CASES.values(), ids=CASES.keys())
def test_a_run_that_is_over_holds_no_process_group(flags: Flags, layout: Layout) -> None:
    run_distributed(_train, 2, SMALL_LLAMA | flags, layout)
    before = run_distributed(_threads, 2)
    for _ in range(2):
        run_distributed(_train, 2, SMALL_LLAMA | flags, layout)
    assert run_distributed(_threads, 2) == before
