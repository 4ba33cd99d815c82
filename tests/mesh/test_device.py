"""The device seam on a CPU, and what it refuses."""

from __future__ import annotations

import time

import pytest
import torch

from megackpt.config.errors import UsageError
from megackpt.mesh.device import DeviceSeam


def test_cpu_seam() -> None:
    seam = DeviceSeam.create("cpu")
    assert (seam.kind, seam.device, seam.backend) == ("cpu", torch.device("cpu"), "gloo")
    seam.synchronize()
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
    assert 20 <= end.milliseconds_since(start) < 2000


def test_refusals() -> None:
    with pytest.raises(UsageError, match="nccl needs CUDA devices"):
        DeviceSeam.create("cpu", backend="nccl")
    with pytest.raises(UsageError, match="--device tpu: choose cpu or cuda"):
        DeviceSeam.create("tpu")
    with pytest.raises(UsageError, match="choose gloo or nccl"):
        DeviceSeam.create("cpu", backend="mpi")
    count = torch.cuda.device_count()
    with pytest.raises(UsageError, match=f"which has {count} CUDA devices; start at most {count} processes"):
        DeviceSeam.create("cuda", local_rank=count)


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
