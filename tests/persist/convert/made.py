"""Weights to convert: random, of every shape that a converter could confuse with another (all sizes distinct)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megackpt.config.model import ModelConfig
from megackpt.persist.convert import Weights
from megackpt.persist.convert.weights import shapes

VOCAB = 257
GPT2 = ModelConfig(
    num_layers=5, hidden_size=48, num_attention_heads=6, ffn_hidden_size=168, seq_length=37, vocab_size=VOCAB
)


def llama(
    heads: int = 6, groups: int = 3, head_size: int = 10, *, bias: bool = False, tied: bool = False
) -> ModelConfig:
    return ModelConfig(
        num_layers=5,
        hidden_size=48,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=head_size,
        ffn_hidden_size=168,
        seq_length=37,
        vocab_size=VOCAB,
        position_embedding_type="rope",
        rotary_base=50000.0,
        normalization="RMSNorm",
        norm_epsilon=3e-6,
        swiglu=True,
        add_bias_linear=bias,
        tie_embeddings=tied,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


MODELS = {
    "gpt2": GPT2,
    "llama 6 heads 3 kv": llama(),
    "llama 8 heads 2 kv, biases, tied": llama(8, 2, 14, bias=True, tied=True),
    "qwen3 6 heads 2 kv": replace(llama(6, 2, 14), qk_layernorm=True),
}


def tensors_of(model: ModelConfig, seed: int = 7) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * 0.1 + name.endswith("norm.weight")
        for name, shape in shapes(model, VOCAB).items()
    }


def weights_of(model: ModelConfig, seed: int = 7) -> Weights:
    made = tensors_of(model, seed)
    makers = {name: (lambda tensor=tensor: tensor) for name, tensor in made.items()}
    return Weights(model, VOCAB, makers, torch.float32, "made")


def equal(got: Weights, expected: dict[str, Tensor]) -> bool:
    return set(shapes(got.model, got.vocab)) == set(expected) and all(
        torch.equal(got.make(name), tensor) for name, tensor in expected.items()
    )
