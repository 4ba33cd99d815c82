"""The device seam: everything that differs between a CPU and a CUDA run, in one place.

Elsewhere device and backend are values and there is one code path.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from megackpt.config.errors import UsageError


class Event(Protocol):
    """A mark in the work queue of the device."""

    def record(self) -> None: ...

    def synchronize(self) -> None:
        """Wait until the device has reached the mark."""

    def reached(self) -> bool:
        """Whether the device has; does not wait."""

    def milliseconds_since(self, earlier: Event) -> float:
        """Time on the device between two recorded marks that it has reached."""


class _HostEvent:
    """On a CPU work is done when its call returns, so a mark is a point in time."""

    def __init__(self) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def reached(self) -> bool:
        return True

    def milliseconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, _HostEvent)
        return (self.at - earlier.at) * 1e3


class _CudaEvent:
    def __init__(self, timing: bool = True) -> None:
        self.event = torch.cuda.Event(enable_timing=timing)

    def record(self) -> None:
        self.event.record()

    def synchronize(self) -> None:
        self.event.synchronize()

    def reached(self) -> bool:
        return self.event.query()

    def milliseconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, _CudaEvent)
        return earlier.event.elapsed_time(self.event)


def mark(device: torch.device) -> Event:
    """A mark after all that is queued on the current stream of `device`."""
    event = _CudaEvent(timing=False) if device.type == "cuda" else _HostEvent()
    event.record()
    return event


_DETERMINISTIC_CUDA: Mapping[str, tuple[str, ...]] = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_ALGO": ("Ring", "Tree", "CollnetDirect", "CollnetChain", "^NVLS"),  # in-switch sums have no order
}
"""Variable of the environment -> values that keep products and reductions deterministic; the first is the default."""


def reads_freely(tensor: torch.Tensor) -> bool:
    """Whether a number of `tensor` is there to be read. On a GPU reading waits for all that is queued; a traced tensor
    has no numbers."""
    return type(tensor) is torch.Tensor and tensor.device.type == "cpu"


@dataclass(frozen=True)
class DeviceSeam:
    """One device of this process and the communication backend that serves it."""

    kind: str  # "cpu" or "cuda"
    device: torch.device
    backend: str  # "gloo" or "nccl"

    @staticmethod
    def create(kind: str | None = None, local_rank: int = 0, backend: str | None = None) -> DeviceSeam:
        """The seam of this process; None means: CUDA if there is any, and the backend that fits the device.

        Makes device `local_rank` the current one. Raises UsageError if the machine has no such device.
        """
        kind = kind or ("cuda" if torch.cuda.is_available() else "cpu")
        if kind not in ("cpu", "cuda"):
            raise UsageError(f"--device {kind}: choose cpu or cuda")
        backend = backend or ("nccl" if kind == "cuda" else "gloo")
        if backend not in ("gloo", "nccl"):
            raise UsageError(f"--distributed-backend {backend}: choose gloo or nccl")
        if kind == "cpu":
            if backend == "nccl":
                raise UsageError(
                    "--distributed-backend nccl needs CUDA devices; choose gloo with --device cpu"
                )
            keep_freed_memory()
            return DeviceSeam("cpu", torch.device("cpu"), backend)
        count = torch.cuda.device_count()
        if local_rank >= count:
            raise UsageError(
                f"--device cuda: this process is number {local_rank} on its machine, which has {count} CUDA"
                f" devices; start at most {count} processes per machine"
                + (", or let each see all of its devices (srun --gpu-bind=none)" if count else " or --device cpu")
            )
        torch.cuda.set_device(local_rank)
        return DeviceSeam("cuda", torch.device("cuda", local_rank), backend)

    def make_deterministic(self, environment: MutableMapping[str, str]) -> None:
        """Make two runs of the same commands equal to the bit, or raise UsageError where something forbids it.

        Call it before the device and its communicators are first used: `environment` (of this process) is read then.
        """
        torch.use_deterministic_algorithms(True)
        # Else every torch.empty is filled, for the sake of programs that read what they have not written.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        if self.kind == "cpu":
            torch.set_num_threads(1)  # sums of several threads are added as they come
            return
        for variable, allowed in _DETERMINISTIC_CUDA.items():
            value = environment.setdefault(variable, allowed[0])
            if value not in allowed:
                raise UsageError(
                    f"--deterministic-mode contradicts {variable}={value} in the environment. Leave it out, or choose"
                    f" {' or '.join(allowed)}."
                )
        torch.backends.cudnn.benchmark = False  # it chooses kernels by their time
        # These two sum the gradient of keys and values in any order; flash attention and the plain one remain.
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)

    def synchronize(self) -> None:
        """Wait until all work queued on the device is done."""
        if self.kind == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def name(self) -> str:
        """What the driver calls the device; "" for a CPU."""
        return torch.cuda.get_device_name(self.device) if self.kind == "cuda" else ""

    def random_states(self) -> dict[str, torch.Tensor]:
        """The states of torch's own generators, by kind of device."""
        states = {"cpu": torch.get_rng_state()}
        return states | {"cuda": torch.cuda.get_rng_state(self.device)} if self.kind == "cuda" else states

    def set_random_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Put torch's own generators where `random_states` found them; a device that `states` lacks stays."""
        torch.set_rng_state(states["cpu"])
        if self.kind == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], self.device)

    def generator(self, seed: int) -> torch.Generator:
        """A generator of its own on this device."""
        return torch.Generator(device=self.device).manual_seed(seed)

    def reset_peak(self) -> None:
        """Forget the peak of allocated memory seen so far."""
        if self.kind == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int | None:
        """Largest number of bytes allocated since `reset_peak`; None on a CPU, whose allocator does not count."""
        return torch.cuda.max_memory_allocated(self.device) if self.kind == "cuda" else None

    def allocated_bytes(self) -> int | None:
        """Bytes allocated now; None on a CPU."""
        return torch.cuda.memory_allocated(self.device) if self.kind == "cuda" else None

    def total_bytes(self) -> int | None:
        """Memory of the device; None on a CPU."""
        return torch.cuda.get_device_properties(self.device).total_memory if self.kind == "cuda" else None

    def host_bytes(self, count: int) -> torch.Tensor:
        """Host memory of so many bytes that the device copies to and from without a detour."""
        return torch.empty(count, dtype=torch.uint8, pin_memory=self.kind == "cuda")

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of host memory on the device, queued like all other work: the plain copy would wait for the queue to
        be empty, and the device then for the next call.  Pinned memory is not used again before it has been read."""
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.kind == "cuda" else tensor

    def event(self) -> Event:
        """A new mark on the current stream, to be recorded."""
        return _CudaEvent() if self.kind == "cuda" else _HostEvent()

    def current_stream(self) -> torch.cuda.Stream | None:
        """The stream that work is queued on; None on a CPU, where order is that of the calls."""
        return torch.cuda.current_stream(self.device) if self.kind == "cuda" else None

    def side_stream(self) -> torch.cuda.Stream | None:
        """A new stream for work beside the current one; None on a CPU."""
        return torch.cuda.Stream(self.device) if self.kind == "cuda" else None

    def on_stream(self, stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        """Queue what is called inside on `stream` (None: as it comes)."""
        return nullcontext() if stream is None else torch.cuda.stream(stream)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_LARGEST = 2**31 - 1
_LARGEST_OF_OLD = 32 << 20  # older versions refuse more


def keep_freed_memory() -> bool:
    """Let glibc keep what is freed, as GPU allocators do: a step frees and allocates the same large tensors again, and
    giving their pages back to the system costs page faults, about 6 % of a CPU step. False where there is no glibc.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    # The second first: setting any of them stops glibc from raising this one, from 128 KiB, by itself.
    large = mallopt(_MMAP_THRESHOLD, _LARGEST) or mallopt(_MMAP_THRESHOLD, _LARGEST_OF_OLD)
    return bool(large and mallopt(_TRIM_THRESHOLD, _LARGEST))
