"""What can only be measured by several ranks at once: collectives, messages, and how ranks share the host's cores.

The ranks are processes that this module starts itself and ends again; they meet through a file.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

BYTES = 4 << 20  # of a large message
SMALL = 200  # repetitions of the smallest one
ROUNDS = 5  # of the largest one
BETWEEN = 40  # exchanges with work between them
WORK_S = 0.001  # the work
BUSY_S = 0.4  # that ranks compute at once
CROWD = 2  # on a CPU, ranks at most for each that the run is measured with
TIMEOUT_S = 50
LEAVE_S = 5  # for a rank to leave by itself


@dataclass(frozen=True)
class Together:
    """As the ranks measured it."""

    collective_bytes_per_s: float  # bus bandwidth
    latency_s: float  # of a collective
    message_bytes_per_s: float
    message_latency_s: float
    message_byte_s: float  # of the processor of each end
    rates: tuple[float, ...]  # speed of each with 1, 2, ... ranks at work, relative to one alone


def measure_together(device: str, nproc: int) -> Together:
    """Start `nproc` ranks (two or more) on `device`, let them measure, end them.  RuntimeError if one fails."""
    started = nproc * (CROWD if device == "cpu" else 1)
    result: Together = run_ranks(_rank, started, (nproc, started, device))
    return result


def run_ranks(target: Callable[..., None], count: int, args: tuple[Any, ...], limit_s: float = TIMEOUT_S) -> Any:
    """Start `target(rank, *args, meet, answer)` in `count` processes, end them when one has sent its answer (`meet`: a
    file that does not exist yet, to meet through).  RuntimeError if one fails before, or none has after `limit_s`."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="megackpt-calibrate-") as folder:
        here, there = context.Pipe(duplex=False)
        meet = Path(folder, "meet")
        ranks = [context.Process(target=target, args=(r, *args, meet, there), daemon=True) for r in range(count)]
        for process in ranks:
            process.start()
        try:
            result = _result(here, ranks, limit_s)
            for process in ranks:
                process.join(LEAVE_S)
            return result
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _result(here: Connection, ranks: Sequence[multiprocessing.process.BaseProcess], limit_s: float) -> Any:
    end = time.monotonic() + limit_s
    while not here.poll(0.2):
        if time.monotonic() > end:
            raise RuntimeError(f"{len(ranks)} ranks did not measure within {limit_s:.0f} s")
        failed = [index for index, process in enumerate(ranks) if process.exitcode not in (None, 0)]
        if failed:
            raise RuntimeError(f"rank {failed[0]} of {len(ranks)} ended with code {ranks[failed[0]].exitcode}")
    return here.recv()


# -- in a rank -------------------------------------------------------------------------------------------------------


def _rank(rank: int, size: int, started: int, device: str, meet: Path, answer: Connection) -> None:
    """Ranks from `size` on only compute beside the others."""
    torch.set_num_threads(1)
    where = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(where)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{meet}", rank=rank, world_size=started,
        timeout=timedelta(seconds=TIMEOUT_S),
    )  # fmt: skip
    group = dist.new_group(list(range(size)))
    found = _exchanges(rank, size, group, where) if rank < size else None
    rates = _shared(rank, started, where) if device == "cpu" else ()
    if found is not None and rank == 0:
        answer.send(replace(found, rates=rates))
    dist.barrier()
    dist.destroy_process_group()


def _exchanges(rank: int, size: int, group: dist.ProcessGroup | None, where: torch.device) -> Together:
    tiny, large = torch.zeros(2, device=where), torch.zeros(BYTES // 4, device=where)
    latency = _seconds(lambda: dist.all_reduce(tiny, group=group), SMALL, where)
    whole = _seconds(lambda: dist.all_reduce(large, group=group), ROUNDS, where)
    message = _seconds(lambda: _ping(rank, large), ROUNDS, where) / 2
    small = _seconds(lambda: _ping(rank, tiny), SMALL, where) / 2
    host = where.type == "cpu"
    work = _Work(where)
    fixed, more = (work.between(_Swap(rank, t)) if host else 0.0 for t in (tiny, large))
    passed = 2 * BYTES * (size - 1) / size
    return Together(
        passed / max(whole - latency, whole / 2),  # on a busy host the small one may seem to take all of it
        latency,
        BYTES / max(message - small, message / 2),
        small,
        max(0.0, more - fixed) / 2 / BYTES,  # a swap sends one and receives one
        (),
    )


class _Work:
    """Products for WORK_S."""

    def __init__(self, where: torch.device) -> None:
        self.left, self.right = torch.randn(96, 96, device=where), torch.randn(96, 288, device=where)
        self.count = 1
        self.count = max(1, round(WORK_S / _seconds(self, SMALL, where)))

    def __call__(self) -> None:
        for _ in range(self.count):
            self.left @ self.right

    def between(self, swap: _Swap) -> float:
        """Processor seconds, of all threads of this rank, that a swap takes with work before and beside it."""
        seconds = []
        for _ in range(BETWEEN):
            start = time.process_time()
            self()
            alone = time.process_time()
            swap.post()
            self()
            swap()
            seconds.append((time.process_time() - alone) - (alone - start))
        return max(0.0, statistics.median(seconds))


def _seconds(work: Callable[[], object], count: int, where: torch.device) -> float:
    """The lowest tenth of so many runs: what somebody else does on the host meanwhile only ever adds."""
    times = []
    for _ in range(count + 3):
        start = time.perf_counter()
        work()
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        times.append(time.perf_counter() - start)
    return statistics.quantiles(times[3:], n=10, method="inclusive")[0]  # never below the fastest


def _ping(rank: int, tensor: torch.Tensor) -> None:
    """To the next rank and back; others look on."""
    if rank == 0:
        dist.send(tensor, 1)
        dist.recv(tensor, 1)
    elif rank == 1:
        dist.recv(tensor, 0)
        dist.send(tensor, 0)


class _Swap:
    """Rank 0 and 1 send and receive at once, the receive posted long before, as stages do; others look on."""

    def __init__(self, rank: int, tensor: torch.Tensor) -> None:
        self.peer = 1 - rank if rank < 2 else None
        self.tensor, self.received = tensor, torch.empty_like(tensor)
        self.coming: dist.Work | None = None

    def post(self) -> None:
        if self.peer is not None:
            self.coming = dist.irecv(self.received, self.peer)

    def __call__(self) -> None:
        if self.peer is None:
            return
        leaving = dist.isend(self.tensor, self.peer)
        for work in (self.coming, leaving):
            if work is not None:
                work.wait()


def _shared(rank: int, size: int, where: torch.device) -> tuple[float, ...]:
    """Speed of rank 0 while ranks 0 to k compute, for every k, relative to rank 0 alone: its share of the cores, times
    what its own processor time says of caches and memory that it shares.  So what others do meanwhile hardly counts.

    Each goes through weights that fill more than a core's own cache, as layers do."""
    x = torch.randn(128, 256, device=where)
    weights = [torch.randn(256, 256, device=where) for _ in range(12)]
    cores, passes = len(os.sched_getaffinity(0)), []
    for busy in range(1, size + 1):
        dist.barrier()
        seconds, end = [0.0], time.perf_counter() + BUSY_S
        while rank < busy and (time.perf_counter() < end or len(seconds) < 4):
            start = time.thread_time()
            for weight in weights:
                torch.nn.functional.gelu(x @ weight, approximate="tanh")
            seconds.append(time.thread_time() - start)
        passes.append(statistics.median(seconds[1:]) if rank < busy else 1.0)
    return tuple(min(1.0, cores / (k + 1)) * min(1.0, passes[0] / passes[k]) for k in range(size))
