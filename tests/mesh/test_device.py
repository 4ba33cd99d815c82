"""The device seam on a CPU, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch

from megackpt.config.errors import UsageError
from megackpt.mesh.device import DeviceSeam, mark
from tests.pool import ROOT


def test_cpu_seam() -> None:
    seam = DeviceSeam.create("cpu")
    assert (seam.kind, seam.device, seam.backend) == ("cpu", torch.device("cpu"), "gloo")
    seam.synchronize()
    batch = torch.arange(3)
    assert seam.bring(batch) is batch
    assert seam.name == ""
    states = seam.random_states()
    drawn = torch.rand(2)
    seam.set_random_states(states | {"cuda": torch.empty(0)})  # of a run on a GPU
    assert list(states) == ["cpu"] and torch.equal(torch.rand(2), drawn)
    seam.reset_peak()
    assert seam.peak_bytes() is seam.allocated_bytes() is seam.total_bytes() is None
    assert seam.current_stream() is seam.side_stream() is None
    with seam.on_stream(None):
        pass
    assert torch.equal(torch.rand(3, generator=seam.generator(5)), torch.rand(3, generator=seam.generator(5)))


def test_events_measure_time() -> None:
    seam = DeviceSeam.create("cpu")
    start, end = seam.event(), seam.event()
    start.record()
    time.sleep(0.02)
    end.record()
    end.synchronize()
    assert end.reached() and mark(seam.device).reached()
    assert 20 <= end.milliseconds_since(start) < 2000


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="nccl needs CUDA devices"):
        DeviceSeam.create("cpu", backend="nccl")
    with pytest.raises(UsageError, match="--device tpu: choose cpu or cuda"):
        DeviceSeam.create("tpu")
    with pytest.raises(UsageError, match="choose gloo or nccl"):
        DeviceSeam.create("cpu", backend="mpi")
    count = torch.cuda.device_count()
    with pytest.raises(UsageError, match=f"which has {count} CUDA devices; start at most {count} processes"):
        DeviceSeam.create("cuda", local_rank=count)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # Slurm may give each task a device of its own
    with pytest.raises(UsageError, match=r"number 3 .* at most 1 processes per machine, or let each see all of its"):
        DeviceSeam.create("cuda", local_rank=3)


@pytest.mark.gpu
def test_cuda_seam() -> None:
    seam = DeviceSeam.create("cuda", 0)
    assert (seam.device, seam.backend) == (torch.device("cuda", 0), "nccl")
    seam.reset_peak()
    before = seam.peak_bytes()
    block = torch.empty(1 << 20, dtype=torch.uint8, device=seam.device)
    assert seam.peak_bytes() == before + block.numel()
    start, end = seam.event(), seam.event()
    start.record()
    end.record()
    end.synchronize()
    assert end.milliseconds_since(start) >= 0
    there = mark(seam.device)
    seam.synchronize()
    assert there.reached()
    brought = seam.bring(torch.arange(3))
    assert brought.device == seam.device and brought.tolist() == [0, 1, 2]


@pytest.fixture
def torch_as_before() -> Iterator[None]:
    cuda, threads = torch.backends.cuda, torch.get_num_threads()
    before = cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.set_num_threads(threads)
    cuda.enable_mem_efficient_sdp(before[0])
    cuda.enable_cudnn_sdp(before[1])


def test_deterministic_cpu(torch_as_before: None) -> None:
    torch.set_num_threads(2)
    environment: dict[str, str] = {"NCCL_ALGO": "NVLS"}  # is nothing to a CPU
    DeviceSeam.create("cpu").make_deterministic(environment)
    assert torch.are_deterministic_algorithms_enabled() and torch.get_num_threads() == 1
    assert environment == {"NCCL_ALGO": "NVLS"}


def test_deterministic_cuda_sets_what_must_be_set_and_refuses_the_rest(torch_as_before: None) -> None:
    """What is set needs no device."""
    seam = DeviceSeam("cuda", torch.device("cuda", 0), "nccl")
    environment = {"NCCL_ALGO": "Tree"}
    seam.make_deterministic(environment)
    assert environment == {"NCCL_ALGO": "Tree", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert torch.are_deterministic_algorithms_enabled()
    cuda = torch.backends.cuda
    assert not cuda.mem_efficient_sdp_enabled() and not cuda.cudnn_sdp_enabled() and cuda.flash_sdp_enabled()
    with pytest.raises(UsageError, match="--deterministic-mode contradicts NCCL_ALGO=NVLS in the environment"):
        seam.make_deterministic({"NCCL_ALGO": "NVLS"})
    with pytest.raises(UsageError, match="CUBLAS_WORKSPACE_CONFIG=:0:0 .* choose :4096:8 or :16:8"):
        seam.make_deterministic({"CUBLAS_WORKSPACE_CONFIG": ":0:0"})


FAULTS = """
import resource, sys, torch
from megackpt.mesh.device import keep_freed_memory
kept = keep_freed_memory() if sys.argv[1] == "keep" else True
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def round_():
    large = [torch.ones(size << 18) for size in (3, 20, 50)]  # MiB
    return large
for _ in range(12):
    round_()  # the heap finds its size
before = faults()
for _ in range(5):
    round_()
print(kept, faults() - before)
"""


def test_freed_memory_is_used_again_with_fewer_page_faults() -> None:
    found = {}
    for how in ("keep", "leave"):
        command = [sys.executable, "-c", FAULTS, how]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
        kept, faults = done.stdout.split()
        found[how] = int(faults)
        if kept == "False":
            pytest.skip("the C library is not glibc")
    # 50 of the 73 MiB, 12,800 pages, five times over; the smaller ones glibc learns to keep by itself.
    assert found["keep"] < 6_000 and found["leave"] > 60_000, found
