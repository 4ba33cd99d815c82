"""The MLP as a chain of steps.  f feed-forward size; other letters as in attention.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megackpt.config.model import ModelConfig
from megackpt.model.norm import make_norm
from megackpt.model.residual import Residual, gather_step, reduce_step
from megackpt.recompute import Scope
from megackpt.tensor.context import TensorParallel
from megackpt.tensor.linear import ColumnLinear, RowLinear


def gelu(x: Tensor) -> Tensor:
    """GPT-2's GELU (tanh form); saves its input."""
    return F.gelu(x, approximate="tanh")


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up over [gate | up] in the last dimension.  Saves its input alone; plain operations would keep
    silu(gate) as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        if torch.compiler.is_compiling():  # which does not see through `out=` into a part, and fuses all of this
            sigmoid = torch.sigmoid(gate)
            slope = (gate * (1.0 - sigmoid) + 1.0) * sigmoid
            return torch.cat((grad * (slope * up), grad * (gate * sigmoid)), dim=-1)
        out = torch.empty_like(x)
        grad_gate, grad_up = out.chunk(2, dim=-1)
        sigmoid = torch.sigmoid(gate)
        torch.mul(grad, gate * sigmoid, out=grad_up)
        slope = gate.mul(sigmoid.neg().add_(1.0)).add_(1.0).mul_(sigmoid)  # of silu
        torch.mul(grad, slope.mul_(up), out=grad_gate)
        return out


class _SquaredReLU(torch.autograd.Function):
    """relu(x)^2 (So et al. 2021); saves its input alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.relu(x).square_()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return F.relu(x).mul_(grad).mul_(2.0)


def _activation(config: ModelConfig) -> Callable[[Tensor], Tensor]:
    if config.swiglu:
        return _SwiGLU.apply
    return _SquaredReLU.apply if config.squared_relu else gelu


class MLP(nn.Module):
    """Norm, product up, activation, product down, reduction, residual.  ``name`` is global (``layers.3.mlp``)."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, name: str) -> None:
        super().__init__()
        self.tp = tp
        self.norm = make_norm(config, tp, f"{name}.norm")
        self.up = ColumnLinear(
            tp,
            config.hidden_size,
            config.ffn_hidden_size * (2 if config.gated else 1),
            name=f"{name}.up",
            std=config.init_method_std,
            bias=config.add_bias_linear,
            gated=config.gated,
        )
        self.down = RowLinear(
            tp,
            config.ffn_hidden_size,
            config.hidden_size,
            name=f"{name}.down",
            std=config.init_method_std / (2.0 * config.num_layers) ** 0.5,
            bias=config.add_bias_linear,
        )
        self.activation = _activation(config)
        self.residual = Residual(config, tp, self.down.bias_after)

    def forward(self, step: Scope, x: Tensor) -> Tensor:  # [s/t, b, h] -> [s/t, b, h]
        steps = (
            ("mlp.norm", self.norm),  # [s/t, b, h]
            *gather_step("mlp.gather", self.tp),  # [s, b, h]
            ("mlp.up", self.up),  # [s, b, f/t], twice that if gated
            ("mlp.act", self.activation),  # [s, b, f/t]
            ("mlp.down", self.down),  # [s, b, h], partial
            *reduce_step("mlp.reduce", self.tp),  # [s/t, b, h]
        )
        return step.branch(x, steps, ("mlp.residual", self.residual))
