"""Runs that are asked to end: by a signal to the launcher, to everyone or to one rank, or by the clock (OP-01)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megackpt.config.checkpoint_folder import saved_directories, tracked_iteration
from megackpt.train.checkpoint import Position
from megackpt.train.loop import train
from tests.layouts import SMALL_GPT, Flags, Layout, built, logged, words
from tests.pool import ROOT, SINGLE_THREAD, run_distributed


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize(
    ("to", "name"),
    [
        ("launcher", "SIGTERM"),
        pytest.param("everyone", "SIGTERM", marks=pytest.mark.full),
        pytest.param("one rank", "SIGUSR1", marks=pytest.mark.full),
    ],
)
def test_a_signal_saves_and_ends_in_time(tmp_path: Path, to: str, name: str) -> None:
    flags: Flags = SMALL_GPT | {"tensor-model-parallel-size": 2, "train-iters": 10**6, "log-interval": 1}
    flags |= {"save": str(tmp_path), "async-save": True, "exit-signal-handler": True, "exit-signal": name}
    flags |= {"eval-interval": 10**6, "eval-iters": 10**6}  # an end by itself would evaluate for days
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    options |= {"cwd": ROOT, "env": {**os.environ, **SINGLE_THREAD}, "start_new_session": True}
    job = subprocess.Popen([*launcher, "pretrain_gpt.py", *words(flags)], **options)
    assert job.stdout is not None
    while "iteration        2/" not in job.stdout.readline():
        assert job.poll() is None
    children, asked = _children(job.pid), time.monotonic()
    number = signal.Signals[name]
    if to == "launcher":
        job.send_signal(number)
    elif to == "everyone":
        os.killpg(job.pid, number)
    else:
        os.kill(children[1], number)
    text, _ = job.communicate(timeout=60)
    assert time.monotonic() - asked < 25, text  # torchrun kills after 30 s
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    found = re.search(rf"megackpt: {name} was received: ending after iteration (\d+) of 1000000\n", text)
    assert found, text
    assert "megackpt: error" not in text and "validation loss" not in text
    assert list(saved_directories(tmp_path)) == [tracked_iteration(tmp_path)] == [int(found[1])], text
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    if to == "one rank":
        assert job.returncode == 0, text


class _AskedAt:
    """A board of a rank that gets the signal before the `look`-th question for it."""

    def __init__(self, look: int) -> None:
        self.left = look

    @property
    def asked(self) -> bool:
        self.left -= 1
        return self.left <= 0

    def says(self, place: str, doing: object) -> None: ...


def _train(rank: int, world: int, flags: Flags, look: int, rank_asked: int, began: float) -> Position:
    board: Any = _AskedAt(look if rank == rank_asked else 10**6)
    return train(built(flags, Layout(pp=world)), board, time.monotonic() - began)


def test_all_ranks_end_after_the_same_iteration_and_go_on_from_there(tmp_path: Path) -> None:
    ends: Flags = {"exit-signal-handler": True, "save": str(tmp_path / "a"), "load": str(tmp_path / "a")}
    ends["save-interval"] = 3
    run = SMALL_GPT | {"hidden-dropout": 0.1}
    cut, whole = (run | {"metrics-file": str(tmp_path / name)} for name in ("cut", "whole"))
    assert run_distributed(_train, 2, cut | ends, 1, 1, 0.0) == [Position()] * 2  # while it was built
    assert not saved_directories(tmp_path / "a")
    assert run_distributed(_train, 2, cut | ends, 3, 0, 0.0) == [Position(2, 8)] * 2
    assert run_distributed(_train, 2, cut | ends, 2, 1, 0.0) == [Position(3, 12)] * 2
    assert run_distributed(_train, 2, cut | ends, 10, 1, 0.0) == [Position(5, 20)] * 2
    assert run_distributed(_train, 2, whole, 1, 1, 0.0) == [Position(5, 20)] * 2  # no flag: not asked
    assert list(saved_directories(tmp_path / "a")) == [2, 3, 5]
    keys = ("iteration", "lm_loss", "grad_norm")
    assert logged(tmp_path / "cut", *keys) == logged(tmp_path / "whole", *keys)


def test_minutes_count_from_the_start_of_the_process(tmp_path: Path) -> None:
    flags = SMALL_GPT | {"exit-duration-in-mins": 2, "save": str(tmp_path)}
    assert run_distributed(_train, 2, flags, 1, 1, 60.0) == [Position(5, 20)] * 2
    flags |= {"save": str(tmp_path / "late"), "load": str(tmp_path / "late")}
    for iteration in (1, 2):  # however late it is, every start gets one iteration further
        assert run_distributed(_train, 2, flags, 1, 1, 121.0) == [Position(iteration, 4 * iteration)] * 2
