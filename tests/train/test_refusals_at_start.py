"""A refused run through the real launcher: one message, exit codes as promised, and everything gone within seconds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.layouts import SMALL_GPT, Flags, words

ROOT = Path(__file__).resolve().parents[2]


def _start(flags: Flags) -> tuple[int, str, float]:
    """Exit code of torchrun over two ranks, what was printed, and the seconds until all processes were gone."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    line = [*launcher, "pretrain_gpt.py", *words(flags)]
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, *line],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=90,
    )
    return done.returncode, done.stdout, time.monotonic() - begin


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (  # refused by the parser, before torch is imported
            {"tensor-model-parallel-size": 2, "num-attention-heads": 3, "kv-channels": 12},
            "--num-attention-heads 3 is not divisible by --tensor-model-parallel-size 2",
        ),
        (  # refused once the ranks have met: only then are files opened
            {"recompute-plan": "/nonexistent/plan.json"},
            "--recompute-plan /nonexistent/plan.json cannot be read",
        ),
    ],
    ids=["parser", "files"],
)
def test_a_refused_run_says_so_once_and_is_gone(extra: Flags, said: str) -> None:
    code, text, seconds = _start(SMALL_GPT | extra)
    assert text.count(said) == 1, text
    assert code == 1  # torchrun's own; the rank's is in its report
    assert "exitcode  : 2" in text, text
    assert "UsageError" not in text  # no traceback of ours; torchrun prints its own
    assert seconds < 60  # start-up of the launcher included; a hang would meet the limit of 90
