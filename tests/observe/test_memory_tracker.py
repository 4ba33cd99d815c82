"""Live and peak bytes, exactly: by hand and against the profiler's record of the CPU allocator."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from megackpt.observe.memory_tracker import ActivationPeak, MemoryTracker

N = 1000  # fp32 elements, 4000 bytes


def test_new_views_in_place_and_freed() -> None:
    x = torch.randn(N)
    with MemoryTracker() as tracker:
        x.add_(1)
        view = x.view(10, 100).t()
        assert tracker.live_bytes == 0  # existed before, or a view of it
        y = x * 2
        assert tracker.live_bytes == 4 * N
        part = y[:10]
        y.mul_(3)
        assert tracker.live_bytes == 4 * N
        z = y.double()
        assert (tracker.live_bytes, tracker.peak_bytes) == (12 * N, 12 * N)
        del y
        assert tracker.live_bytes == 12 * N  # `part` holds the storage
        del part
        assert tracker.live_bytes == 8 * N
        z = z + 1  # both alive for a moment
        assert (tracker.live_bytes, tracker.peak_bytes) == (8 * N, 16 * N)
        tracker.reset_peak()
        assert tracker.peak_bytes == 8 * N
    del z, view
    assert tracker.live_bytes == 0  # frees are followed after the region
    assert tracker.allocated_bytes == 4 * N + 8 * N + 8 * N


def test_addresses_are_reused_and_not_confused() -> None:
    with MemoryTracker() as tracker:
        for _ in range(50):
            a = torch.empty(N)
            del a
        assert (tracker.live_bytes, tracker.peak_bytes, tracker.allocated_bytes) == (0, 4 * N, 50 * 4 * N)


def test_made_from_python_numpy_and_resized() -> None:
    array = np.zeros(N, dtype=np.float32)
    with MemoryTracker() as tracker:
        made = torch.tensor([1.0] * 10)
        assert tracker.live_bytes == 40
        wrapped = torch.from_numpy(array)
        assert tracker.live_bytes == 40  # the array's memory, not ours
        grown = torch.empty(10)
        grown.resize_(100)
        assert tracker.live_bytes == 40 + 400
        many = torch.ones(30).split(10)  # several outputs, one storage
        assert tracker.live_bytes == 40 + 400 + 120
        values, indices = torch.sort(many[0])
        assert tracker.live_bytes == 40 + 400 + 120 + 40 + 80
        del made, wrapped, grown, many, values, indices
        assert tracker.live_bytes == 0


def test_saved_for_backward_and_freed_by_it() -> None:
    x = torch.randn(N, requires_grad=True)
    tracker = MemoryTracker()
    with tracker:
        y = x.exp()  # saves its result
        z = y.sin()  # saves y
        del y
        assert tracker.live_bytes == 8 * N
        loss = z.sum()
        del z
        assert tracker.live_bytes == 4 * N + 4  # y and the loss
        loss.backward()
        assert tracker.live_bytes == 4 * N + 4  # x.grad and the loss
        del loss
    assert tracker.live_bytes == x.grad.nbytes
    x.grad = None
    assert tracker.live_bytes == 0


def test_a_region_of_several_pieces() -> None:
    """Entered for the backward only: what the forward saved is not counted, what backward makes is."""
    x = torch.randn(N, requires_grad=True)
    loss = x.exp().sin().sum()
    tracker = MemoryTracker()
    with tracker:
        kept = torch.empty(N)
    with tracker:
        loss.backward()
    assert tracker.live_bytes == 8 * N  # kept and x.grad
    del kept
    assert tracker.live_bytes == 4 * N


def test_nothing_is_held() -> None:
    tracker = MemoryTracker()
    with tracker:
        a = torch.empty(N)
        a = [a, a]
        a.append(a)  # a cycle: dies in a collection only
        del a
        assert tracker.live_bytes == 4 * N
    gc.collect()
    assert tracker.live_bytes == 0


def _parameters() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(64, 96), (320, 96), (96, 320)]
    return [torch.randn(s, generator=generator).requires_grad_() for s in shapes]


# Without kernels that use scratch memory (dropout and a transposed softmax do), so that all three sums can be equal.
def _step(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
    h = F.layer_norm(x, (96,))
    y = x + F.linear(F.gelu(F.linear(h, up)), down)
    p = torch.softmax(y.view(8, 8, 96), -1)
    (p * p).sum().backward()


def _allocator_record(run: profile) -> tuple[int, int, int]:
    """Live at the end, peak, and sum of allocations, from the profiler's allocation events in order."""
    live = peak = total = 0
    for event in run.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
            total += max(0, event.nbytes())
    return live, peak, total


def test_equals_the_profiler() -> None:
    first = _parameters()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched, MemoryTracker() as tracker:
        _step(*first)
    assert (tracker.live_bytes, tracker.peak_bytes, tracker.allocated_bytes) == _allocator_record(watched)
    assert tracker.live_bytes == sum(p.grad.nbytes for p in first)
    # And watching did not change the peak of this step.
    second = _parameters()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as plain:
        _step(*second)
    assert _allocator_record(plain)[:2] == (tracker.live_bytes, tracker.peak_bytes)


def test_watching_changes_no_value() -> None:
    grads = []
    for watch in (False, True):
        parameters = _parameters()
        if watch:
            with MemoryTracker():
                _step(*parameters)
        else:
            _step(*parameters)
        grads.append([p.grad for p in parameters])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


class _Allocator:
    """A device that counts: 100 bytes before, a peak of 350 inside."""

    def __init__(self) -> None:
        self.peak: int | None = 9999

    def reset_peak(self) -> None:
        self.peak = 100

    def peak_bytes(self) -> int | None:
        return self.peak


class _NoCounter:
    def reset_peak(self) -> None:
        pass

    def peak_bytes(self) -> int | None:
        return None


def test_activation_peak_by_allocator_or_tracker() -> None:
    device = _Allocator()
    with ActivationPeak(device) as measured:
        device.peak = 350
    assert measured.bytes == 250
    with ActivationPeak(_NoCounter()) as measured:
        torch.empty(N)
    assert measured.bytes == 4 * N
    with pytest.raises(RuntimeError, match="inside"), ActivationPeak(_NoCounter()) as measured:
        torch.empty(N)
        raise RuntimeError("inside")
    assert measured.bytes == 4 * N
    with MemoryTracker() as outer:
        torch.empty(N)
    assert outer.peak_bytes == 4 * N  # the failed region left no mode behind
