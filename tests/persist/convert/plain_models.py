"""GPT-2, Llama and Qwen 3 written plainly from their papers over tensors with Hugging Face's names: an oracle for
converted weights that knows nothing of ours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # [heads, s, d] each
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -math.inf).softmax(-1) @ v


def gpt2(w: Mapping[str, Tensor], config: Mapping[str, Any], ids: Tensor) -> Tensor:  # [s] -> [s, V]
    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], config["layer_norm_epsilon"])

    def linear(x: Tensor, name: str) -> Tensor:  # matrices are input-first
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    x = w["transformer.wte.weight"][ids] + w["transformer.wpe.weight"][: len(ids)]
    for i in range(config["n_layer"]):
        at = f"transformer.h.{i}"
        heads = linear(norm(x, f"{at}.ln_1"), f"{at}.attn.c_attn").chunk(3, -1)
        q, k, v = (part.unflatten(-1, (config["n_head"], -1)).transpose(0, 1) for part in heads)
        x = x + linear(attention(q, k, v).transpose(0, 1).flatten(1), f"{at}.attn.c_proj")
        y = linear(norm(x, f"{at}.ln_2"), f"{at}.mlp.c_fc")
        y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        x = x + linear(y, f"{at}.mlp.c_proj")
    return norm(x, "transformer.ln_f") @ w["transformer.wte.weight"].T


def llama(w: Mapping[str, Tensor], config: Mapping[str, Any], ids: Tensor) -> Tensor:  # [s] -> [s, V]
    d, groups = config["head_dim"], config["num_key_value_heads"]

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]) * w[f"{name}.weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    angles = torch.outer(torch.arange(len(ids)).double(), config["rope_theta"] ** (-torch.arange(0, d, 2).double() / d))
    turns = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)

    def rotate(x: Tensor) -> Tensor:  # [heads, s, d]: channel i turns with channel i + d/2
        first, second = x.chunk(2, -1)
        turned = torch.complex(first.contiguous(), second.contiguous()) * turns
        return torch.cat((turned.real, turned.imag), -1)

    x = w["model.embed_tokens.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        y = norm(x, f"{at}.input_layernorm")
        parts = [linear(y, f"{at}.self_attn.{name}_proj").unflatten(-1, (-1, d)).transpose(0, 1) for name in "qkv"]
        if config["model_type"] == "qwen3":
            parts[:2] = (norm(part, f"{at}.self_attn.{name}_norm") for part, name in zip(parts, "qk", strict=False))
        q, k, v = rotate(parts[0]), rotate(parts[1]), parts[2]
        k, v = (part.repeat_interleave(q.shape[0] // groups, 0) for part in (k, v))
        x = x + linear(attention(q, k, v).transpose(0, 1).flatten(1), f"{at}.self_attn.o_proj")
        y = norm(x, f"{at}.post_attention_layernorm")
        y = F.silu(linear(y, f"{at}.mlp.gate_proj")) * linear(y, f"{at}.mlp.up_proj")
        x = x + linear(y, f"{at}.mlp.down_proj")
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return norm(x, "model.norm") @ w[head].T
