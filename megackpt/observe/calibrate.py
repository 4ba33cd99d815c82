"""Measure this machine for the planner: products, memory, copies, collectives, shared cores.

Every figure is measured as a training rank meets it: one thread per rank on a CPU, ranks as processes of their own,
kernels as torch calls them.  What comes out is a `plan.accelerators.Machine` whose sources say how each was measured.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megackpt.observe.calibrate_ranks import Together, measure_together
from megackpt.plan.accelerators import MIB, Machine
from megackpt.plan.paces import Company, Overheads

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
CPU_SHAPES = ((96, 96, 288), (128, 256, 768), (256, 1024, 256), (512, 512, 512), (1024, 1024, 1024))
GPU_SHAPES = ((2048, 2048, 6144), (4096, 4096, 4096), (4096, 8192, 4096), (8192, 8192, 8192))
PRODUCT_S = 0.25  # of each shape and format
CORE_SHAPE = (2, 8, 256, 64)  # micro-batch, heads, sequence, head size
LINE_BYTES = 64 * MIB  # larger than the caches of a core
ACTIVATION_BYTES = MIB // 2


@dataclass(frozen=True)
class Figure:
    """One measured figure, as a person reads it, and how it was found."""

    name: str
    value: str
    how: str


Tell = Callable[[Figure], None]


def calibrate(device: str, nproc: int, tell: Tell) -> Machine:
    """The machine of `device` (cpu or cuda) as `nproc` ranks see it; `tell` hears of every figure when it is known."""
    probe = Probe(torch.device(device))
    with _one_thread():
        peaks, fraction, shapes = _products(probe, tell)
        core = min(1.0, _core_rate(probe) / (peaks["fp32"] * fraction))
        tell(Figure("attention core", f"{core:.0%} of that", shapes_of(CORE_SHAPE) + ", causal, fp32"))
        line, streaming = _memory(probe, tell)
        host = _host_copy(probe, tell)
        operation = _operation(probe) if device == "cpu" else 0.0
        if operation:
            tell(Figure("one operation", f"{operation * 1e6:.1f} us", HOW["op_seconds"]))
    ranks = measure_together(device, nproc) if nproc > 1 else Together(line, 0.0, line, 0.0, 0.0, ())
    if nproc > 1:
        _tell_ranks(ranks, nproc, tell)
    memory = probe.memory_bytes()
    tell(Figure("memory", f"{memory / 2**30:.1f} GiB", HOW["memory_bytes"]))
    sources = HOW | {"peak_flops": f"fastest product of {shapes}, {PRODUCT_S:g} s each"}
    if nproc == 1:
        sources |= dict.fromkeys(("tp_bytes_per_s", "node_bytes_per_s", "latency_s"), ALONE)
    return Machine(
        name=f"calibrated {device}",
        memory_bytes=memory,
        peak_flops=peaks,
        hbm_bytes_per_s=line,
        tp_bytes_per_s=ranks.collective_bytes_per_s,
        node_bytes_per_s=ranks.message_bytes_per_s,
        host_bytes_per_s=host,
        cores=max(1, (os.cpu_count() or 1) // nproc),
        per_node=max(nproc, os.cpu_count() or 1) if device == "cpu" else torch.cuda.device_count(),
        gemm_fraction=fraction,
        hbm_fraction=streaming,
        core_fraction=core,
        latency_s=ranks.latency_s,
        op_seconds=operation,
        shared_rates=ranks.rates,
        overheads=Overheads(message_byte_s=ranks.message_byte_s),
        companies=(Company(nproc, 1.0, 0.0, ranks.message_latency_s, ranks.latency_s),) if nproc > 1 else (),
        sources={name: how for name, how in sources.items() if device == "cpu" or name not in _CPU_ONLY},
    )


HOW = {
    "memory_bytes": "as the driver reports it; on a CPU all of the host's, for all ranks together",
    "gemm_fraction": "median rate over the shapes as a share of the fastest",
    "core_fraction": "scaled_dot_product_attention, causal half counted, as a share of the median product",
    "hbm_bytes_per_s": f"copy of {LINE_BYTES // MIB} MiB, read and written",
    "hbm_fraction": f"layer norm and gelu over {ACTIVATION_BYTES // 1024} KiB, as a share of the copy",
    "host_bytes_per_s": f"copy of {LINE_BYTES // MIB} MiB between host and device, the slower direction",
    "tp_bytes_per_s": "all-reduce of 4 MiB less its latency, bus bandwidth",
    "node_bytes_per_s": "message of 4 MiB between two ranks of this host; measure another host apart",
    "latency_s": "all-reduce of 8 bytes, the lowest tenth",
    "op_seconds": "host time per dispatched operation of a small layer, forward and backward",
    "shared_rates": "products and gelu at once on 1, 2, ... ranks: share of the cores x slowdown in processor time",
    "kernels": "processor seconds of every kind of step of small models of ours, fitted over three sizes",
    "overheads": "small training steps less their layers; bytes of messages: swaps of 4 MiB",
    "companies": "exchanges of 8 bytes; on a CPU what steps of stages and shards take more than their parts",
    "cores": "cores of the host over the ranks",
}
ALONE = "not measured with one rank: the memory's, without latency"
_CPU_ONLY = ("op_seconds", "shared_rates", "kernels", "overheads")


def _tell_ranks(ranks: Together, nproc: int, tell: Tell) -> None:
    tell(Figure(f"collective of {nproc}", f"{ranks.collective_bytes_per_s / 1e9:.2f} GB/s", HOW["tp_bytes_per_s"]))
    tell(Figure("its latency", f"{ranks.latency_s * 1e6:.0f} us", HOW["latency_s"]))
    tell(Figure("message", f"{ranks.message_bytes_per_s / 1e9:.2f} GB/s", HOW["node_bytes_per_s"]))
    tell(Figure("its latency", f"{ranks.message_latency_s * 1e6:.0f} us", "message of 8 bytes, the lowest tenth"))
    rates = " ".join(f"{rate:.0%}" for rate in ranks.rates)
    tell(Figure("speed with 1, 2, ... ranks", rates, HOW["shared_rates"]))


def shapes_of(*shapes: Sequence[int]) -> str:
    """``96x96x288, 128x256x768``"""
    return ", ".join("x".join(map(str, shape)) for shape in shapes)


# -- this rank alone -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Probe:
    """A clock for work on one device."""

    device: torch.device

    def seconds(self, work: Callable[[], object], budget_s: float = 0.2) -> float:
        """The fastest of as many runs as fit into the budget, at least three; one run before does not count."""
        times = []
        end = None
        while end is None or time.perf_counter() < end or len(times) < 4:
            start = time.perf_counter()
            work()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            times.append(time.perf_counter() - start)
            end = end or time.perf_counter() + budget_s
        return min(times[1:])

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, device=self.device).to(dtype)

    def memory_bytes(self) -> int:
        if self.device.type == "cuda":
            return int(torch.cuda.get_device_properties(self.device).total_memory)
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextmanager
def _one_thread() -> Iterator[None]:
    """As a rank of a training run has it on a CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _products(probe: Probe, tell: Tell) -> tuple[dict[str, float], float, str]:
    """Peak by number format, the achievable share of it in fp32 (bf16 on a GPU), and the shapes in words."""
    shapes = CPU_SHAPES if probe.device.type == "cpu" else GPU_SHAPES
    peaks, fractions = {}, {}
    for name, dtype in FORMATS.items():
        rates = []
        for rows, inner, columns in shapes:
            a, b = probe.randn(rows, inner, dtype=dtype), probe.randn(inner, columns, dtype=dtype)
            rates.append(2 * rows * inner * columns / probe.seconds(partial(torch.mm, a, b), PRODUCT_S))
        peaks[name], fractions[name] = max(rates), statistics.median(rates) / max(rates)
        slowest, fastest = min(rates) / 1e9, max(rates) / 1e9
        tell(Figure(f"products, {name}", f"{slowest:,.0f} to {fastest:,.0f} GFLOP/s", shapes_of(*shapes)))
    usual = "fp32" if probe.device.type == "cpu" else "bf16"
    tell(Figure("achievable share", f"{fractions[usual]:.0%}", HOW["gemm_fraction"] + f", {usual}"))
    return peaks, fractions[usual], shapes_of(*shapes)


def _core_rate(probe: Probe) -> float:
    b, a, s, d = CORE_SHAPE
    q, k, v = (probe.randn(b, a, s, d) for _ in range(3))
    work = 2 * 2 * b * a * s * s * d / 2  # two products, the causal half
    return work / probe.seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))


def _memory(probe: Probe, tell: Tell) -> tuple[float, float]:
    source = probe.randn(LINE_BYTES // 4)
    target = torch.empty_like(source)
    copy = 2 * LINE_BYTES / probe.seconds(lambda: target.copy_(source))
    x = probe.randn(ACTIVATION_BYTES // 4 // 256, 256)

    def stream() -> None:  # both read and write it once
        F.gelu(F.layer_norm(x, (256,)), approximate="tanh")

    share = min(1.0, 4 * ACTIVATION_BYTES / probe.seconds(stream) / copy)
    tell(Figure("memory bandwidth", f"{copy / 1e9:.1f} GB/s", HOW["hbm_bytes_per_s"]))
    tell(Figure("streaming kernels", f"{share:.0%} of that", HOW["hbm_fraction"]))
    return copy, share


def _host_copy(probe: Probe, tell: Tell) -> float:
    on_gpu = probe.device.type == "cuda"
    host = torch.empty(LINE_BYTES // 4, pin_memory=on_gpu)
    there = torch.empty(LINE_BYTES // 4, device=probe.device)
    slower = max(probe.seconds(lambda: there.copy_(host)), probe.seconds(lambda: host.copy_(there)))
    tell(Figure("host copy", f"{LINE_BYTES / slower / 1e9:.1f} GB/s", HOW["host_bytes_per_s"]))
    return LINE_BYTES / slower


class _Count(TorchDispatchMode):
    """Operations that reach the dispatcher."""

    operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


def _operation(probe: Probe) -> float:
    """Seconds per operation where the numbers themselves cost nothing."""
    x = probe.randn(8, 16).requires_grad_()
    layer = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def run() -> None:
        y = x
        for _ in range(4):
            y = y + layer(y)
        y.sum().backward()

    with _Count() as count:
        run()
    return probe.seconds(run, 0.5) / count.operations
