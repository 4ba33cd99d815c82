"""The rate of a plain matrix product on this machine: the yardstick where no data sheet gives a peak."""

from __future__ import annotations

import time

import torch


def measured_gemm_tflops(
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    size: int = 1024,
    budget_s: float = 0.3,
) -> float:
    """Best TFLOP/s of an out-of-place [size, size] x [size, size] product seen within `budget_s` seconds.

    On a CPU it uses torch's current number of threads. It is what the library reaches, not what the silicon
    could: a share of it is not an MFU and must be labelled "of the measured GEMM rate". Costs three
    products at least.
    """
    on_cuda = torch.device(device).type == "cuda"
    left = torch.randn(size, size, device=device, dtype=dtype)
    right = torch.randn(size, size, device=device, dtype=dtype)
    out = torch.empty(size, size, device=device, dtype=dtype)

    def once() -> float:
        begin = time.perf_counter()
        torch.mm(left, right, out=out)
        if on_cuda:
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    once()  # warm-up: thread pool, library handles, page faults
    best, end = once(), time.perf_counter() + budget_s
    while time.perf_counter() < end:
        best = min(best, once())
    return 2 * size**3 / best / 1e12
