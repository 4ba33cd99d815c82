"""What can only be measured by several ranks at once: collectives, messages, and how ranks share the host's cores.

The ranks are processes that this module starts itself and ends again; they meet through a file.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

BYTES = 4 << 20  # of a large message
SMALL = 200  # repetitions of the smallest one
ROUNDS = 5  # of the largest one
BUSY_S = 0.4  # that ranks compute at once
TIMEOUT_S = 50
LEAVE_S = 5  # for a rank to leave by itself


@dataclass(frozen=True)
class Together:
    """As the ranks measured it."""

    collective_bytes_per_s: float  # bus bandwidth
    latency_s: float
    message_bytes_per_s: float
    rates: tuple[float, ...]  # speed of each with 1, 2, ... ranks at work, relative to one alone


def measure_together(device: str, nproc: int) -> Together:
    """Start `nproc` ranks (two or more) on `device`, let them measure, end them.  RuntimeError if one fails."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="megackpt-calibrate-") as folder:
        here, there = context.Pipe(duplex=False)
        ranks = [
            context.Process(target=_rank, args=(rank, nproc, device, str(Path(folder, "meet")), there), daemon=True)
            for rank in range(nproc)
        ]
        for process in ranks:
            process.start()
        try:
            result = _result(here, ranks)
            for process in ranks:
                process.join(LEAVE_S)
            return result
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _result(here: Connection, ranks: Sequence[multiprocessing.process.BaseProcess]) -> Together:
    end = time.monotonic() + TIMEOUT_S
    while not here.poll(0.2):
        if time.monotonic() > end:
            raise RuntimeError(f"{len(ranks)} ranks did not measure within {TIMEOUT_S} s")
        failed = [index for index, process in enumerate(ranks) if process.exitcode not in (None, 0)]
        if failed:
            raise RuntimeError(f"rank {failed[0]} of {len(ranks)} ended with code {ranks[failed[0]].exitcode}")
    result: Together = here.recv()
    return result


# -- in a rank -------------------------------------------------------------------------------------------------------


def _rank(rank: int, size: int, device: str, meet: str, answer: Connection) -> None:
    torch.set_num_threads(1)
    where = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(where)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{meet}", rank=rank, world_size=size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )  # fmt: skip
    tiny, large = torch.zeros(2, device=where), torch.zeros(BYTES // 4, device=where)
    latency = _seconds(lambda: dist.all_reduce(tiny), SMALL, where)
    whole = _seconds(lambda: dist.all_reduce(large), ROUNDS, where)
    message = _seconds(lambda: _ping(rank, large), ROUNDS, where) / 2
    small = _seconds(lambda: _ping(rank, tiny), SMALL, where) / 2
    rates = _shared(rank, size, where)
    if rank == 0:
        passed = 2 * BYTES * (size - 1) / size
        answer.send(
            Together(
                passed / max(whole - latency, whole / 2),  # on a busy host the small one may seem to take all of it
                max(latency, small),
                BYTES / max(message - small, message / 2),
                rates,
            )
        )
    dist.barrier()
    dist.destroy_process_group()


def _seconds(work: Callable[[], object], count: int, where: torch.device) -> float:
    """The lower quartile of so many runs: what somebody else does on the host meanwhile only ever adds."""
    times = []
    for _ in range(count + 3):
        start = time.perf_counter()
        work()
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        times.append(time.perf_counter() - start)
    return statistics.quantiles(times[3:], n=4)[0]


def _ping(rank: int, tensor: torch.Tensor) -> None:
    """To the next rank and back; others look on."""
    if rank == 0:
        dist.send(tensor, 1)
        dist.recv(tensor, 1)
    elif rank == 1:
        dist.recv(tensor, 0)
        dist.send(tensor, 0)


def _shared(rank: int, size: int, where: torch.device) -> tuple[float, ...]:
    """Speed of rank 0 while ranks 0 to k compute, for every k, relative to rank 0 alone."""
    a, b = torch.randn(256, 256, device=where), torch.randn(256, 256, device=where)
    line = torch.randn(1 << 18, device=where)
    counts = []
    for busy in range(1, size + 1):
        dist.barrier()
        done, end = 0, time.perf_counter() + BUSY_S
        while rank < busy and time.perf_counter() < end:
            a @ b
            line + 1.0
            if where.type == "cuda":
                torch.cuda.synchronize(where)
            done += 1
        counts.append(done)
    return tuple(min(1.0, count / counts[0]) for count in counts) if rank == 0 else ()
