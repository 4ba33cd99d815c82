"""Running small functions on a GPU with and without a plan, to compare every bit."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from megackpt.plan import ChunkPlan
from megackpt.recompute import RngLedger, Tape, step

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first product; else products may differ
DEVICE = torch.device("cuda")


def numbers(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def generator() -> torch.Generator:
    """The current device's default one."""
    return torch.cuda.default_generators[torch.cuda.current_device()]


def position() -> tuple[int, int]:
    """Seed and offset of the default generator: its whole state."""
    return generator().initial_seed(), generator().get_offset()


Body = Callable[..., Tensor]


def leaves_of(
    body: Body,
    leaves: Sequence[Tensor],
    chunk: ChunkPlan | None,
    *,
    ledger: RngLedger | None = None,
    between: Callable[[], object] = lambda: None,
    **tape: object,
) -> list[Tensor]:
    """Value, gradients, and the next numbers that the default generator would draw.  `between` forward and backward."""
    fresh = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    torch.manual_seed(7)
    with nullcontext() if chunk is None else Tape(chunk, ledger, **tape):  # type: ignore[arg-type]
        loss = body(*fresh).float().pow(2).sum()
    between()
    loss.backward()
    return [loss.detach(), *(leaf.grad for leaf in fresh if leaf.grad is not None), torch.rand(8, device=DEVICE)]


def assert_equal(a: Sequence[Tensor], b: Sequence[Tensor], where: object = "") -> None:
    assert len(a) == len(b)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)), where


def late(x: Tensor, w: Tensor) -> Tensor:
    """A chain whose every dropped tensor is needed in backward."""
    for name in "abcd":
        x = step(name, lambda x, w: F.dropout(torch.tanh(x @ w), 0.1), x, w)
    return x
