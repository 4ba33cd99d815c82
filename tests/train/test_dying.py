"""Ranks that die, stand still or lose their launcher, through the real launcher: the job ends in time, and its output
says who, where, and what every rank was doing (OP-03, OP-04)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.layouts import SMALL_GPT, Flags, words

ROOT = Path(__file__).resolve().parents[2]
RUN: Flags = SMALL_GPT | {"num-layers": 4, "global-batch-size": 8, "train-iters": 100000, "log-interval": 1}
STAGES: Flags = {"pipeline-model-parallel-size": 2}
CHUNKS: Flags = STAGES | {"num-virtual-stages-per-pipeline-rank": 2}


def start(ranks: int, victim: int, how: str, place: str, flags: Flags) -> subprocess.Popen[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    line = [*launcher, "tests/train/dying.py", str(victim), how, place, "--", *words(RUN | flags)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, *line], cwd=ROOT, env=env, **output)  # type: ignore[call-overload, no-any-return]


def outcome(job: subprocess.Popen[str]) -> tuple[str, float]:
    """What the job printed, and the seconds from the planted end to the last process's."""
    text, _ = job.communicate(timeout=110)
    assert job.returncode != 0
    found = re.search(r"dying: \w+ at ([\d.]+)", text)
    assert found, text
    return text, time.time() - float(found[1])


def table(text: str) -> dict[int, str]:
    """The lines about the ranks; there is exactly one table."""
    assert text.count("megackpt: where every rank was:") == 1, text
    rows = re.findall(r"^  rank (\d+) of \d+ \(tp \d, dp \d, stage \d of \d\): (.*)$", text, re.MULTILINE)
    return {int(rank): words for rank, words in rows}


TENSOR: Flags = STAGES | {"tensor-model-parallel-size": 2}
ZERO: Flags = STAGES | {"pipeline-schedule": "zb-h1"}
CASES: list[tuple[int, int, str, Flags, str | None]] = [
    (2, 1, "F2.0 compute", STAGES, "recv for B2.0 from rank 1"),
    (4, 1, "update", TENSOR, None),
]
# Each rank at each kind of action; the survivor waits for a message of the dead one, or for its own to be taken.
FULL: list[tuple[int, int, str, Flags, str | None]] = [
    (2, 0, "F1.0 compute", STAGES, "rank 0"),
    (2, 0, "F1.0 send", STAGES, "rank 0"),
    (2, 0, "B0.0 recv", STAGES, "from rank 0"),
    (2, 0, "B1.0 compute", STAGES, "rank 0"),
    (2, 1, "F3.0 recv", STAGES, "recv for B2.0 from rank 1"),
    (2, 1, "B1.0 compute", STAGES, "recv for B1.0 from rank 1"),
    (2, 1, "B1.0 send", STAGES, "rank 1"),
    (2, 0, "F1.1 recv", CHUNKS, "rank 0"),
    (2, 0, "F1.1 compute", CHUNKS, "from rank 0"),
    (2, 0, "B0.1 send", CHUNKS, "rank 0"),
    (2, 1, "F0.0 send", CHUNKS, "rank 1"),
    (2, 1, "B0.0 recv", CHUNKS, "rank 1"),
    (2, 1, "B0.0 compute", CHUNKS, "rank 1"),
    (2, 0, "W0.0 compute", ZERO, "rank 0"),
    (2, 1, "B2.0 compute", ZERO, "rank 1"),
    (2, 1, "W0.0 compute", ZERO, "rank 1"),
    (4, 2, "F0.0 compute", TENSOR, None),
    (4, 3, "B2.0 send", TENSOR, None),
]
CASES_OF_ALL = [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in FULL)]


def _place(value: object) -> str | None:
    """A part of a test's name."""
    if isinstance(value, dict):
        return "zb" if value == ZERO else "v2" if value == CHUNKS else ""
    return str(value)


@pytest.mark.parametrize(("ranks", "victim", "place", "flags", "waits"), CASES_OF_ALL, ids=_place)
def test_a_killed_rank_ends_the_job_with_its_name(
    ranks: int, victim: int, place: str, flags: Flags, waits: str | None
) -> None:
    text, seconds = outcome(start(ranks, victim, "kill", place, flags))
    rows = table(text)
    assert seconds < 30 and set(rows) == set(range(ranks))
    assert [rank for rank, row in rows.items() if row.startswith("no sign of life")] == [victim], text
    assert waits is None or f"{waits} failed after" in text
    assert "iteration 2" in text or "iteration 3" in text


@pytest.mark.full
def test_an_exception_in_one_rank_ends_the_job() -> None:  # OP-03
    job = start(2, 1, "raise", "B2.0 compute", STAGES)
    text, seconds = outcome(job)
    assert job.returncode == 1 and seconds < 30
    assert "megackpt: error: rank 1 (stage 1 of 2): compute for B2.0 failed after" in text
    assert "ValueError: planted; last completed:" in text and set(table(text)) == {0, 1}


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "row", "limit"),
    [
        ("sleep", r"iteration 2, recv for F3\.0 from rank 0 for [\d.]+ s; last completed: ", 40),
        ("freeze", "no sign of life; ", 70),  # the launcher asks it to end, and kills it 30 s later
    ],
)
def test_a_rank_that_stands_still_ends_the_job_after_the_time_out(how: str, row: str, limit: float) -> None:
    flags = STAGES | {"distributed-timeout-minutes": 0.1}
    text, seconds = outcome(start(2, 1, how, "F3.0 recv", flags))
    assert re.search(r"rank 0 \(stage 0 of 2\): recv for B2\.0 from rank 1 failed after 6\.\d s", text)
    assert re.match(row, table(text)[1])
    assert 6 < seconds < limit


def test_no_rank_outlives_its_launcher() -> None:
    job = start(2, 0, "kill", "never", STAGES)
    assert job.stdout is not None
    while "iteration        2/" not in job.stdout.readline():
        assert job.poll() is None
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    assert len(children) == 2
    os.kill(job.pid, signal.SIGKILL)
    end = time.monotonic() + 10
    while any(Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < end:
        time.sleep(0.05)
    text, _ = job.communicate(timeout=10)
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    assert "ended, because its launcher is gone in iteration" in text or "failed" in text
