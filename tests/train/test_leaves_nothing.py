"""A trainer that is let go is gone, with its process groups: a group that something holds keeps three threads, which
wake a hundred times a second."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.layouts import SMALL_LLAMA, Flags, Layout, built, steps, words
from tests.pool import ROOT, SINGLE_THREAD, run_distributed

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


# A thread of gloo that frees a tensor while the interpreter goes away aborts the process, after all its work.
_AFTER = """
import os, sys
from pathlib import Path
from megackpt.cli.train import main
code = main(sys.argv[1:])
names = [Path("/proc/self/task", task, "comm").read_text() for task in os.listdir("/proc/self/task")]
os.write(1, f"code {code}, threads of gloo: {sum('gloo' in name for name in names)}\\n".encode())
sys.exit(code)
"""


def test_no_thread_of_a_group_outlives_the_run(tmp_path: Path) -> None:
    script = tmp_path / "after.py"
    script.write_text(_AFTER)
    flags: Flags = SMALL_LLAMA | {"pipeline-model-parallel-size": 2, "train-iters": 2, "num-workers": 0}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(
        [*launcher, *words(flags)], cwd=tmp_path, env={**os.environ, **SINGLE_THREAD, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.stdout.count("code 0, threads of gloo: 0") == 2, done.stdout + done.stderr
