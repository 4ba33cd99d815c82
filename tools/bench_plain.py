"""The other side of `bench_train.py`: the same GPT in plain PyTorch, as a good user of PyTorch writes it.

Standard modules' functions, fused attention, fused AdamW, gradient accumulation; recompute is torch's own, without
reentry: around each layer (full), or around core attention (selective).

b samples, s sequence, h hidden, a heads, d head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Batch = Mapping[str, Tensor]
"""tokens and labels, int64 [b, s]"""


@dataclass(frozen=True)
class Model:
    """Sizes, attention and dropout of the model that both sides train."""

    layers: int = 6
    hidden: int = 256
    heads: int = 8
    seq: int = 256
    vocab: int = 8192
    dropout: float = 0.0
    fused: bool = True


class Layer(nn.Module):
    """Pre-norm transformer layer, [b, s, h] -> [b, s, h]."""

    def __init__(self, model: Model, recompute: str) -> None:
        super().__init__()
        h = model.hidden
        self.model, self.recompute = model, recompute
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.proj = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        shape = (b, s, self.model.heads, h // self.model.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(h, dim=2))
        core = again(self._core, self.model) if self.recompute == "selective" else self._core
        y = self.proj(core(q, k, v).transpose(1, 2).reshape(b, s, h))
        x = x + F.dropout(y, self.model.dropout)
        y = self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return x + F.dropout(y, self.model.dropout)

    def _core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # [b, a, s, d] each
        p = self.model.dropout
        if self.model.fused:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(-1, -2)) * (1.0 / math.sqrt(q.shape[-1]))
        return F.dropout(F.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1), p) @ v


def again(fn: Callable[..., Tensor], model: Model) -> Callable[..., Tensor]:
    """`fn` with torch's recompute around it; the random state is stashed only where something draws."""

    def call(*args: Tensor) -> Tensor:
        result: Tensor = checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=model.dropout > 0)
        return result

    return call


class PlainGPT(nn.Module):
    """GPT-2 with an untied head; token ids [b, s] to logits [b, s, V]."""

    def __init__(self, model: Model, recompute: str) -> None:
        super().__init__()
        self.model, self.recompute = model, recompute
        self.word = nn.Embedding(model.vocab, model.hidden)
        self.position = nn.Embedding(model.seq, model.hidden)
        self.layers = nn.ModuleList(Layer(model, recompute) for _ in range(model.layers))
        self.norm = nn.LayerNorm(model.hidden)
        self.head = nn.Linear(model.hidden, model.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.word(tokens) + self.position.weight[: tokens.shape[1]]
        x = F.dropout(x, self.model.dropout)
        for layer in self.layers:
            x = again(layer, self.model)(x) if self.recompute == "full" else layer(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Start from the trainer's weights, given by their global names."""
        for mine, theirs in self._names().items():
            value = weights[theirs]
            if ".qkv." in theirs:  # by head: query, key, value -> all queries, all keys, all values
                value = value.view(self.model.heads, 3, -1, *value.shape[1:]).transpose(0, 1).reshape(value.shape)
            self.get_parameter(mine).copy_(value)

    def _names(self) -> dict[str, str]:
        places = {
            "norm1": "attn.norm", "qkv": "attn.qkv", "proj": "attn.proj",
            "norm2": "mlp.norm", "up": "mlp.up", "down": "mlp.down",
        }  # fmt: skip
        ends = {
            "word.weight": "embedding.word.weight", "position.weight": "embedding.position.weight",
            "norm.weight": "head.norm.weight", "norm.bias": "head.norm.bias", "head.weight": "head.weight",
        }  # fmt: skip
        return ends | {
            f"layers.{i}.{mine}.{kind}": f"layers.{i}.{theirs}.{kind}"
            for i in range(self.model.layers)
            for mine, theirs in places.items()
            for kind in ("weight", "bias")
        }


class PlainTrainer:
    """The loop: accumulate, clip, update."""

    def __init__(self, model: Model, recompute: str, weights: Mapping[str, Tensor], lr: float) -> None:
        self.net = PlainGPT(model, recompute)
        self.net.take_weights(weights)
        matrices = [p for p in self.net.parameters() if p.dim() >= 2]
        vectors = [p for p in self.net.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.999), eps=1e-8, fused=True)

    def loss(self, batch: Batch) -> Tensor:
        logits = self.net(batch["tokens"])
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), batch["labels"].reshape(-1))

    def step(self, batches: Sequence[Batch]) -> float:
        """One optimizer step over the micro-batches; returns their mean loss before it."""
        total = torch.zeros(())
        for batch in batches:
            loss = self.loss(batch) / len(batches)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total.item()
