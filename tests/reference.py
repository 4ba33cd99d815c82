"""GPT and its training in plain PyTorch: the measure of every layout.

Nothing of the product is used: F.linear, F.layer_norm, a softmax written out, F.cross_entropy, autograd, a hand-made
AdamW.  What is shared with the product is its naming of weights and how one projection holds queries, keys and
values: by group, the queries of a group, then its key, then its value.

b samples, s sequence, h hidden, a heads, g key/value groups, r = a/g, d head size, f feed-forward size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]
Batch = Mapping[str, Tensor]
"""tokens, labels (int64) and loss_mask, each [b, s]"""


@dataclass(frozen=True)
class Shape:
    """What the weights alone do not say."""

    layers: int
    heads: int
    groups: int
    head_size: int
    rope: bool = False
    rms: bool = False
    gated: bool = False
    tied: bool = True
    epsilon: float = 1e-5
    rotary_base: float = 10000.0


def rotate(x: Tensor, base: float) -> Tensor:
    """x [b, s, d]: channel i is paired with i + d/2 and the pair turned by position * base^(-2i/d)."""
    s, d = x.shape[1:]
    angles = torch.outer(torch.arange(s).double(), base ** (-torch.arange(0, d, 2).double() / d))
    pairs = torch.complex(x[..., : d // 2].double(), x[..., d // 2 :].double())
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1).to(x.dtype)


def norm(x: Tensor, w: Weights, name: str, shape: Shape) -> Tensor:
    if shape.rms:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + shape.epsilon) * w[f"{name}.weight"]
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], shape.epsilon)


def attention(x: Tensor, w: Weights, name: str, shape: Shape) -> Tensor:
    """Causal self-attention, one head after the other; x [b, s, h] is normed already."""
    d, r = shape.head_size, shape.heads // shape.groups
    s = x.shape[1]
    hidden = torch.full((s, s), -math.inf, dtype=x.dtype).triu(1)
    packed = F.linear(x, w[f"{name}.qkv.weight"], w.get(f"{name}.qkv.bias"))
    turned = (lambda y: rotate(y, shape.rotary_base)) if shape.rope else (lambda y: y)
    normed = f"{name}.q_norm.weight" in w
    heads = []
    for group in packed.split((r + 2) * d, dim=-1):
        *queries, key, value = group.split(d, dim=-1)  # [b, s, d] each
        if normed:
            queries = [norm(query, w, f"{name}.q_norm", shape) for query in queries]
            key = norm(key, w, f"{name}.k_norm", shape)
        key = turned(key)
        for query in queries:
            scores = turned(query) @ key.transpose(1, 2) / math.sqrt(d) + hidden
            heads.append(scores.softmax(-1) @ value)
    return F.linear(torch.cat(heads, dim=-1), w[f"{name}.proj.weight"], w.get(f"{name}.proj.bias"))


def mlp(x: Tensor, w: Weights, name: str, shape: Shape) -> Tensor:
    up, down = w[f"{name}.up.weight"], w[f"{name}.down.weight"]
    if shape.gated:  # [2, f, h]: gate, then up
        y = F.silu(F.linear(x, up[0])) * F.linear(x, up[1])
    else:
        y = F.gelu(F.linear(x, up, w.get(f"{name}.up.bias")), approximate="tanh")
    return F.linear(y, down, w.get(f"{name}.down.bias"))


def logits(w: Weights, tokens: Tensor, shape: Shape) -> Tensor:
    """[b, s] -> [b, s, vocabulary]"""
    x = F.embedding(tokens, w["embedding.word.weight"])
    if not shape.rope:
        x = x + w["embedding.position.weight"][: tokens.shape[1]]
    for i in range(shape.layers):
        x = x + attention(norm(x, w, f"layers.{i}.attn.norm", shape), w, f"layers.{i}.attn", shape)
        x = x + mlp(norm(x, w, f"layers.{i}.mlp.norm", shape), w, f"layers.{i}.mlp", shape)
    x = norm(x, w, "head.norm", shape)
    return F.linear(x, w["embedding.word.weight" if shape.tied else "head.weight"])


def mean_loss(w: Weights, batch: Batch, shape: Shape) -> Tensor:
    """Mean over the unmasked tokens of the whole batch."""
    mask = batch["loss_mask"].flatten() > 0
    every = F.cross_entropy(
        logits(w, batch["tokens"], shape).flatten(0, 1), batch["labels"].flatten(), reduction="none"
    )
    return every[mask].mean()


def gradients(w: Weights, batch: Batch, shape: Shape) -> tuple[float, Weights]:
    """The loss and its gradient for every weight."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in w.items()}
    loss = mean_loss(leaves, batch, shape)
    loss.backward()
    return loss.item(), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


@dataclass
class AdamW:
    """Loshchilov & Hutter 2019, with clipping by the norm of all gradients.  Norms and biases do not decay."""

    rate: float
    clip: float = 1.0
    decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    steps: int = 0
    first: Weights = field(default_factory=dict)
    second: Weights = field(default_factory=dict)

    def update(self, w: Weights, grads: Weights) -> float:
        """Change `w` in place; returns the norm before clipping."""
        self.steps += 1
        total = math.sqrt(sum(g.double().square().sum().item() for g in grads.values()))
        factor = min(1.0, self.clip / (total + 1e-6)) if self.clip else 1.0
        one, two = self.betas
        for name, g in grads.items():
            g = g * factor
            m = self.first[name] = self.first.get(name, torch.zeros_like(g)) * one + (1 - one) * g
            v = self.second[name] = self.second.get(name, torch.zeros_like(g)) * two + (1 - two) * g * g
            if not (name.endswith(".bias") or "norm." in name):
                w[name] -= self.rate * self.decay * w[name]
            scale = math.sqrt(1 - two**self.steps)
            w[name] -= self.rate / (1 - one**self.steps) * m / (v.sqrt() / scale + self.epsilon)
        return total


@dataclass(frozen=True)
class Step:
    loss: float
    norm: float
    grads: Weights


def train(w: Weights, batches: Sequence[Batch], shape: Shape, optimizer: AdamW) -> list[Step]:
    """One step per batch, from `w`, which is left as it was."""
    w = {name: value.clone() for name, value in w.items()}
    steps = []
    for batch in batches:
        loss, grads = gradients(w, batch, shape)
        steps.append(Step(loss, optimizer.update(w, grads), grads))
    return steps
