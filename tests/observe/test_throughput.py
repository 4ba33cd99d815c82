"""Rates, peaks and time left."""

from __future__ import annotations

import math
import mmap
from pathlib import Path

import pytest
import torch

from megackpt.config.observe import LoggingConfig
from megackpt.mesh.device import DeviceSeam
from megackpt.observe.gemm_rate import measured_gemm_tflops
from megackpt.observe.host_memory import host_memory
from megackpt.observe.memory_tracker import ActivationPeak
from megackpt.observe.progress import Progress, format_duration
from megackpt.observe.throughput import DEVICE_PEAKS, peak_tflops, throughput
from megackpt.plan.flops import ModelShape, hardware_flops, model_flops


@pytest.mark.parametrize(
    ("name", "dense"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("A100-PCIE-40GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("cpu", None),
    ],
)
def test_peaks_are_dense(name: str, dense: float | None) -> None:
    assert peak_tflops(name) == dense
    assert peak_tflops(name, "fp16") == dense


def test_every_peak_has_a_source_and_fp32_is_not_tf32() -> None:
    for peak in DEVICE_PEAKS:
        assert peak.source.startswith("NVIDIA ") and peak.bf16 > 6 * peak.fp32
    assert peak_tflops("NVIDIA A100-SXM4-80GB", "fp32") == 19.5
    with pytest.raises(ValueError, match="'int8'"):
        peak_tflops("NVIDIA A100-SXM4-80GB", "int8")


def test_full_recompute_raises_hfu_only() -> None:
    shape = ModelShape.gpt(layers=96, hidden=12288, heads=96, padded_vocab=51200, seq=2048)
    model = model_flops(shape, 64)
    replayed = hardware_flops(shape, 64, [("qkv", "core", "up")] * 96)
    tokens = 64 * 2048 - 100  # padding carries no loss
    plain = throughput(tokens, 13.75, 64, model, None, 312.0)
    full = throughput(tokens, 13.75, 64, model, replayed, 312.0)
    assert plain.mfu == full.mfu == plain.hfu
    assert 100 * plain.mfu == pytest.approx(51.39, abs=0.005)
    assert full.hfu / full.mfu == pytest.approx(1 + full.replay_overhead)
    assert full.replay_overhead == pytest.approx((replayed - model) / model)
    assert plain.replay_overhead == 0
    assert full.tokens_per_s == tokens / 13.75
    assert full.tflops_per_device == pytest.approx(0.5139 * 312, rel=1e-3)


def test_without_a_peak_there_is_no_mfu() -> None:
    got = throughput(10, 1.0, 1, 1e12)
    assert (got.mfu, got.hfu, got.tflops_per_device) == (None, None, 1.0)
    for bad in ({"seconds": 0.0}, {"devices": 0}, {"peak_tflops_per_device": 0.0}):
        with pytest.raises(ValueError, match="positive"):
            throughput(**{"loss_tokens": 1, "seconds": 1.0, "devices": 1, "model_flops": 1.0, **bad})
    assert LoggingConfig().peak_tflops is None


def test_gemm_rate_is_a_plausible_rate_of_this_machine() -> None:
    rate = measured_gemm_tflops(size=256, budget_s=0.05)
    assert 1e-3 < rate < 10  # a CPU core: between 1 GFLOP/s and 10 TFLOP/s


def test_time_left_counts_what_lies_between_iterations() -> None:
    now = [100.0]
    progress = Progress(total=10, done=2, clock=lambda: now[0])
    assert progress.left() is None
    now[0] += 50  # the slow first iteration of the process
    progress.mark(3)
    assert progress.left() == 7 * 50
    for iteration in range(4, 7):
        now[0] += 2
        progress.mark(iteration)
    assert progress.left() == pytest.approx(4 * 2)  # the first is forgotten
    now[0] += 10  # an evaluation and a save
    progress.mark(7)
    assert progress.left() == pytest.approx(3 * 16 / 4)
    progress.mark(10)
    assert progress.left() == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00:00"), (82.6, "0:01:23"), (3599.7, "1:00:00"), (90061, "1d 01:01:01"), (math.inf, "?")],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_host_memory_follows_an_allocation() -> None:
    before = host_memory()
    held = mmap.mmap(-1, 32 * 2**20)  # not from the heap, which may have freed pages to give
    held.write(b"1" * len(held))
    after = host_memory()
    assert after.allocated - before.allocated > 24 * 2**20
    assert after.max_allocated >= after.allocated
    held.close()


@pytest.mark.gpu
def test_activation_peak_on_a_gpu_is_the_allocators() -> None:
    before = torch.ones(2**20, device="cuda")
    with ActivationPeak(DeviceSeam.create("cuda")) as measured:
        inside = before * 2
        del inside
    assert measured.bytes == 4 * 2**20
