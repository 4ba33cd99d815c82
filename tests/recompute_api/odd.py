"""Uses that nobody planned for, as odd functions and odd values have them: the means to compare each with the same
thing without recompute, as a region, and as a step of a tape under two plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megackpt.plan import ChunkPlan, Decision, SaveSet
from megackpt.recompute import Tape, checkpoint, step

Call = Callable[..., Any]
Found = list[Tensor | None]
Use = Callable[[Call], Found]


def values(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(dtype).requires_grad_()


def after(loss: Tensor, *leaves: Tensor) -> Found:
    return [loss.detach(), *torch.autograd.grad(loss, leaves, allow_unused=True)]


def as_step(call: Decision) -> Call:
    plan = ChunkPlan({"": SaveSet({}, call)})

    def run(fn: Call, *args: Any, **kwargs: Any) -> Any:
        with Tape(plan):
            return step("s", fn, *args, **kwargs)

    return run


WAYS = {
    "region": checkpoint, "dropped": as_step(Decision("replay", "replay", "replay")),
    "output kept": as_step(Decision("keep", "replay")),
}  # fmt: skip


def run(of: Use, call: Call) -> Found:
    torch.manual_seed(0)
    return [*of(call), torch.get_rng_state()]


def assert_equal(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    assert len(found) == len(expected)
    for ours, plain in zip(found, expected, strict=True):
        assert (ours is None) == (plain is None)
        assert ours is None or (ours.dtype == plain.dtype and torch.equal(ours, plain))  # type: ignore[union-attr,arg-type]
