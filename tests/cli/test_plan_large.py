"""The largest runs are planned on one core in seconds and in little memory: the whole command, searches included."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from tests.pool import ROOT

GIB = 2**30
COMMON = "--seq-length 2048 --vocab-size 51200 --bf16 --micro-batch-size 1 --machine a100-80gb --sequence-parallel"
GPT_175B = (
    "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --global-batch-size 1536 --world-size 1024"
    " --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --num-layers-per-virtual-pipeline-stage 2"
)
GPT_1T = (
    "--num-layers 128 --hidden-size 25600 --num-attention-heads 160 --global-batch-size 3072 --world-size 3072"
    " --tensor-model-parallel-size 8 --pipeline-model-parallel-size 64 --num-layers-per-virtual-pipeline-stage 1"
)


def _one_core_and_one_gib() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    resource.setrlimit(resource.RLIMIT_AS, (GIB, GIB))


@pytest.mark.parametrize(
    ("flags", "seconds"),
    [pytest.param(GPT_175B, 5, id="175B"), pytest.param(GPT_1T, 10, id="1T", marks=pytest.mark.full)],
)
def test_one_core_and_one_gib_are_enough(flags: str, seconds: float) -> None:
    """Processor time, since other tests share the core; interpreter start and output included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", "from megackpt.cli.main import main; raise SystemExit(main())", "plan"]
    done = subprocess.run(
        [*command, *COMMON.split(), *flags.split()],
        cwd=ROOT, preexec_fn=_one_core_and_one_gib, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode in (0, 1) and "stage" in done.stdout, done.stderr
    # Three times what is promised: processor time grows by as much where many processes share the caches.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3 * seconds
