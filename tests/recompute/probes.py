"""Counting from outside the product: products, storages that stay alive, steps that run.

Nothing here asks the engine's own counters.  `torch.distributed` is wrapped by `tests.tensor.probes.collectives`.
"""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megackpt.recompute import Named, Scope, is_replaying
from megackpt.recompute.handle import Box, Cell, Internal, Kept, Tag, View
from megackpt.recompute.replay import Record
from megackpt.recompute.tiers.base import Stored

aten = torch.ops.aten

Product = tuple[str, tuple[int, ...]]
"""("mm", (m, k, n)), ("bmm", (batch, m, k, n)) or ("sdpa", (b, a, s, d)): what is multiplied with what."""

FUSED_CORE = aten._scaled_dot_product_flash_attention_for_cpu.default


class Products(TorchDispatchMode):
    """Every matrix product that is dispatched inside, by shape; `-` of two counters is what one did more."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[Product] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.mm.default, aten.addmm.default, aten.addmm_.default):
            a, b = args[-2:]
            self.seen["mm", (*a.shape, b.shape[1])] += 1
        elif func in (aten.bmm.default, aten.baddbmm.default):
            a, b = args[-2:]
            self.seen["bmm", (*a.shape, b.shape[2])] += 1
        elif func is FUSED_CORE:
            self.seen["sdpa", tuple(args[0].shape)] += 1
        return func(*args, **(kwargs or {}))


def flops(products: Counter[Product]) -> int:
    """2mkn per product; a fused core counts its two, 4·b·a·s²·d (not causal)."""
    each = {
        product: 4 * math.prod(shape) * shape[2] if kind == "sdpa" else 2 * math.prod(shape)
        for product in products
        for kind, shape in [product]
    }
    return sum(each[product] * count for product, count in products.items())


def storages(value: Any) -> Iterator[torch.UntypedStorage]:
    if isinstance(value, Tensor):
        yield value.untyped_storage()
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from storages(item)


class Census(TorchDispatchMode):
    """Storages that operations allocate inside, followed until they die, wherever that is.

    The Python object of a storage lives exactly as long as the storage, also when only autograd holds it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._lock = threading.RLock()  # storages die in communication threads as well
        self.bytes = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {id(s) for s in storages((*args, *(kwargs or {}).values()))}
        for storage in storages(result):
            key = id(storage)
            if key not in given and key not in self._alive:
                with self._lock:
                    self._alive[key] = (weakref.ref(storage, partial(self._died, key)), storage.nbytes())
                    self.bytes += storage.nbytes()
                    self.peak = max(self.peak, self.bytes)
        return result

    def _died(self, key: int, ref: weakref.ref[torch.UntypedStorage]) -> None:
        with self._lock:
            if self._alive[key][0] is ref:
                self.bytes -= self._alive.pop(key)[1]


@contextmanager
def saved_storages() -> Iterator[dict[int, Tensor]]:
    """What plain autograd saves inside, one tensor per storage, parameters excluded.  Only where no tape is open:
    saved-tensor hooks hide each other."""
    seen: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, torch.nn.Parameter) and not isinstance(tensor._base, torch.nn.Parameter):
            seen.setdefault(tensor.untyped_storage()._cdata, tensor.detach())  # held: its address stays its own
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield seen


class Recorder:
    """Stands in for a block's scope and writes down which step functions run, in forward and in replay.

    A step counts as replayed if its function ran to its end or until the replay had what it wanted, except a product
    that was stopped before its kernel: a linear layer packs what it saves first.
    """

    STOPPED_BEFORE_THE_KERNEL = ("attn.qkv", "attn.proj", "mlp.up", "mlp.down")

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.forward: list[str] = []
        self.replayed: list[str] = []

    def __call__(self, name: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.scope(name, self._watched(name, fn), *args, **kwargs)

    def branch(self, x: Tensor, steps: Sequence[Named], join: tuple[str, Callable[..., Tensor]]) -> Tensor:
        watched = [(name, self._watched(name, fn)) for name, fn in steps]
        return self.scope.branch(x, watched, (join[0], self._watched(*join)))

    def _watched(self, name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            log = self.replayed if is_replaying() else self.forward
            try:
                result = fn(*args, **kwargs)
            except BaseException:
                if name not in self.STOPPED_BEFORE_THE_KERNEL:
                    log.append(name)
                raise
            log.append(name)
            return result

        return watched


ENGINE = (Record, Stored, Kept, Internal, View, Box, Cell, Tag)


def alive() -> dict[str, int]:
    """Objects of the engine that exist, without a collection."""
    found: dict[str, int] = {}
    for thing in gc.get_objects():
        if type(thing) in ENGINE:
            found[type(thing).__name__] = found.get(type(thing).__name__, 0) + 1
    return found
