"""Rotary position embedding (Su et al. 2021) on packed projections.

s sequence, b micro-batch, g key/value heads, r query heads per key/value head, d head size, t tensor-parallel size.

The projection arrives packed by group, ``[s, b, g/t, r + 2, d]``: r query heads, their key, their value.  Attention
wants queries, keys and values side by side, ``[s, b, (r + 2) g/t, d]``, all in ONE storage: then that storage is all
that attention saves, 2sb(a + 2g)d/t bytes, and nothing depends on the projection's own output any more.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megackpt.config.model import ModelConfig

# Fixed in every Llama 3.x model, and in Megatron-LM's --use-rope-scaling.
LLAMA3_CONTEXT, LLAMA3_LOW, LLAMA3_HIGH = 8192, 1.0, 4.0


def rope_tables(config: ModelConfig, rotated: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Cosines and sines, ``[2, s, 1, 1, rotated/2]``, in fp32 (fp64 for an fp64 model)."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    frequencies = config.rotary_base ** (-torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    if config.use_rope_scaling:
        frequencies = _stretched(frequencies, config.rope_scaling_factor)
    positions = torch.arange(config.seq_length, dtype=torch.float64) / config.rotary_interpolation
    angles = torch.outer(positions, frequencies)
    tables = torch.stack((angles.cos(), angles.sin())).view(2, config.seq_length, 1, 1, rotated // 2)
    return tables.to(device=device, dtype=wide)


def _stretched(frequencies: Tensor, factor: float) -> Tensor:
    """Llama 3.1's scaling: wavelengths above 8192 positions grow by ``factor``, those below 2048 stay, and between
    them the share that grows rises with 8192 / wavelength."""
    turns = LLAMA3_CONTEXT * frequencies / (2 * math.pi)  # of each pair of channels over the original context
    kept = ((turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / factor)


def _rotate(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the leading ``2 * cos.shape[-1]`` channels of x into out; copy the rest."""
    half = cos.shape[-1]
    first, second = x[..., :half].to(cos.dtype), x[..., half : 2 * half].to(cos.dtype)
    out[..., :half] = first * cos - second * sin
    out[..., half : 2 * half] = second * cos + first * sin
    out[..., 2 * half :] = x[..., 2 * half :]


class _Unpack(torch.autograd.Function):
    """[s, b, g, r+2, d] -> [s, b, (r+2)g, d]; queries and keys rotated if tables are given.  Saves nothing: the
    backward of a rotation is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, tables: Tensor | None) -> Tensor:
        s, b, g, width, d = packed.shape
        ctx.tables, ctx.shape = tables, packed.shape
        out = packed.new_empty(s, b, width * g, d)
        _transfer(packed, out, tables, back=False)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        packed = grad.new_empty(ctx.shape)
        _transfer(packed, grad, ctx.tables, back=True)
        return packed, None


def _transfer(packed: Tensor, flat: Tensor, tables: Tensor | None, *, back: bool) -> None:
    """Move queries, keys and values between the two layouts, from packed to flat or back."""
    s, b, g, width, d = packed.shape
    r = width - 2
    queries, keys, values = flat.split((r * g, g, g), dim=2)
    parts = ((packed[..., :r, :], queries.unflatten(2, (g, r))), (packed[..., r, :], keys))
    for in_packed, in_flat in parts:
        source, target = (in_flat, in_packed) if back else (in_packed, in_flat)
        if tables is None:
            target.copy_(source)
            continue
        cos, sin = tables[0], tables[1]
        if source.dim() == 5:
            cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
        _rotate(target, source, cos, -sin if back else sin)
    if back:
        packed[..., r + 1, :] = values
    else:
        values.copy_(packed[..., r + 1, :])


def unpack(packed: Tensor, tables: Tensor | None) -> Tensor:
    """Queries, keys and values side by side, ``[s, b, (r+2)g/t, d]``, rotated by ``tables`` if given."""
    return _Unpack.apply(packed, tables)
