"""What benchmarks share: paired runs, their statistics, an independent count of kept bytes, tables, JSON.

A machine that others use too is noisy for minutes at a time. So two things are compared by running them in turns,
A B, B A, A B, ..., and by the median of the ratios within each pair: what slows one of a pair down mostly slows both.
"""

from __future__ import annotations

import datetime
import gc
import json
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from megackpt.mesh.rendezvous import shutdown
from megackpt.observe.memory_tracker import MemoryTracker


@dataclass
class Runs:
    """Seconds of each run of one thing, by the wall and of this process's processors."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def time(self, work: Callable[[], object]) -> None:
        gc.collect()  # here rather than somewhere inside
        cpu, wall = time.process_time(), time.perf_counter()
        work()
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)


def in_turns(works: Sequence[Callable[[], object]], rounds: int, warm_up: int = 1) -> list[Runs]:
    """Run all `works` once per round, each second round backwards, after `warm_up` rounds that do not count."""
    for _ in range(warm_up):
        for work in works:
            work()
    runs = [Runs() for _ in works]
    for number in range(rounds):
        turn = range(len(works)) if number % 2 == 0 else reversed(range(len(works)))
        for place in turn:
            runs[place].time(works[place])
    return runs


def median_ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """Median over pairs of a / b."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


# -- bytes -----------------------------------------------------------------------------------------------------------


@contextmanager
def saved_tensors() -> Iterator[dict[int, int]]:
    """Bytes by storage of what autograd saves within, parameters and their views excluded.  Blind for what a function
    keeps by other means."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        base = tensor if tensor._base is None else tensor._base
        if not isinstance(base, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes


def alive_after(forward: Callable[[], object]) -> int:
    """Bytes allocated during `forward` and alive at its end, whoever holds them: a count that knows nothing of
    autograd or of any recompute.  `forward` returns what must be held, and what it returns is counted too."""
    gc.collect()
    with MemoryTracker() as tracker:
        held = forward()
    alive = tracker.live_bytes
    del held
    return alive


# -- processes -------------------------------------------------------------------------------------------------------


def on_ranks(processes: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """``work(*arguments)`` in so many processes of one thread, whose default group is gloo's; what they returned, by
    rank, after a way through JSON.  ``work`` and its arguments must be picklable."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_process, args=(folder, processes, work, arguments), nprocs=processes)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(processes)]


def _process(rank: int, folder: str, processes: int, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{folder}/store", processes)
    limit = datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes, timeout=limit)
    try:
        Path(folder, f"{rank}.json").write_text(json.dumps(work(*arguments)))
        dist.barrier()
    finally:
        shutdown()


# -- reports ---------------------------------------------------------------------------------------------------------


def machine() -> dict[str, object]:
    """What the figures depend on, without names."""
    return {
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__.split("+")[0],
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, readable as text and as Markdown."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        aligned = [cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]
        return f"| {' | '.join(aligned)} |"

    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (w + 1) + ":" for w in widths[1:])]) + "|"
    return "\n".join([line(header), rule, *(line(row) for row in rows)])


def write_json(path: str | Path, data: dict[str, Any]) -> None:
    """One document with the settings, the machine and every single run."""
    Path(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
