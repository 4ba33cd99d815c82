"""Normalisation over the hidden dimension.  s sequence, b micro-batch, h hidden, t tensor-parallel size."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megackpt.config.model import ModelConfig
from megackpt.tensor.context import TensorParallel
from megackpt.tensor.parameters import new_parameter


class LayerNorm(nn.Module):
    """Saves its input and two statistics per row: 8 bytes (fp32)."""

    def __init__(self, tp: TensorParallel, hidden_size: int, epsilon: float, name: str) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = new_parameter(
            tp, (hidden_size,), name=f"{name}.weight", kind="ones", partial_under_sp=True, decay=False
        )
        self.bias = new_parameter(
            tp, (hidden_size,), name=f"{name}.bias", kind="zeros", partial_under_sp=True, decay=False
        )

    def forward(self, x: Tensor) -> Tensor:  # [s/t, b, h] -> [s/t, b, h]
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


class _RMSNorm(torch.autograd.Function):
    """y = x w / sqrt(mean(x^2) + eps) (Zhang & Sennrich 2019).  Saves x, w and one fp32 number per row; the
    composite of plain operations would save the row four times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        rstd = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        return (wide * rstd).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight, rstd = ctx.saved_tensors
        wide_grad = grad.to(rstd.dtype)
        normed = x.to(rstd.dtype) * rstd
        grad_weight = (wide_grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        scaled = wide_grad * weight
        mean = (scaled * normed).mean(-1, keepdim=True)
        grad_x = scaled.sub_(normed.mul_(mean)).mul_(rstd)
        return grad_x.to(x.dtype), grad_weight, None


class RMSNorm(nn.Module):
    """Saves its input and one statistic per row: 4 bytes (fp32)."""

    def __init__(self, tp: TensorParallel, hidden_size: int, epsilon: float, name: str) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = new_parameter(
            tp, (hidden_size,), name=f"{name}.weight", kind="ones", partial_under_sp=True, decay=False
        )

    def forward(self, x: Tensor) -> Tensor:  # [s/t, b, h] -> [s/t, b, h]
        return _RMSNorm.apply(x, self.weight, self.epsilon)


def make_norm(config: ModelConfig, tp: TensorParallel, name: str) -> LayerNorm | RMSNorm:
    """The norm that the configuration names; ``name`` is the module's global name."""
    kind = RMSNorm if config.normalization == "RMSNorm" else LayerNorm
    return kind(tp, config.hidden_size, config.norm_epsilon, name)
