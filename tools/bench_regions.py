"""The ways to have a region replayed that `bench_recompute.py` compares: ours, torch's, torch_remat.

Each is a function ``wrap(fn) -> fn'`` with ``fn'(x)`` equal to ``fn(x)``.  torch_remat (PyPI) is measured where it is
installed and reported as absent where it is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint as torch_checkpoint

from megackpt.recompute import checkpoint

try:
    import torch_remat
except ImportError:  # optional
    torch_remat = None

Fn = Callable[[Tensor], Tensor]
Wrap = Callable[[Fn], Fn]

aten = torch.ops.aten
PRODUCTS = (
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten._scaled_dot_product_flash_attention_for_cpu.default,
)  # fmt: skip
"""What selective contexts save: what costs FLOPs."""


@dataclass(frozen=True)
class Way:
    """One way to have ``fn`` replayed; ``random``: which random state it restores for the replay."""

    name: str
    wrap: Wrap
    random: str


def _by(call: Callable[..., Tensor], **options: Any) -> Wrap:
    return lambda fn: partial(call, fn, **options)


def saving_products() -> Any:
    """Contexts for torch's checkpoint that keep every product and replay the rest."""
    return torch_checkpoint.create_selective_checkpoint_contexts(list(PRODUCTS))


class _ByHand(torch.autograd.Function):
    """The least that re-running a function can cost in Python: no parameters, no random state, one tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fn: Fn) -> Tensor:
        ctx.fn = fn
        ctx.save_for_backward(x)
        with torch.no_grad():
            return fn(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:  # type: ignore[override]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.fn(x)
        y.backward(grad)
        return x.grad, None


def _by_hand(fn: Fn) -> Fn:
    return lambda x: _ByHand.apply(x, fn)


NON_REENTRANT = "torch checkpoint, non-reentrant"
REENTRANT = "torch checkpoint, reentrant"
SELECTIVE = "torch selective contexts"
REMAT = "torch_remat"
BY_HAND = "by hand"

DEFAULTS, STREAMS, NO_STATE = "torch's", "streams", "none"
"""Random state that is restored: torch's generators, registered streams, neither."""


def ways() -> list[Way]:
    """All ways at hand, ours first."""
    theirs = torch_checkpoint.checkpoint
    forgetful = {"preserve_rng_state": False}
    found = [
        Way("ours: checkpoint", _by(checkpoint), DEFAULTS),
        Way("ours: checkpoint, no random state", _by(checkpoint, **forgetful), NO_STATE),
        Way(NON_REENTRANT, _by(theirs, use_reentrant=False), DEFAULTS),
        Way(f"{NON_REENTRANT}, no random state", _by(theirs, use_reentrant=False, **forgetful), NO_STATE),
        Way(REENTRANT, _by(theirs, use_reentrant=True), DEFAULTS),
        Way(f"{REENTRANT}, no random state", _by(theirs, use_reentrant=True, **forgetful), NO_STATE),
        Way(SELECTIVE, _by(theirs, use_reentrant=False, context_fn=saving_products), DEFAULTS),
    ]
    if torch_remat is not None:
        found.append(Way(REMAT, lambda fn: torch_remat.checkpoint(region_name="region")(fn), NO_STATE))
    return [*found, Way(BY_HAND, _by_hand, NO_STATE)]


def absent() -> list[str]:
    """What would be compared if it were installed."""
    return [REMAT] if torch_remat is None else []
