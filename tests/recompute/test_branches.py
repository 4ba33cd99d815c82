"""Branches of steps as anybody may write them: told at once or one by one, under any save-set, values and gradients are
those of plain calls."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megackpt.plan import ChunkPlan, Decision, SaveSet
from megackpt.plan.decision import KEEP, OFFLOAD_HOST, REPLAY, REPLAY_ALL
from megackpt.recompute import Scope, Tape, at, checkpoint
from megackpt.recompute.tiers import HostTier
from tests.recompute.harness import numbers

X, W, V = numbers(6, 8), numbers(8, 8, seed=2), numbers(8, seed=3)
Fn = Callable[[Tensor], Tensor]


class Both(torch.autograd.Function):
    """Saves what it was given and something of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.tanh()
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        x, y = ctx.saved_tensors
        return grad * (y + x * (1 - y * y))


def functions(w: Tensor, v: Tensor) -> dict[str, Fn]:
    return {
        "product": lambda y: F.linear(y, w),
        "product of its own": lambda y: F.linear(y * 2, w),
        "product after a write": lambda y: F.linear(y.mul_(2), w),
        "product of a view": lambda y: F.linear(y.flip(0)[1:].t().contiguous().t(), w)[[0, 1, 2, 3, 4, 4]],
        "own and given": Both.apply,
        "own alone": lambda y: (y * 2).sin(),
        "two of its own": lambda y: y.exp().tanh(),
        "norm": lambda y: F.layer_norm(y, (8,), v),
        "dropout": lambda y: F.dropout(y, 0.3),
        "nothing": lambda y: y,
        "a view": lambda y: y.view(3, 2, 8).transpose(0, 1).reshape(6, 8),
        "region": lambda y: checkpoint(F.gelu, y),
    }


JOINS: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add,
    lambda x, y: x * y.sigmoid(),
    lambda x, y: x + F.dropout(y, 0.2),
]
Layers = Sequence[tuple[Sequence[str], int]]


def found(layers: Layers, plan: ChunkPlan | None, tier: HostTier, at_once: bool = True) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in (X, W, V)]
    x, by_name = leaves[0] * 1, functions(*leaves[1:])
    torch.manual_seed(5)
    with Tape(plan or ChunkPlan(), tiers={OFFLOAD_HOST: tier}):
        for number, (names, join) in enumerate(layers):
            scope: Scope = at(f"layers.{number}")
            steps = [(f"s{i}", by_name[name]) for i, name in enumerate(names)]
            if plan is not None and at_once:
                x = scope.branch(x, steps, ("join", JOINS[join]))
                continue
            y = x
            for name, fn in steps:
                y = fn(y) if plan is None else scope(name, fn, y)
            x = JOINS[join](x, y) if plan is None else scope("join", JOINS[join], x, y)
    loss = x.square().mean()
    return [loss.detach(), *torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)]


def check(layers: Layers, plan: ChunkPlan, tier: HostTier, at_once: bool = True) -> None:
    pairs = zip(found(layers, plan, tier, at_once), found(layers, None, tier), strict=True)
    assert all(torch.equal(ours, plain) for ours, plain in pairs), (layers, plan)


@pytest.mark.parametrize("last", functions(W, V))
def test_a_span_may_end_in_anything(last: str) -> None:
    """A product that saves nothing but what it is given need not run again, and only that: see `span.Tail`."""
    steps = SaveSet({"join": Decision()}, REPLAY_ALL)
    with HostTier() as tier:
        for after in ([], ["nothing"]):
            for joined in (steps, SaveSet({}, REPLAY_ALL)):
                check([(["own alone", last, *after], 0)], ChunkPlan({"layers.0": joined}), tier)


@pytest.mark.parametrize("seed", range(40))
def test_random_branches(seed: int) -> None:
    rng = random.Random(seed)
    # Written to is only what nobody else reads: not the branch's input, and not what the step before saved.
    names = [name for name in functions(W, V) if name != "product after a write"]
    with HostTier() as tier:
        layers = [(rng.choices(names, k=rng.randint(1, 5)), rng.randrange(3)) for _ in range(rng.randint(1, 3))]
        for _ in range(3):
            weights = [rng.random() for _ in range(3)]

            def decision(weights: list[float] = weights) -> Decision:
                if rng.random() < 0.4:
                    return REPLAY_ALL
                return Decision(*rng.choices((KEEP, REPLAY, OFFLOAD_HOST), weights, k=2), rng.choice((KEEP, REPLAY)))

            sets = {
                f"layers.{number}": SaveSet({name: decision() for name in ("s0", "s1", "s2", "s3", "s4", "join")})
                for number in range(len(layers))
            }
            check(layers, ChunkPlan(sets), tier, at_once=rng.random() < 0.7)
