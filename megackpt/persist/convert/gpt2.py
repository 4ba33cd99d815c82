"""GPT-2 as Hugging Face stores it: one projection for queries, keys and values, matrices input-first."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from megackpt.config.model import ModelConfig
from megackpt.persist.convert.families import Entry, Family, inexpressible, must_be, needed, plain
from megackpt.persist.convert.weights import join_qkv, split_qkv


def _read(config: Mapping[str, Any]) -> tuple[ModelConfig, int]:
    must_be(config, "activation_function", "gelu_new", "gelu_pytorch_tanh")
    must_be(config, "scale_attn_weights", True)
    must_be(config, "scale_attn_by_inverse_layer_idx", False)
    must_be(config, "add_cross_attention", False)
    hidden = int(needed(config, "n_embd"))
    vocab = int(needed(config, "vocab_size"))
    model = ModelConfig(
        num_layers=int(needed(config, "n_layer")),
        hidden_size=hidden,
        num_attention_heads=int(needed(config, "n_head")),
        ffn_hidden_size=int(config.get("n_inner") or 4 * hidden),
        seq_length=int(needed(config, "n_positions")),
        max_position_embeddings=int(needed(config, "n_positions")),
        vocab_size=vocab,
        norm_epsilon=float(config.get("layer_norm_epsilon", 1e-5)),
        tie_embeddings=bool(config.get("tie_word_embeddings", True)),
        hidden_dropout=float(config.get("resid_pdrop", 0.1)),
        attention_dropout=float(config.get("attn_pdrop", 0.1)),
        init_method_std=float(config.get("initializer_range", 0.02)),
    )
    return model, vocab


def _write(model: ModelConfig, vocab: int) -> dict[str, Any]:
    inexpressible(
        "gpt2",
        {
            "--normalization RMSNorm": model.normalization != "LayerNorm",
            f"--position-embedding-type {model.position_embedding_type}": model.position_embedding_type
            != "learned_absolute",
            "--qk-layernorm": model.qk_layernorm,
            "--swiglu": model.swiglu,
            "--squared-relu": model.squared_relu,
            "--disable-bias-linear": not model.add_bias_linear,
            "--group-query-attention": model.num_query_groups != model.num_attention_heads,
            f"--kv-channels {model.kv_channels}": model.kv_channels * model.num_attention_heads != model.hidden_size,
        },
    )
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": "gelu_new",
        "n_layer": model.num_layers,
        "n_embd": model.hidden_size,
        "n_head": model.num_attention_heads,
        "n_inner": model.ffn_hidden_size,
        "n_positions": model.max_position_embeddings,
        "n_ctx": model.max_position_embeddings,
        "vocab_size": vocab,
        "layer_norm_epsilon": model.norm_epsilon,
        "tie_word_embeddings": model.tie_embeddings,
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout,
        "initializer_range": model.init_method_std,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    }


def _entries(model: ModelConfig) -> list[Entry]:
    entries = [plain("embedding.word.weight", "wte.weight"), plain("embedding.position.weight", "wpe.weight")]
    for i in range(model.num_layers):
        ours, theirs = f"layers.{i}.", f"h.{i}."
        for kind in ("weight", "bias"):
            entries += [
                plain(f"{ours}attn.norm.{kind}", f"{theirs}ln_1.{kind}"),
                plain(f"{ours}mlp.norm.{kind}", f"{theirs}ln_2.{kind}"),
                Entry(
                    f"{ours}attn.qkv.{kind}",
                    (f"{theirs}attn.c_attn.{kind}",),
                    partial(_join, model),
                    partial(_split, model),
                ),
            ]
        pairs = {"attn.proj": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
        for name, other in pairs.items():
            entries.append(Entry(f"{ours}{name}.weight", (f"{theirs}{other}.weight",), _turned, _turned_alone))
            entries.append(plain(f"{ours}{name}.bias", f"{theirs}{other}.bias"))
    entries += [plain("head.norm.weight", "ln_f.weight"), plain("head.norm.bias", "ln_f.bias")]
    if not model.tie_embeddings:
        entries.append(plain("head.weight", "lm_head.weight"))
    return entries


def _turned(matrix: Tensor) -> Tensor:
    return matrix.t()


def _turned_alone(matrix: Tensor) -> tuple[Tensor, ...]:
    return (matrix.t(),)


def _join(model: ModelConfig, packed: Tensor) -> Tensor:
    rows = packed.t() if packed.dim() == 2 else packed  # [3 h, h] or [3 h]: queries, keys, values
    return join_qkv(model, *rows.chunk(3))


def _split(model: ModelConfig, packed: Tensor) -> tuple[Tensor, ...]:
    query, key, value = split_qkv(model, packed)
    rows = query.new_empty((3 * query.shape[0], *query.shape[1:]))
    for part, source in zip(rows.chunk(3), (query, key, value), strict=True):
        part.copy_(source)
    return (rows.t() if rows.dim() == 2 else rows,)


GPT2 = Family("gpt2", _read, _write, _entries, "transformer.", (".attn.bias", ".attn.masked_bias"))
