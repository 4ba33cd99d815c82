"""The board: one table, from the first rank that fails, with the last words of every rank."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megackpt.mesh.board import BEAT_S, Board
from tests.pool import run_distributed


def _fail(rank: int, world_size: int, order: list[int]) -> tuple[str, float]:
    """Rank 1 falls silent; the ranks of `order` fail one after the other. What each of them printed, and its time."""
    said = io.StringIO()
    start = time.monotonic()
    with contextlib.redirect_stderr(said), Board(rank, world_size) as board:
        place = f"rank {rank} of {world_size} (stage {rank})"
        board.says(place, lambda: f"iteration {40 + rank}, compute for F{rank}.0")
        time.sleep(3 * BEAT_S)
        dist.barrier()
        if rank == 1:
            board._stop = True  # its thread ends: nothing is written any more
        for turn in order:
            dist.barrier()
            if rank == turn:
                board.failed(f"rank {rank} cannot go on", f"it failed by itself ({rank})")
        dist.barrier()
    return said.getvalue(), time.monotonic() - start


def test_the_first_rank_that_fails_prints_what_every_rank_did() -> None:
    found = run_distributed(_fail, 3, [2, 0])
    assert found[2][0].splitlines() == [
        "megackpt: error: rank 2 cannot go on",
        "megackpt: where every rank was:",
        "  rank 0 of 3 (stage 0): iteration 40, compute for F0.0",
        "  rank 1 of 3 (stage 1): no sign of life; at most 0.2 s before the last one it was in iteration 41,"
        " compute for F1.0",
        "  rank 2 of 3 (stage 2): it failed by itself (2); iteration 42, compute for F2.0",
    ]
    assert found[0][0] == "megackpt: error: rank 0 cannot go on\n"
    assert found[1][0] == ""
    assert max(seconds for _, seconds in found) < 20


def _fail_twice(rank: int, world_size: int) -> str:
    """Rank 0's main thread finds that a message does not come while its board is told to end."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), Board(rank, world_size) as board:
        if rank == 0:
            both = threading.Barrier(2)

            def fail(how: str) -> None:
                both.wait()
                board.failed(how, how)

            threads = [threading.Thread(target=fail, args=(how,)) for how in ("no message", "ended")]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        dist.barrier()
    return said.getvalue()


def test_two_threads_of_a_rank_print_one_table() -> None:
    mine, other = run_distributed(_fail_twice, 2)
    assert other == "" and mine.count("megackpt: error: ") == 2
    assert mine.count("megackpt: where every rank was:") == mine.count("  rank 0: ") == mine.count("  rank 1: ") == 1


def _finish(rank: int, world_size: int) -> tuple[str, int]:
    before = len(os.listdir("/proc/self/fd"))
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        for _ in range(5):
            with Board(rank, world_size):
                pass
    return said.getvalue(), len(os.listdir("/proc/self/fd")) - before


def test_a_good_end_says_nothing_and_leaves_nothing_open() -> None:
    for said, left in run_distributed(_finish, 2):
        assert said == "" and left <= 5  # one connection each, which goes with its object


def _busy(rank: int, world_size: int) -> str:
    def doing() -> str:
        raise RuntimeError("deque mutated during iteration")

    said = io.StringIO()
    with contextlib.redirect_stderr(said), Board(rank, world_size) as board:
        board.says("rank 0", doing)
        board.failed("no", "it failed")
    return said.getvalue()


def test_words_that_fail_do_not_fail_the_board() -> None:
    found: list[Any] = run_distributed(_busy, 2)
    assert any("rank 0: it failed; busy (RuntimeError)" in said for said in found)


WAITING = """
import time
from megackpt.mesh.board import Board
with Board(0, 1) as board:
    board.says("rank 0 of 1", lambda: "iteration 7")
    print("up", flush=True)
    time.sleep(60)
"""


def test_a_signal_ends_the_process_and_it_says_where_it_was() -> None:
    root = str(Path(__file__).resolve().parents[2])
    signals = (signal.SIGTERM, signal.SIGINT)
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    options["env"] = {**os.environ, "PYTHONPATH": root}
    runs = [subprocess.Popen([sys.executable, "-c", WAITING], **options) for _ in signals]
    for run, number in zip(runs, signals, strict=True):
        assert run.stdout is not None and run.stdout.readline() == "up\n"
        run.send_signal(number)
    for run, number in zip(runs, signals, strict=True):
        _, said = run.communicate(timeout=30)
        assert run.returncode == 128 + number
        assert said == f"megackpt: error: rank 0 of 1 ended by {number.name} in iteration 7\n"
