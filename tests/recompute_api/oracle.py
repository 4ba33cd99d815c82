"""Run one function three ways (plainly, under torch's checkpoint, under ours) and compare everything it leaves."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from megackpt.recompute import checkpoint

LossOf = Callable[[Callable[..., Any]], Tensor]


@dataclass
class Outcome:
    """What one training step leaves behind."""

    loss: Tensor
    gradients: list[Tensor | None]
    rng: Tensor

    def assert_equal(self, other: Outcome) -> None:
        assert torch.equal(self.loss, other.loss)
        assert torch.equal(self.rng, other.rng)
        assert len(self.gradients) == len(other.gradients)
        for mine, theirs in zip(self.gradients, other.gradients, strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.equal(mine, theirs)


def plainly(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return fn(*args, **kwargs)


def by_torch(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return torch_checkpoint(fn, *args, use_reentrant=False, **kwargs)


def outcome(loss_of: LossOf, leaves: Sequence[Tensor], call: Any, seed: int = 7) -> Outcome:
    """What ``loss_of(call)`` leaves, which runs its region through ``call``."""
    torch.manual_seed(seed)
    for leaf in leaves:
        leaf.grad = None
    loss = loss_of(call)
    loss.backward()
    gradients = [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]
    return Outcome(loss.detach().clone(), gradients, torch.get_rng_state())


def assert_same(loss_of: LossOf, leaves: Sequence[Tensor], *, torch_too: bool = True) -> None:
    """Ours, torch's and the plain run agree to the bit."""
    plain = outcome(loss_of, leaves, plainly)
    outcome(loss_of, leaves, checkpoint).assert_equal(plain)
    if torch_too:
        outcome(loss_of, leaves, by_torch).assert_equal(plain)


class Saved:
    """Counts bytes that autograd holds for backward: storages of what is saved while a region runs, parameters
    excluded.  Ours pass through outer hooks as they should, so one counter serves both."""

    def __init__(self, parameters: Sequence[Tensor] = ()) -> None:
        self._skip = {p.untyped_storage()._cdata for p in parameters}
        self.storages: dict[int, int] = {}

    def __enter__(self) -> Saved:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t)
        self._hooks.__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        self._hooks.__exit__(*failure)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._skip:
            self.storages[storage._cdata] = storage.nbytes()
        return tensor

    @property
    def bytes(self) -> int:
        return sum(self.storages.values())
