"""kill -9 at any moment of a save: the newest whole checkpoint loads, bit for bit, and nothing else is lost.

Each case is a fork of a process that has everything imported, so that hundreds take seconds. The child saves and is
killed: at every single change of the file system that Python announces (audit events), or at a random time.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megackpt.persist import Retention, RunState, Saver, load, prepare_directory
from tests.persist.test_background import beside
from tests.persist.tiny import lone_mesh, same, state_of
from tests.pool import run_distributed

EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
HOWS = ("blocking", "background", "torch")


def saver_of(how: str, root: Path) -> Saver:
    retention = Retention(last=1)  # the most dangerous one: what was there is deleted
    if how == "background":
        return beside(root, lone_mesh(), retention=retention)
    return Saver(root, lone_mesh(), form="torch" if how == "torch" else "torch_dist", retention=retention)


def state(seed: int | None, ballast: int = 0) -> RunState:
    made = state_of(lone_mesh(), seed)
    made.per_rank["ballast"] = torch.full((ballast,), (seed or 0) % 251, dtype=torch.uint8)
    return made


def loaded(root: Path, ballast: int = 0) -> int:
    """Iteration of what a load takes; asserts that it is right in every bit."""
    fresh = state(None, ballast)
    report = load(root, fresh, lone_mesh())
    assert report is not None
    seed = int(report.extra["iteration"])
    assert same(fresh, lone_mesh(), seed) and int(fresh.per_rank["stream.tensor"]) == 1000 * seed
    assert bool((fresh.per_rank["ballast"] == seed % 251).all())
    return seed


def forked(work: Callable[[], None]) -> int:
    """Run `work` in a fork; its process id."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return pid


def status_of(pid: int) -> int:
    """Exit code, or minus the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def dies_at(count: int, root: Path, save: Callable[[], None]) -> Callable[[], None]:
    """`save`, killed before the `count`-th change that it makes below `root`."""

    def work() -> None:
        left = [count]

        def watch(event: str, arguments: tuple[object, ...]) -> None:
            if event not in EVENTS or not str(arguments[0]).startswith(str(root)):
                return
            if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
                return
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        save()

    return work


def at_every_change(rank: int, world: int, folder: str, how: str, replaced: bool, prepared: bool) -> list[int]:
    """Seed 1 lies there; a save of seed 2 (as the same iteration, if `replaced`) is killed at its n-th change.

    For all n. Returns what a load found each time.
    """
    found = []
    for count in range(1, 200):
        root = Path(folder) / f"{how}-{replaced}-{prepared}-{count}"
        saver = saver_of(how, root)
        saver.save(1, state(1))
        saver.finish()

        def save(root: Path = root) -> None:
            saver = saver_of(how, root)
            saver.save(1 if replaced else 2, state(2))
            saver.finish()

        status = status_of(forked(dies_at(count, root, save)))
        if prepared:
            prepare_directory(root)
        found.append(loaded(root))
        if prepared:  # nothing is left over, and the next save works
            assert all(not path.name.startswith(".") for path in root.iterdir())
            saver = saver_of(how, root)
            saver.save(3, state(3))
            saver.finish()
            assert loaded(root) == 3
        if status == 0:
            return found
        assert status == -signal.SIGKILL
    raise AssertionError("a save never ends")


@pytest.mark.parametrize("prepared", [False, True], ids=["read-only", "next-start"])
@pytest.mark.parametrize("replaced", [False, True], ids=["new", "same-iteration"])
@pytest.mark.parametrize("how", HOWS)
def test_a_kill_at_every_change_of_the_disk(tmp_path: Path, how: str, replaced: bool, prepared: bool) -> None:
    found = run_distributed(at_every_change, 1, str(tmp_path), how, replaced, prepared, timeout=100)[0]
    assert len(found) > 7
    assert found == sorted(found) and found[0] == 1 and found[-1] == 2  # the old one up to some moment, then the new


def at_random(rank: int, world: int, folder: str, how: str, kills: int, seed: int) -> tuple[int, int, int]:
    """Saves that are killed at a random time. Returns how many ended before, and were torn, and how many after."""
    draw, root, ballast = random.Random(seed), Path(folder), 3 << 20
    saver = saver_of(how, root)
    began = time.monotonic()
    saver.save(1, state(1, ballast))
    saver.finish()
    span, newest = time.monotonic() - began, 1
    before = torn = after = 0
    for number in range(2, kills + 2):

        def save(number: int = number) -> None:
            saver = saver_of(how, root)
            saver.save(number, state(number, ballast))
            saver.finish()

        pid = forked(save)
        time.sleep(draw.uniform(0, 2 * span))
        os.kill(pid, signal.SIGKILL)
        finished = status_of(pid) == 0
        torn += any(".tmp-" in path.name for path in root.iterdir())
        if draw.random() < 0.5:
            prepare_directory(root)
        found = loaded(root, ballast)
        assert found == number or (found == newest and not finished)
        before, after = before + (found == newest), after + (found == number)
        span *= 1.1 if found == newest else 0.9  # as fast as the machine is just now: as many before as after
        newest = found
    return before, torn, after


@pytest.mark.parametrize("how", HOWS)
def test_a_kill_at_a_random_moment(tmp_path: Path, how: str) -> None:
    before, _, after = run_distributed(at_random, 1, str(tmp_path), how, 7, 1, timeout=60)[0]
    assert before + after == 7


@pytest.mark.full
@pytest.mark.parametrize("how", HOWS)
def test_two_hundred_kills_at_random_moments(tmp_path: Path, how: str) -> None:
    before, torn, after = run_distributed(at_random, 1, str(tmp_path), how, 200, 2, timeout=110)[0]
    assert before + after == 200 and min(before, after) >= 40 and torn >= 10, (before, torn, after)
