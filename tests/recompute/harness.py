"""Small functions under plans: run them with and without a tape and compare every bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megackpt.plan import ChunkPlan, Decision, SaveSet
from megackpt.plan.decision import REPLAY_ALL
from megackpt.recompute import KeptBytes, RngLedger, Tape

KEPT_OUTPUT = Decision("keep", "replay", "replay")  # internals and masks dropped, the output stays
ONLY_OUTPUT = Decision("replay", "keep", "replay")


def plan(default: Decision | None = None, /, **decisions: Decision) -> ChunkPlan:
    """For steps without an address; a name `a_b` stands for itself."""
    return ChunkPlan({"": SaveSet(decisions, default or Decision())})


def drop(*names: str) -> ChunkPlan:
    return plan(**{name: REPLAY_ALL for name in names})


DROP_ALL = plan(REPLAY_ALL)


def numbers(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class Calls:
    """Counts how often functions run, by name."""

    def __init__(self) -> None:
        self.count: dict[str, int] = {}

    def __call__(self, name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count[name] = self.count.get(name, 0) + 1
            return fn(*args, **kwargs)

        return counted


Body = Callable[..., Tensor]
"""(leaves) -> a tensor whose sum is the loss."""


def gradients(
    body: Body, leaves: Sequence[Tensor], chunk: ChunkPlan | None, ledger: RngLedger | None = None, **tape: Any
) -> list[Tensor]:
    """Value and gradients of fresh copies of `leaves` (of those that are of a floating type)."""
    fresh = [leaf.detach().clone().requires_grad_(leaf.is_floating_point() or leaf.is_complex()) for leaf in leaves]
    torch.manual_seed(7)
    if chunk is None:
        result = body(*fresh)
    else:
        with Tape(chunk, ledger, account=KeptBytes(), **tape):
            result = body(*fresh)
    value = result.detach().clone()
    loss = torch.view_as_real(result).sum() if result.is_complex() else result.sum()
    del result
    loss.backward()
    found = [value, torch.get_rng_state()]
    for leaf in fresh:
        if leaf.requires_grad:
            found.append(torch.zeros(0) if leaf.grad is None else leaf.grad)
    return found


def assert_equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
    assert len(a) == len(b)
    unequal = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x.dtype != y.dtype or not torch.equal(x, y)]
    assert not unequal, f"differ: {unequal}"


def assert_same(
    body: Body,
    leaves: Sequence[Tensor],
    plans: Mapping[str, ChunkPlan] | ChunkPlan = DROP_ALL,
    ledger: Callable[[], RngLedger] | None = None,
    **tape: Any,
) -> None:
    """`body` gives the same bits under each plan as without a tape."""
    plain = gradients(body, leaves, None)
    each = {"plan": plans} if isinstance(plans, ChunkPlan) else plans
    for name, chunk in each.items():
        found = gradients(body, leaves, chunk, None if ledger is None else ledger(), **tape)
        try:
            assert_equal(found, plain)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def decisions_for(*names: str) -> dict[str, ChunkPlan]:
    """Every step dropped; each one alone; outputs alone; internals alone."""
    plans = {"all": drop(*names)}
    plans |= {name: drop(name) for name in names}
    plans["outputs"] = plan(**{name: ONLY_OUTPUT for name in names})
    plans["internals"] = plan(**{name: KEPT_OUTPUT for name in names})
    return plans
