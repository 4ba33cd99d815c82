"""Counting from outside: torch.distributed's functions are wrapped, saved tensors caught by hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megackpt.mesh.process_mesh import Axis
from megackpt.mesh.sink import AutogradSink, GradientSink
from megackpt.recompute import RngLedger
from megackpt.tensor.context import TensorParallel

# function of torch.distributed -> index of the argument whose bytes tell the size of the call
_COUNTED = {
    "all_reduce": 0,
    "all_gather_into_tensor": 0,
    "reduce_scatter_tensor": 1,
    "all_gather": 1,
    "broadcast": 0,
    "reduce": 0,
    "barrier": None,
    "all_gather_object": None,
}


@contextmanager
def collectives() -> Iterator[list[tuple[str, int]]]:
    """Every collective called inside, in order: its kind and the bytes of the whole (unsharded) tensor."""
    seen: list[tuple[str, int]] = []
    real = {name: getattr(dist, name) for name in _COUNTED}

    def wrap(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            index = _COUNTED[name]
            seen.append((name, 0 if index is None else args[index].nbytes))
            return real[name](*args, **kwargs)

        return call

    for name in _COUNTED:
        setattr(dist, name, wrap(name))
    try:
        yield seen
    finally:
        for name, function in real.items():
            setattr(dist, name, function)


@contextmanager
def saved() -> Iterator[list[Tensor]]:
    """Every tensor that autograd saves inside, in order."""
    seen: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield seen


def world_axis(rank: int, world_size: int) -> Axis:
    return Axis(world_size, rank, tuple(range(world_size)), dist.group.WORLD if world_size > 1 else None)


def tensor_parallel(
    axis: Axis,
    *,
    sequence_parallel: bool = False,
    dtype: torch.dtype = torch.float64,
    sink: GradientSink | None = None,
    seed: int = 7,
) -> TensorParallel:
    sink = sink or AutogradSink()
    return TensorParallel(axis, sequence_parallel, RngLedger(), sink, dtype, torch.device("cpu"), seed)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The same numbers in every process."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def error(a: Tensor, b: Tensor) -> float:
    """Relative Frobenius distance."""
    return float((a - b).norm() / b.norm())
