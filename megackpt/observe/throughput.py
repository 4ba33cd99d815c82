"""Tokens per second, TFLOP/s per device, MFU and HFU.

MFU counts model FLOPs only (what the step needs), HFU adds replayed ones; both are fractions of the *dense*
peak of the data type that the products run in. Data sheets print the sparse figure larger and twice as high;
dividing by it halves every result, so the table holds dense figures with their source and anything else is
said by `--peak-tflops`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class DevicePeak:
    """Dense peak TFLOP/s of one device by data type of the products."""

    pattern: str
    """Regular expression searched in the device name that the driver reports."""
    bf16: float
    fp32: float
    """Without TF32, which torch leaves off for products by default."""
    fp64: float
    """On tensor cores."""
    source: str


# First match wins, so the rarer forms of a chip stand before the common one.
DEVICE_PEAKS = (
    DevicePeak(r"\bA100\b", 312.0, 19.5, 19.5, "NVIDIA A100 Tensor Core GPU datasheet, without sparsity"),
    DevicePeak(
        r"\bH100 PCIe\b", 756.5, 51.0, 51.0,
        "NVIDIA H100 Tensor Core GPU datasheet 2022, PCIe column (1,513 with sparsity, halved)",
    ),
    DevicePeak(
        r"\bH100 NVL\b", 835.5, 60.0, 60.0,
        "NVIDIA H100 Tensor Core GPU datasheet 2024, NVL column (1,671 with sparsity, halved)",
    ),
    DevicePeak(
        r"\bH100\b", 989.4, 67.0, 67.0,
        "NVIDIA H100 Tensor Core GPU Architecture whitepaper, H100 SXM5, dense (1,978.9 with sparsity)",
    ),
    DevicePeak(
        r"\bH200 NVL\b", 835.5, 60.0, 60.0,
        "NVIDIA H200 Tensor Core GPU datasheet, NVL column (1,671 with sparsity, halved)",
    ),
    DevicePeak(
        r"\bH200\b", 989.4, 67.0, 67.0,
        "NVIDIA H200 Tensor Core GPU datasheet, SXM column (1,979 with sparsity, halved): the H100's chip",
    ),
    DevicePeak(
        r"\bGB200\b", 2500.0, 80.0, 40.0,
        "NVIDIA Blackwell Architecture technical brief, GB200 Superchip halved to one GPU, dense",
    ),
    DevicePeak(
        r"\bB200\b", 2250.0, 75.0, 37.0,
        "NVIDIA Blackwell datasheet, HGX B200 per GPU (4,500 with sparsity, halved)",
    ),
)  # fmt: skip


def peak_tflops(device_name: str, dtype: str = "bf16") -> float | None:
    """Dense peak TFLOP/s of a device by its driver's name, or None when it is not in the table.

    `dtype` is the parameters' type: bf16, fp16, fp32 or fp64. A slice of a device (MIG) is unknown: its
    peak is not the device's. Raises ValueError on another `dtype`.
    """
    column = {"bf16": "bf16", "fp16": "bf16", "fp32": "fp32", "fp64": "fp64"}.get(dtype)
    if column is None:
        raise ValueError(f"no peak for data type {dtype!r}; expected bf16, fp16, fp32 or fp64")
    if re.search(r"\bMIG\b", device_name):
        return None
    for peak in DEVICE_PEAKS:
        if re.search(peak.pattern, device_name, re.IGNORECASE):
            return float(getattr(peak, column))
    return None


@dataclass(frozen=True)
class Throughput:
    """Rates of one iteration."""

    tokens_per_s: float
    """Over all devices, masked tokens excluded."""
    tflops_per_device: float
    """Model FLOPs."""
    hardware_tflops_per_device: float
    mfu: float | None
    hfu: float | None
    replay_overhead: float
    """Replayed over model FLOPs."""


def throughput(
    loss_tokens: int,
    seconds: float,
    devices: int,
    model_flops: float,
    hardware_flops: float | None = None,
    peak_tflops_per_device: float | None = None,
) -> Throughput:
    """Rates of an iteration of `seconds` on `devices`.

    `loss_tokens`: tokens of the global batch that carry loss (not padding). `model_flops` and
    `hardware_flops` (default: nothing replayed) are those of the whole global batch, see `plan.flops`.
    Without a peak MFU and HFU are None. Raises ValueError when time, devices or peak is not positive.
    """
    if seconds <= 0 or devices < 1:
        raise ValueError(f"need a positive time and at least one device, got {seconds} s and {devices}")
    if peak_tflops_per_device is not None and peak_tflops_per_device <= 0:
        raise ValueError(f"peak must be positive, got {peak_tflops_per_device} TFLOP/s")
    executed = model_flops if hardware_flops is None else hardware_flops
    model_rate = model_flops / (seconds * devices * 1e12)
    hardware_rate = executed / (seconds * devices * 1e12)
    peak = peak_tflops_per_device
    return Throughput(
        tokens_per_s=loss_tokens / seconds,
        tflops_per_device=model_rate,
        hardware_tflops_per_device=hardware_rate,
        mfu=None if peak is None else model_rate / peak,
        hfu=None if peak is None else hardware_rate / peak,
        replay_overhead=(executed - model_flops) / model_flops if model_flops else 0.0,
    )
