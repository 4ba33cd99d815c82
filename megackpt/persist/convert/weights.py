"""A model's weights as all converters see them, and the layouts that formats disagree about.

Letters: a query heads, g key/value heads, r = a/g, d head size, h hidden, f feed-forward size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from megackpt.config.errors import UsageError
from megackpt.config.model import ModelConfig
from megackpt.persist.agree import CheckpointError

Make = Callable[[], Tensor]
"""Makes one whole tensor when it is wanted."""


VOCABULARY_TABLES = ("embedding.word.weight", "head.weight")
"""Tensors with one row for each entry of the vocabulary."""


@dataclass(frozen=True)
class Weights:
    """What a checkpoint of any format holds.

    `tensors` has a function for each of `shapes(model, vocab)`, which makes that tensor, without padding rows;
    `source` and `notes` are words for the user; `dtype` is the type of the stored weights.
    """

    model: ModelConfig
    vocab: int
    tensors: Mapping[str, Make]
    dtype: torch.dtype
    source: str
    notes: tuple[str, ...] = ()

    def make(self, name: str) -> Tensor:
        """The tensor of that global name.  Raises CheckpointError when it is missing or has another shape."""
        expected = shapes(self.model, self.vocab)[name]
        if name not in self.tensors:
            raise CheckpointError(f"{self.source} has nothing for {name} {list(expected)}")
        tensor = self.tensors[name]()
        if tuple(tensor.shape) != expected:
            raise CheckpointError(
                f"{self.source}: {name} comes out as {list(tensor.shape)}, but the configuration says {list(expected)}"
            )
        return tensor

    def make_as(self, name: str, dtype: torch.dtype) -> Tensor:
        """The same in another type.  Raises UsageError if one of its numbers is too large for that."""
        tensor = self.make(name)
        made = tensor.to(dtype)
        narrower = torch.finfo(dtype).max < torch.finfo(tensor.dtype).max
        if narrower and not torch.equal(made.isfinite(), tensor.isfinite()):
            raise UsageError(
                f"{self.source}: {name} has numbers up to {float(tensor.abs().max()):.4g}, which"
                f" {str(dtype).removeprefix('torch.')} cannot hold. Give --dtype bf16 or fp32."
            )
        return made


def shapes(model: ModelConfig, vocab: int) -> dict[str, tuple[int, ...]]:
    """Global names and shapes of every parameter; vocabulary tables have `vocab` rows, no padding."""
    h, f, d = model.hidden_size, model.ffn_hidden_size, model.kv_channels
    queries, packed = model.num_attention_heads * d, (model.num_attention_heads + 2 * model.num_query_groups) * d
    pair = (2,) if model.gated else ()
    bias, offset = model.add_bias_linear, model.normalization == "LayerNorm"

    found: dict[str, tuple[int, ...]] = {"embedding.word.weight": (vocab, h)}
    if model.position_embedding_type == "learned_absolute":
        found["embedding.position.weight"] = (model.max_position_embeddings, h)
    for i in range(model.num_layers):
        layer: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]] = {
            "attn.norm": ((h,), (h,) if offset else None),
            "attn.qkv": ((packed, h), (packed,) if bias else None),
            "attn.proj": ((h, queries), (h,) if bias else None),
            "mlp.norm": ((h,), (h,) if offset else None),
            "mlp.up": ((*pair, f, h), (*pair, f) if bias else None),
            "mlp.down": ((h, f), (h,) if bias else None),
        }
        if model.qk_layernorm:
            layer |= dict.fromkeys(("attn.q_norm", "attn.k_norm"), ((d,), (d,) if offset else None))
        for name, (weight, extra) in layer.items():
            found[f"layers.{i}.{name}.weight"] = weight
            if extra is not None:
                found[f"layers.{i}.{name}.bias"] = extra
    found["head.norm.weight"] = (h,)
    if offset:
        found["head.norm.bias"] = (h,)
    if not model.tie_embeddings:
        found["head.weight"] = (vocab, h)
    return found


def join_qkv(model: ModelConfig, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Rows [a d, ...], [g d, ...] twice -> [(a + 2g) d, ...]: for each group its r queries, its key, its value."""
    groups, d = model.num_query_groups, model.kv_channels
    parts = [part.reshape(groups, -1, d, *part.shape[1:]) for part in (query, key, value)]
    return torch.cat(parts, dim=1).flatten(0, 2)


def split_qkv(model: ModelConfig, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of `join_qkv`."""
    groups, d = model.num_query_groups, model.kv_channels
    grouped = packed.reshape(groups, -1, d, *packed.shape[1:])
    query, key, value = grouped.split((grouped.shape[1] - 2, 1, 1), dim=1)
    return query.flatten(0, 2), key.flatten(0, 2), value.flatten(0, 2)


def with_vocabulary(weights: Weights, vocab: int) -> Weights:
    """The same weights with fewer rows in their vocabulary tables: what lies beyond is padding.

    Raises UsageError if there are not that many rows.
    """
    if vocab > weights.vocab:
        raise UsageError(f"--vocab-size {vocab}: {weights.source} has {weights.vocab} rows")
    cut: dict[str, Make] = dict(weights.tensors)
    for name in VOCABULARY_TABLES:
        if name in cut:
            cut[name] = partial(_first_rows, weights.tensors[name], vocab)
    return replace(weights, vocab=vocab, model=replace(weights.model, vocab_size=vocab), tensors=cut)


def _first_rows(make: Make, rows: int) -> Tensor:
    return make()[:rows]
