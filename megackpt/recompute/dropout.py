"""Dropout that can draw its mask again.

``torch.nn.functional.dropout`` saves its mask, so replaying it re-runs whatever produced its input.  Ours saves one
byte per element, or, when the plan says so, nothing but the position of its random stream: the mask after a
row-parallel product is then rebuilt without the product.

Masks are cut from 64-bit random words, four elements each, so a probability is rounded to a multiple of 2^-16; the
scale uses the rounded one, so the mean is exact.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megackpt.recompute.context import masks_kept
from megackpt.recompute.handle import mark_mask
from megackpt.recompute.rng import Stream

_LEVELS = 1 << 16


def keep_mask(shape: torch.Size | tuple[int, ...], p: float, generator: torch.Generator) -> Tensor:
    """A boolean mask that is False with probability ``p`` (rounded to 1/65536)."""
    count = math.prod(shape)
    words = torch.empty((count + 3) // 4, dtype=torch.int64, device=generator.device)
    words.random_(-(2**63), None, generator=generator)
    return (words.view(torch.int16)[:count] >= round(p * _LEVELS) - _LEVELS // 2).view(shape)


def keep_scale(p: float) -> float:
    """What kept elements are multiplied with, so that the mean stays."""
    return _LEVELS / (_LEVELS - round(p * _LEVELS))


class MaskSource:
    """One draw of a mask, kept or drawn again.  Made inside an autograd function's forward."""

    __slots__ = ("shape", "p", "stream", "position", "keep")

    def __init__(self, shape: torch.Size, p: float, stream: Stream) -> None:
        if not 0.0 <= p < 1.0 - 0.5 / _LEVELS:
            raise ValueError(f"dropout of {p}: a probability from 0 to below 1 (in steps of 1/{_LEVELS})")
        self.shape, self.p, self.stream = shape, p, stream
        self.position = stream.position
        self.keep = masks_kept()

    def first(self) -> Tensor:
        mask = keep_mask(self.shape, self.p, self.stream.draw())
        if self.keep:
            mark_mask(mask)
        return mask

    def again(self) -> Tensor:
        return keep_mask(self.shape, self.p, self.stream.at(self.position))


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source: MaskSource) -> Tensor:
        mask = source.first()
        ctx.source = source
        if source.keep:
            ctx.save_for_backward(mask)
        return (x * mask).mul_(keep_scale(source.p))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        source = ctx.source
        mask = ctx.saved_tensors[0] if source.keep else source.again()
        return (grad * mask).mul_(keep_scale(source.p)), None


def dropout(x: Tensor, p: float, stream: Stream | None, training: bool = True) -> Tensor:
    """``x`` with elements zeroed with probability ``p`` and the rest scaled by ``1/(1-p)``; one draw of ``stream``.

    Returns ``x`` itself when ``p`` is 0 or not ``training``; no draw happens then.
    """
    if p == 0.0 or not training:
        return x
    if stream is None:
        raise ValueError(f"dropout of {p} needs a random stream")
    return _Dropout.apply(x, MaskSource(x.shape, p, stream))
