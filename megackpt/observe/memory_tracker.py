"""Live and peak bytes of the tensors allocated inside a region, on any device, without an allocator's help.

A CPU allocator keeps no counters, and a process's resident memory moves in pages and pools. So we count
what is exact: every operation that PyTorch dispatches passes through a mode, and a result whose storage is
not an argument's storage is a new allocation.

* The identity of an allocation is its *storage object*. Addresses are reused as soon as memory is freed,
  and many
  tensors (views, in-place results) share one storage.
* The object is held weakly. It lives exactly as long as the storage, in autograd's saved tensors too, so its
  death is the moment of the free, wherever that happens: in forward, in backward, after the region.
* What existed before is never counted: operations on it return it, or a view of it.

Backward is seen too: on a CPU autograd runs it on the calling thread, where the mode is active. On a CUDA
device use the allocator's counters (`ActivationPeak` chooses).

Watching changes one thing: under any dispatch mode autograd sums two gradients of one tensor out of place, where
it might otherwise reuse the first. Values are the same to the bit; the peak can be higher by one gradient.

Not seen, because never dispatched: scratch memory inside one kernel, and memory that others own (numpy arrays
wrapped by `from_numpy`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Wraps storage that was allocated below the dispatcher, as by torch.tensor: the argument is the new tensor
# itself.
FRESH = (torch.ops.aten.lift_fresh.default,)


class MemoryTracker(TorchDispatchMode):
    """Counts bytes of storages allocated while active; frees are followed for as long as the object lives.

        with MemoryTracker() as tracker:
            loss = model(x)
            loss.backward()
        tracker.peak_bytes   # most bytes alive at once, of tensors allocated inside
        tracker.live_bytes   # still alive now, gradients allocated inside among them

    May be entered several times, one after the other; bytes add up.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._live = 0
        self._peak = 0
        self._allocated = 0
        # Storages may die on other threads (communication) or inside a collection that interrupts us.
        self._lock = threading.RLock()

    @property
    def live_bytes(self) -> int:
        """Bytes of tracked storages that are alive now."""
        return self._live

    @property
    def peak_bytes(self) -> int:
        """Largest `live_bytes` since the start or the last `reset_peak`."""
        return self._peak

    @property
    def allocated_bytes(self) -> int:
        """Sum over all tracked allocations, freed or not."""
        return self._allocated

    def reset_peak(self) -> None:
        """Let the peak start again from what is alive now."""
        with self._lock:
            self._peak = self._live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        existing = set() if func in FRESH else {id(s) for s in _storages((args, kwargs))}
        for storage in _storages(result):
            if id(storage) in self._sizes:
                self._resize(storage)
            elif id(storage) not in existing and (func not in FRESH or storage.resizable()):
                self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        with self._lock:
            # An id is reused only after the object died, and its death removes the entry (see _freed).
            self._sizes[key] = (weakref.ref(storage, lambda ref: self._freed(key, ref)), size)
            self._grow(size)

    def _resize(self, storage: torch.UntypedStorage) -> None:
        with self._lock:
            ref, size = self._sizes[id(storage)]
            if storage.nbytes() != size:
                self._sizes[id(storage)] = (ref, storage.nbytes())
                self._grow(storage.nbytes() - size)

    def _freed(self, key: int, ref: weakref.ref[Any]) -> None:
        with self._lock:
            entry = self._sizes.get(key)
            if entry is not None and entry[0] is ref:
                del self._sizes[key]
                self._live -= entry[1]

    def _grow(self, size: int) -> None:
        self._live += size
        self._allocated += max(0, size)
        self._peak = max(self._peak, self._live)


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    """Storages of all tensors in nested arguments or results."""
    if isinstance(value, torch.Tensor):
        if value.device.type == "meta":
            return
        try:
            yield value.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse and wrapper tensors have none of their own
            return
    elif isinstance(value, torch.UntypedStorage):
        yield value
    elif isinstance(value, torch.storage.TypedStorage):
        yield value._untyped_storage
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _storages(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _storages(item)


class PeakCounter(Protocol):
    """An allocator's counter (the device seam has it); `peak_bytes` is None where there is none."""

    def reset_peak(self) -> None: ...

    def peak_bytes(self) -> int | None: ...


class ActivationPeak:
    """Peak bytes allocated inside a `with` block over what existed before, by the best means of the device.

        with ActivationPeak(seam) as measured:
            forward and backward of all micro-batches
        measured.bytes

    Uses the allocator's counter, or `MemoryTracker` where there is none. Parameters, gradient buffers and
    optimizer state exist before and do not count. Resets the device's peak counter.
    """

    def __init__(self, counter: PeakCounter) -> None:
        self._counter = counter
        self._tracker: MemoryTracker | None = None
        self._before = 0
        self.bytes = 0

    def __enter__(self) -> ActivationPeak:
        self._counter.reset_peak()
        before = self._counter.peak_bytes()  # right after a reset the peak is what is allocated now
        if before is None:
            self._tracker = MemoryTracker()
            self._tracker.__enter__()
        else:
            self._before = before
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._tracker is not None:
            self._tracker.__exit__(kind, error, trace)
            self.bytes = self._tracker.peak_bytes
        else:
            self.bytes = (self._counter.peak_bytes() or 0) - self._before
