"""Bytes of what is allocated inside a block, alive now and at most; by the dispatcher on a CPU, by the allocator on a
GPU."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Meter(Protocol):
    """A context manager; counts from its start.  ``moved``: bytes read and written by operations so far."""

    moved: int

    def live(self) -> int: ...

    def peak(self) -> int: ...

    def reset(self) -> None:
        """Let the peak start again from what is alive now."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *failure: Any) -> None: ...


def meter_for(tensors: list[Tensor]) -> Meter:
    """The meter for a computation on these tensors."""
    device = next((t.device for t in tensors if t.device.type == "cuda"), None)
    return DispatchMeter() if device is None else AllocatorMeter(device)


def storages(value: Any) -> Iterator[torch.UntypedStorage]:
    """Storages of all tensors in ``value`` that have one."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.device.type != "meta":
            try:
                yield leaf.untyped_storage()
            except (NotImplementedError, RuntimeError):  # sparse and wrapper tensors have none of their own
                continue


class DispatchMeter(TorchDispatchMode):
    """Follows storages by weak reference: the object of a storage lives exactly as long as its memory."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._live = self._peak = 0
        self.moved = 0

    def live(self) -> int:
        return self._live

    def peak(self) -> int:
        return self._peak

    def reset(self) -> None:
        self._peak = self._live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        before = {id(s) for s in storages((args, kwargs))}
        fresh = False
        for storage in storages(result):
            key = id(storage)
            if key not in before and key not in self._sizes:
                self._live += storage.nbytes()
                self._sizes[key] = (weakref.ref(storage, partial(self._freed, key)), storage.nbytes())
                fresh = True
        self._peak = max(self._peak, self._live)
        if fresh or func._schema.is_mutable:
            leaves = pytree.tree_leaves((args, kwargs, result))
            self.moved += sum(t.numel() * t.element_size() for t in leaves if isinstance(t, Tensor))
        return result

    def _freed(self, key: int, ref: weakref.ref[Any]) -> None:
        entry = self._sizes.get(key)
        if entry is not None and entry[0] is ref:
            del self._sizes[key]
            self._live -= entry[1]


class AllocatorMeter:
    """The CUDA allocator's own counters, which see kernels' scratch memory too; its peak is reset."""

    def __init__(self, device: torch.device) -> None:
        self.moved = 0  # nobody counts
        self._device = device
        self._start = 0

    def __enter__(self) -> AllocatorMeter:
        torch.cuda.synchronize(self._device)
        self._start = torch.cuda.memory_allocated(self._device)
        self.reset()
        return self

    def __exit__(self, *failure: Any) -> None:
        torch.cuda.synchronize(self._device)

    def live(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._start

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._start

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
