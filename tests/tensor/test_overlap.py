"""Communication beside products: in which order a backward launches, multiplies and waits, seen from outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megackpt.plan import REPLAY, ChunkPlan, Decision, SaveSet
from megackpt.plan.decision import REPLAY_ALL
from megackpt.recompute import Tape, at
from megackpt.tensor.collectives import GatherSequence
from megackpt.tensor.linear import ColumnLinear
from tests.pool import run_distributed
from tests.tensor.probes import collectives, random, tensor_parallel, world_axis

S, B, IN, OUT = 6, 3, 8, 20
SHORT = {"all_gather_into_tensor": "gather", "reduce_scatter_tensor": "scatter", "all_reduce": "reduce"}


class Products(TorchDispatchMode):
    """Logs matrix products: "input" makes rows of the input's width, "weight" a matrix of the weight's shape."""

    def __init__(self, log: list[str], rows: int) -> None:
        super().__init__()
        self.log, self.rows = log, rows

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.log.append("input" if out.shape[0] == self.rows else "weight")
        return out


@contextmanager
def logged(log: list[str]) -> Iterator[None]:
    real = {name: getattr(dist, name) for name in SHORT}

    class Waited:
        def __init__(self, name: str, work: dist.Work) -> None:
            self.name, self.work = name, work

        def wait(self) -> None:
            log.append(f"wait {self.name}")
            self.work.wait()

    def wrap(name: str) -> Any:
        def call(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            log.append(SHORT[name] if async_op else f"{SHORT[name]} at once")
            work = real[name](*args, async_op=async_op, **kwargs)
            return Waited(SHORT[name], work) if async_op else work

        return call

    for name in SHORT:
        setattr(dist, name, wrap(name))
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(dist, name, function)


PLANS = {
    "kept": {},
    "gather dropped": {"gather": Decision(output=REPLAY)},
    "norm and gather dropped": {"norm": REPLAY_ALL, "gather": Decision(output=REPLAY)},
    "all dropped": {name: REPLAY_ALL for name in ("norm", "gather", "up", "act")},
}


def _column(rank: int, world_size: int, plan: str, bias: bool) -> tuple[list[str], list[Tensor], list[Tensor]]:
    """Norm, gather, column-parallel product and an activation; the backward's log, and gradients with and without
    overlap (the input of the product made anonymous)."""
    axis = world_axis(rank, world_size)
    tp = tensor_parallel(axis, sequence_parallel=True)
    up = ColumnLinear(tp, IN, OUT, name="up", std=0.3, bias=bias)
    results: list[list[Tensor]] = []
    log: list[str] = []
    for overlapped in (True, False):
        x = random(S // world_size, B, IN, seed=rank).requires_grad_()
        up.zero_grad()
        step = at("layers.0")
        with Tape(ChunkPlan({"layers.0": SaveSet(PLANS[plan])})):
            y = step("norm", lambda x: F.layer_norm(x, (IN,)), x)
            y = step("gather", GatherSequence(axis), y)
            y = step("up", up if overlapped else lambda y: up(y * 1.0), y)
            y = step("act", F.gelu, y)
        if overlapped:
            with logged(log), Products(log, S * B):
                y.backward(random(*y.shape, seed=rank + 10))
        else:
            y.backward(random(*y.shape, seed=rank + 10))
        assert x.grad is not None
        results.append([x.grad, *(p.grad for p in up.parameters() if p.grad is not None)])
    return log, results[0], results[1]


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("plan", PLANS)
def test_gather_and_scatter_run_beside_the_products(plan: str, bias: bool) -> None:
    expected = {
        "kept": ["input", "scatter", "weight", "wait scatter"],
        "gather dropped": ["gather", "input", "scatter", "wait gather", "weight", "wait scatter"],
        "norm and gather dropped": ["gather", "input", "scatter", "wait gather", "weight", "wait scatter"],
        # the product itself is asked for again first, and what was gathered for it serves its gradient too
        "all dropped": ["gather at once", "input", "input", "scatter", "weight", "wait scatter"],
    }[plan]
    for log, overlapped, plain in run_distributed(_column, 2, plan, bias):
        assert log == expected
        assert len(overlapped) == len(plain) == 2 + bias
        assert all(torch.equal(a, b) for a, b in zip(overlapped, plain, strict=True))


def _without_sequence_parallel(rank: int, world_size: int) -> list[str]:
    tp = tensor_parallel(world_axis(rank, world_size))
    up = ColumnLinear(tp, IN, OUT, name="up", std=0.3)
    x = random(S, B, IN, seed=1).requires_grad_()
    y = up(x)
    log: list[str] = []
    with logged(log), Products(log, S * B):
        y.sum().backward()
    return log


def test_the_reduction_runs_beside_the_weight_gradient() -> None:
    for log in run_distributed(_without_sequence_parallel, 2):
        assert log == ["input", "reduce", "weight", "wait reduce"]


def _two_readers(rank: int, world_size: int) -> tuple[Tensor, Tensor, list[str]]:
    """A gathered tensor that a second reader adds to, and one that is gathered for two layers."""
    axis = world_axis(rank, world_size)
    tp = tensor_parallel(axis, sequence_parallel=True)
    layers = [ColumnLinear(tp, IN, OUT, name=name, std=0.3, bias=False) for name in ("a", "b")]
    gradients = []
    for one_gather in (True, False):
        x = random(S // world_size, B, IN, seed=rank).requires_grad_()
        gather = GatherSequence(axis)
        y = gather(x)
        z = y if one_gather else gather(x)
        total = layers[0](y).square().sum() + layers[1](z).sum() + (y if one_gather else gather(x)).sin().sum()
        with collectives() as seen:
            total.backward()
        assert x.grad is not None
        gradients.append(x.grad)
    return gradients[0], gradients[1], [name for name, _ in seen]


def test_a_gathered_tensor_with_several_readers() -> None:
    for one, three, seen in run_distributed(_two_readers, 2):
        torch.testing.assert_close(one, three, rtol=1e-13, atol=0)
        assert seen == ["reduce_scatter_tensor"] * 3


def _frozen(rank: int, world_size: int) -> tuple[list[str], bool]:
    axis = world_axis(rank, world_size)
    up = ColumnLinear(tensor_parallel(axis, sequence_parallel=True), IN, OUT, name="up", std=0.3, bias=False)
    up.weight.requires_grad_(False)
    x = random(S // world_size, B, IN, seed=rank).requires_grad_()
    y = up(GatherSequence(axis)(x))
    log: list[str] = []
    with logged(log), Products(log, S * B):
        y.sum().backward()
    return log, x.grad is not None


def test_a_frozen_weight_has_no_product() -> None:
    for log, reached in run_distributed(_frozen, 2):
        assert log == ["input", "scatter at once"] and reached
