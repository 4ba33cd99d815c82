"""Names and layouts of Megatron-LM's tensors, both generations, and how the ranks' parts become one tensor."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megackpt.config.model import ModelConfig


@dataclass(frozen=True)
class Named:
    """One of our tensors (global name) and its name in a chunk; `dim` is the one its parts lie side by side in."""

    ours: str
    theirs: str
    dim: int | None


_COLUMN, _ROW = 0, 1
# Module of ours -> modules of theirs (any generation), dimension of weight, dimension of bias.
_MODULES: dict[str, tuple[tuple[str, ...], int | None, int | None]] = {
    "attn.norm": (("input_layernorm", "input_norm", "self_attention.linear_qkv.layer_norm"), None, None),
    "attn.qkv": (("self_attention.query_key_value", "self_attention.linear_qkv", "attention.query_key_value"), 0, 0),
    "attn.q_norm": (("self_attention.q_layernorm",), None, None),
    "attn.k_norm": (("self_attention.k_layernorm",), None, None),
    "attn.proj": (("self_attention.dense", "self_attention.linear_proj", "attention.dense"), _ROW, None),
    "mlp.norm": (
        ("post_attention_layernorm", "post_attention_norm", "pre_mlp_layernorm", "mlp.linear_fc1.layer_norm"),
        None,
        None,
    ),
    "mlp.up": (("mlp.dense_h_to_4h", "mlp.linear_fc1"), _COLUMN, _COLUMN),
    "mlp.down": (("mlp.dense_4h_to_h", "mlp.linear_fc2"), _ROW, None),
}
_ENDS: dict[str, tuple[tuple[str, ...], int | None]] = {
    "embedding.word.weight": (("embedding.word_embeddings.weight", "word_embeddings.weight"), _COLUMN),
    "embedding.position.weight": (("embedding.position_embeddings.weight",), None),
    "head.norm.weight": (("final_layernorm.weight", "final_norm.weight"), None),
    "head.norm.bias": (("final_layernorm.bias", "final_norm.bias"), None),
    "head.weight": (("output_layer.weight",), _COLUMN),
}
_NO_WEIGHTS = ("_extra_state", "inv_freq", "word_embeddings_for_head.weight")  # the last is a tied copy
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)")


def layer_count(chunk: Collection[str]) -> int:
    """Layers in a chunk, by the names of its tensors."""
    return len({match[1] for name in chunk if (match := _LAYER.fullmatch(name))})


def unknown(chunk: Collection[str]) -> list[str]:
    """Tensors of a chunk that our model has nothing for: it would compute something else without them."""
    known = {named.theirs for named in canonical(chunk, 0)}
    return sorted(name for name in chunk if name not in known and not name.endswith(_NO_WEIGHTS))


def canonical(chunk: Collection[str], offset: int) -> Iterator[Named]:
    """Every tensor of ours that a chunk holds; its first layer is layer `offset` of the model."""
    for name in chunk:
        match = _LAYER.fullmatch(name)
        named = _in_layer(name, int(match[1]) + offset, match[2]) if match else _at_end(name)
        if named is not None:
            yield named


def _in_layer(name: str, layer: int, rest: str) -> Named | None:
    for ours, (modules, weight_dim, bias_dim) in _MODULES.items():
        for module in modules:
            for kind, dim in (("weight", weight_dim), ("bias", bias_dim)):
                if rest in (f"{module}.{kind}", f"{module}_{kind}"):
                    return Named(f"layers.{layer}.{ours}.{kind}", name, dim)
    return None


def _at_end(name: str) -> Named | None:
    for ours, (endings, dim) in _ENDS.items():
        if name.endswith(tuple(f".{ending}" for ending in endings)) or name in endings:
            return Named(ours, name, dim)
    return None


def merge(parts: list[Tensor], name: Named, model: ModelConfig, version: float) -> Tensor:
    """The whole tensor of the tensor-parallel ranks' parts, in our layout.

    `version` is the checkpoint's: before 2 the rows of queries, keys and values were ordered otherwise.
    """
    if ".attn.qkv." in name.ours and version < 2.0:
        parts = [_by_head(part, model.kv_channels, version) for part in parts]
    if name.dim is None:
        whole = parts[0]
    elif ".mlp.up." in name.ours and model.gated:
        # Each rank holds its columns of the gate, then those of the other product.
        whole = torch.cat([part.unflatten(0, (2, -1)) for part in parts], dim=1)
    else:
        whole = torch.cat(parts, dim=name.dim)
    return whole


def _by_head(part: Tensor, d: int, version: float) -> Tensor:
    """Rows ordered [3, heads, d] (version 0) or [heads, d, 3] (version 1) -> [heads, 3, d]."""
    if version < 1.0:
        return part.unflatten(0, (3, -1, d)).transpose(0, 1).flatten(0, 2)
    return part.unflatten(0, (-1, d, 3)).transpose(1, 2).flatten(0, 2)
