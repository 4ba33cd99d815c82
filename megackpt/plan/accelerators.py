"""A small table of accelerators: memory, peaks, bandwidths, each figure with its source.  JSON in and out.

Peaks are dense (a sparse figure is twice as large and halves every MFU).  Achievable fractions are planning values:
give a JSON file with figures of your own machine instead where you know them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megackpt.plan.paces import Company, Kernel, Overheads

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True)
class Machine:
    """One accelerator and what it is connected to.  Bandwidths are bytes per second in one direction."""

    name: str
    memory_bytes: int
    peak_flops: Mapping[str, float]  # dense, by number format (bf16, fp32, fp64)
    hbm_bytes_per_s: float
    tp_bytes_per_s: float  # bus bandwidth of a collective inside a node
    node_bytes_per_s: float  # between nodes, per accelerator
    host_bytes_per_s: float
    cores: int  # of the host, per accelerator
    per_node: int = 8
    gemm_fraction: float = 0.55
    hbm_fraction: float = 0.75
    core_fraction: float = 0.6  # of gemm_fraction, for the attention core
    latency_s: float = 10e-6
    op_seconds: float = 0.0  # of the host per operation, where it computes itself; 0: hidden behind the device's work
    shared_rates: tuple[float, ...] = ()  # of a rank while 1, 2, ... ranks of the host compute; (): cores of its own
    kernels: Mapping[str, Kernel] = field(default_factory=dict)  # measured, by kind of step; others by the roofline
    overheads: Overheads = field(default_factory=Overheads)
    companies: tuple[Company, ...] = ()  # measured, by number of ranks; (): ranks only wait for the latency
    context_bytes: int = 0  # of the driver, outside the allocator
    communicator_bytes: int = 0  # per process group
    margin_bytes: int = 0  # fragmentation and what nobody counted
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "hbm_bytes_per_s", "tp_bytes_per_s", "node_bytes_per_s", "host_bytes_per_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{self.name}: {name} must be above 0, got {getattr(self, name)}")
        if not all(0 < rate <= 1 for rate in self.shared_rates):
            raise ValueError(f"{self.name}: shared_rates must be above 0 and at most 1, got {self.shared_rates}")
        if list(self.companies) != sorted(self.companies, key=lambda company: company.ranks):
            raise ValueError(f"{self.name}: companies must be in the order of their ranks, got {self.companies}")
        for name in ("gemm_fraction", "hbm_fraction", "core_fraction"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{self.name}: {name} must be above 0 and at most 1, got {getattr(self, name)}")

    def speed(self, busy: int) -> float:
        """Of each of ``busy`` ranks that compute at once, relative to one alone.  More ranks than were measured share
        what those had together."""
        if not self.shared_rates:
            return 1.0
        known = min(busy, len(self.shared_rates))
        return self.shared_rates[known - 1] * known / max(1, busy)

    def company(self, ranks: int) -> Company:
        """Of so many ranks on this host: as measured with so many, or the next smaller number, or the smallest.  A rank
        alone has none."""
        if ranks == 1 or not self.companies:
            return Company(ranks, 1.0, 0.0, self.latency_s, self.latency_s)
        return max((c for c in self.companies if c.ranks <= ranks), key=lambda c: c.ranks, default=self.companies[0])

    def flops_per_s(self, act_bytes: int) -> float:
        """Achievable in products of numbers of so many bytes.  Raises ValueError where no peak is known."""
        kind = {2: "bf16", 4: "fp32", 8: "fp64"}[act_bytes]
        if kind not in self.peak_flops:
            raise ValueError(f"{self.name} has no peak for {kind}; known: {', '.join(sorted(self.peak_flops))}")
        return self.peak_flops[kind] * self.gemm_fraction

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Machine:
        """Raises TypeError on an unknown or missing field."""
        kernels = {kind: Kernel.from_json(row) for kind, row in data.get("kernels", {}).items()}
        overheads = Overheads(**data.get("overheads", {}))
        rates = tuple(data.get("shared_rates", ()))
        companies = tuple(Company(**row) for row in data.get("companies", ()))
        made = {"shared_rates": rates, "kernels": kernels, "overheads": overheads, "companies": companies}
        return Machine(**{**data, **made})


def machine_named(name: str) -> Machine:
    """A row of the table by name, or the machine in a JSON file.  Raises ValueError when it is neither."""
    if name in MACHINES:
        return MACHINES[name]
    path = Path(name)
    if path.suffix == ".json" and path.is_file():
        return Machine.from_json(json.loads(path.read_text(encoding="utf-8")))
    raise ValueError(f"machine {name!r} is neither one of {', '.join(MACHINES)} nor a JSON file with the fields of one")


_PLANNED = {
    "memory_bytes": "total memory as nvidia-smi reports it (A100, H100: modal-labs/modal-client#2797)",
    "gemm_fraction": "planning value: large bf16 products reach 50 to 70 % of the dense peak",
    "hbm_fraction": "planning value: streaming kernels reach 70 to 85 %",
    "tp_bytes_per_s": "planning value: 80 % of one direction; data sheets give both: 600, 900, 1,800 GB/s",
    "node_bytes_per_s": "one 200 Gb/s (A100) or 400 Gb/s (H100 and later) port per accelerator, at 80 %",
    "host_bytes_per_s": "PCIe generation 4 x16 (A100) or 5 x16, at about 65 %",
    "context_bytes": "typical CUDA context with NCCL and cuBLAS loaded",
    "communicator_bytes": "typical NCCL buffers of one communicator",
    "margin_bytes": "2 % of memory for fragmentation",
}


def _nvidia(
    name: str, mib: int, peaks: Mapping[str, float], hbm: float, nvlink: float, port: float, pcie: float, source: str
) -> Machine:
    memory_bytes = mib * MIB
    return Machine(
        name,
        memory_bytes,
        peaks,
        hbm,
        tp_bytes_per_s=0.8 * nvlink / 2,
        node_bytes_per_s=0.8 * port / 8,
        host_bytes_per_s=pcie,
        cores=16,
        context_bytes=600 * MIB,
        communicator_bytes=128 * MIB,
        margin_bytes=memory_bytes // 50,
        sources=_PLANNED | dict.fromkeys(("peak_flops", "hbm_bytes_per_s"), source),
    )


# fp32 without TF32, as torch computes it by default; fp64 by tensor cores.
_A100 = {"bf16": 312e12, "fp32": 19.5e12, "fp64": 19.5e12}
_H100 = {"bf16": 989e12, "fp32": 67e12, "fp64": 67e12}
_B200 = {"bf16": 2250e12, "fp32": 75e12, "fp64": 37e12}
_A100_SHEET = (
    "NVIDIA A100 data sheet (1758950-r4): BF16 312 TFLOP/s (624 sparse), FP32 19.5, FP64 tensor core 19.5;"
    " 1,555 GB/s (40 GB) and 2,039 GB/s (80 GB); NVLink 600 GB/s; PCIe 4"
)
_H100_SHEET = (
    "NVIDIA H100 data sheet, SXM5: BF16 989 TFLOP/s (1,979 sparse, which is the figure printed), FP32 67,"
    " FP64 tensor core 67; 3.35 TB/s; NVLink 900 GB/s; PCIe 5"
)
_H200_SHEET = "NVIDIA H200 data sheet, SXM5: processor as H100; 141 GB, 4.8 TB/s; NVLink 900 GB/s; PCIe 5"
_B200_SHEET = (
    "NVIDIA HGX B200 data sheet, per GPU: BF16 2,250 TFLOP/s (4,500 sparse), FP32 75, FP64 37 (the Blackwell brief of"
    " 2024 says 80 and 40); 7,680 bits at 3,996 MHz, so 7.67 TB/s (pytorch/ao#4002), printed as 8; NVLink 1,800 GB/s"
)

MACHINES: dict[str, Machine] = {
    m.name: m
    for m in (
        _nvidia("a100-40gb", 40960, _A100, 1.555e12, 600e9, 200e9, 20e9, _A100_SHEET),
        _nvidia("a100-80gb", 81920, _A100, 2.039e12, 600e9, 200e9, 20e9, _A100_SHEET),
        _nvidia("h100-80gb", 81559, _H100, 3.35e12, 900e9, 400e9, 40e9, _H100_SHEET),
        _nvidia("h200-141gb", 143771, _H100, 4.8e12, 900e9, 400e9, 40e9, _H200_SHEET),
        _nvidia("b200-180gb", 183359, _B200, 7.67e12, 1800e9, 400e9, 40e9, _B200_SHEET),
        Machine(
            "cpu", 16 * GIB, {"bf16": 2e9, "fp32": 5e10, "fp64": 2.5e10}, 1e10, 2e9, 1e9, 1e10, 1,
            per_node=1, gemm_fraction=0.8, latency_s=5e-5, op_seconds=4e-6,
            sources={"all": "one core of an AVX2 server, order of magnitude; megackpt calibrate measures yours"},
        ),
    )
}  # fmt: skip
