"""Llama as Hugging Face stores it: separate projections, a gate beside the MLP's first product, rotated halves.

Qwen 3 is Llama with queries and keys normed by head.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megackpt.config.errors import UsageError
from megackpt.config.model import ModelConfig
from megackpt.persist.convert.families import Entry, Family, inexpressible, must_be, needed, plain
from megackpt.persist.convert.weights import join_qkv, split_qkv

# The one setting of Llama 3.x beside its factor; model/rope.py has the same numbers.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def _read(config: Mapping[str, Any], *, normed: bool = False) -> tuple[ModelConfig, int]:
    must_be(config, "hidden_act", "silu", "swish")
    must_be(config, "sliding_window", None)
    heads, hidden = int(needed(config, "num_attention_heads")), int(needed(config, "hidden_size"))
    length = int(needed(config, "max_position_embeddings"))
    vocab = int(needed(config, "vocab_size"))
    model = ModelConfig(
        num_layers=int(needed(config, "num_hidden_layers")),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=int(config.get("num_key_value_heads") or heads),
        kv_channels=int(config.get("head_dim") or hidden // heads),
        ffn_hidden_size=int(needed(config, "intermediate_size")),
        seq_length=length,
        max_position_embeddings=length,
        vocab_size=vocab,
        position_embedding_type="rope",
        normalization="RMSNorm",
        qk_layernorm=normed,
        norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
        swiglu=True,
        add_bias_linear=bool(config.get("attention_bias")) or bool(config.get("mlp_bias")),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        hidden_dropout=0.0,
        attention_dropout=float(config.get("attention_dropout", 0.0)),
        init_method_std=float(config.get("initializer_range", 0.02)),
        **_rotation(config),
    )
    return model, vocab


def _read_qwen3(config: Mapping[str, Any]) -> tuple[ModelConfig, int]:
    must_be(config, "use_sliding_window", False)
    return _read({"head_dim": 128, **config}, normed=True)


def _rotation(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary fields; newer files have all of it in `rope_parameters`."""
    settings = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    base = float(settings.get("rope_theta") or config.get("rope_theta") or 10000.0)
    share = float(settings.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    fields: dict[str, Any] = {"rotary_base": base, "rotary_percent": share}
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind == "linear":
        fields["rotary_interpolation"] = float(settings["factor"])
    elif kind == "llama3":
        for name, value in _LLAMA3.items():
            if float(settings.get(name, value)) != value:
                raise UsageError(f"config.json: rope_scaling has {name} {settings[name]}; this model has {value:g}")
        fields |= {"use_rope_scaling": True, "rope_scaling_factor": float(settings["factor"])}
    elif kind != "default":
        raise UsageError(f"config.json: rope_scaling of type {kind!r}; this model does default, linear or llama3")
    return fields


def _write(model: ModelConfig, vocab: int) -> dict[str, Any]:
    inexpressible(
        "qwen3" if model.qk_layernorm else "llama",
        {
            "biases (leave them out with --disable-bias-linear)": model.qk_layernorm and model.add_bias_linear,
            "--normalization LayerNorm": model.normalization != "RMSNorm",
            f"--position-embedding-type {model.position_embedding_type}": model.position_embedding_type != "rope",
            "an MLP without --swiglu": not model.swiglu,
            f"--rotary-percent {model.rotary_percent}": model.rotary_percent != 1.0,
            "--use-rope-scaling with --rotary-seq-len-interpolation-factor": model.use_rope_scaling
            and model.rotary_interpolation != 1.0,
        },
    )
    scaling: dict[str, Any] | None = None
    if model.use_rope_scaling:
        scaling = {"rope_type": "llama3", "factor": model.rope_scaling_factor, **_LLAMA3}
    elif model.rotary_interpolation != 1.0:
        scaling = {"rope_type": "linear", "factor": model.rotary_interpolation}
    name: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    if model.qk_layernorm:
        name = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "use_sliding_window": False}
    return name | {
        "hidden_act": "silu",
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_channels,
        "intermediate_size": model.ffn_hidden_size,
        "max_position_embeddings": model.max_position_embeddings,
        "vocab_size": vocab,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rotary_base,
        "rope_scaling": scaling,
        "attention_bias": model.add_bias_linear,
        "mlp_bias": model.add_bias_linear,
        "attention_dropout": model.attention_dropout,
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_method_std,
    }


def _entries(model: ModelConfig) -> list[Entry]:
    entries = [plain("embedding.word.weight", "embed_tokens.weight")]
    kinds = ("weight", "bias") if model.add_bias_linear else ("weight",)
    for i in range(model.num_layers):
        ours, theirs = f"layers.{i}.", f"layers.{i}."
        entries += [
            plain(f"{ours}attn.norm.weight", f"{theirs}input_layernorm.weight"),
            plain(f"{ours}mlp.norm.weight", f"{theirs}post_attention_layernorm.weight"),
        ]
        if model.qk_layernorm:
            entries += [
                plain(f"{ours}attn.{part}_norm.weight", f"{theirs}self_attn.{part}_norm.weight") for part in "qk"
            ]
        for kind in kinds:
            absent = kind == "bias"  # a model may have biases in attention only
            heads = tuple(f"{theirs}self_attn.{part}_proj.{kind}" for part in "qkv")
            pair = tuple(f"{theirs}mlp.{part}_proj.{kind}" for part in ("gate", "up"))
            entries += [
                Entry(f"{ours}attn.qkv.{kind}", heads, partial(join_qkv, model), partial(split_qkv, model), absent),
                plain(f"{ours}attn.proj.{kind}", f"{theirs}self_attn.o_proj.{kind}", optional=absent),
                Entry(f"{ours}mlp.up.{kind}", pair, _pair, _unpair, absent),
                plain(f"{ours}mlp.down.{kind}", f"{theirs}mlp.down_proj.{kind}", optional=absent),
            ]
    entries.append(plain("head.norm.weight", "norm.weight"))
    if not model.tie_embeddings:
        entries.append(plain("head.weight", "lm_head.weight"))
    return entries


def _pair(gate: Tensor, up: Tensor) -> Tensor:
    return torch.stack((gate, up))


def _unpair(pair: Tensor) -> tuple[Tensor, ...]:
    return pair.unbind(0)


LLAMA = Family("llama", _read, _write, _entries, "model.", (".rotary_emb.inv_freq",))
QWEN3 = Family("qwen3", _read_qwen3, _write, _entries, "model.", ())
