"""Normalisation of each query and each key over its own channels (`--qk-layernorm`; Dehghani et al. 2023, Qwen 3).

s sequence, b micro-batch, g key/value heads, r query heads per key/value head, d head size, t tensor-parallel size.

All heads share one weight for queries and one for keys.  A tensor-parallel rank has some of the heads and so a part of
the gradient of these weights, with sequence parallelism or without it: their records say `partial`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from megackpt.config.model import ModelConfig
from megackpt.tensor.context import TensorParallel
from megackpt.tensor.parameters import new_parameter


class HeadNorm(nn.Module):
    """The weights of the norm of all queries, or of all keys: `weight` [d], of a LayerNorm `bias` [d] as well."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, name: str) -> None:
        super().__init__()
        shape = (config.kv_channels,)
        self.weight = new_parameter(tp, shape, name=f"{name}.weight", kind="ones", partial=True, decay=False)
        self.bias: Parameter | None = None
        if config.normalization == "LayerNorm":
            self.bias = new_parameter(tp, shape, name=f"{name}.bias", kind="zeros", partial=True, decay=False)


class _HeadNorms(torch.autograd.Function):
    """Saves its input and one wide number per row, with a LayerNorm two: rows are queries and keys, not values."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, epsilon: float, *weights: Tensor) -> Tensor:
        out = torch.empty_like(packed)
        rows, target = packed[..., :-1, :], out[..., :-1, :]
        wide = target if _is_wide(packed) else rows.new_empty(rows.shape, dtype=torch.float32)
        wide.copy_(rows)
        statistics: list[Tensor] = []
        if len(weights) == 4:
            statistics.append(wide.mean(-1, keepdim=True))
            wide.sub_(statistics[0])
        rstd = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        statistics.append(rstd.square_().div_(packed.shape[-1]).add_(epsilon).rsqrt_())
        wide.mul_(rstd)
        queries, keys = wide[..., :-1, :], wide[..., -1, :]
        queries.mul_(weights[0])
        keys.mul_(weights[1])
        if len(weights) == 4:
            queries.add_(weights[2])
            keys.add_(weights[3])
        if wide is not target:
            target.copy_(wide)
        out[..., -1, :] = packed[..., -1, :]
        ctx.save_for_backward(packed, *weights[:2], *statistics)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        packed, query_weight, key_weight, *statistics = ctx.saved_tensors
        kind = packed.dtype
        normed = packed[..., :-1, :].to(statistics[-1].dtype, copy=True)
        if len(statistics) == 2:
            normed.sub_(statistics[0])
        normed.mul_(statistics[-1])
        scaled = grad[..., :-1, :].to(normed.dtype, copy=True)
        scratch = scaled * normed
        grads = [scratch.sum((0, 1, 2))]  # [r + 1, d]
        if len(statistics) == 2:
            grads.append(scaled.sum((0, 1, 2)))
        of_weights = [part.to(kind) for both in grads for part in (both[:-1].sum(0), both[-1])]
        scaled[..., :-1, :].mul_(query_weight)
        scaled[..., -1, :].mul_(key_weight)
        torch.mul(scaled, normed, out=scratch)
        scaled.sub_(normed.mul_(scratch.mean(-1, keepdim=True)))
        del scratch, normed
        if len(statistics) == 2:
            # of the rest of the gradient, as the rows of `normed` have a mean of 0
            scaled.sub_(scaled.mean(-1, keepdim=True))
        scaled.mul_(statistics[-1])
        grad_packed = torch.empty_like(packed)
        grad_packed[..., :-1, :] = scaled
        grad_packed[..., -1, :] = grad[..., -1, :]
        return grad_packed, None, *of_weights


def _is_wide(x: Tensor) -> bool:
    return x.dtype in (torch.float32, torch.float64)


def norm_heads(packed: Tensor, queries: HeadNorm, keys: HeadNorm, epsilon: float) -> Tensor:
    """[s, b, g/t, r + 2, d] -> the same, the r queries and the key of each group normed, the value as it is."""
    biases = [] if queries.bias is None or keys.bias is None else [queries.bias, keys.bias]
    return _HeadNorms.apply(packed, epsilon, queries.weight, keys.weight, *biases)
