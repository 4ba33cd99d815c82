"""Hugging Face's own models as the oracle of `megackpt convert` and `megackpt generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megackpt.config.parallel import ParallelConfig
from megackpt.mesh.device import DeviceSeam
from megackpt.model.decoding import Decoder
from megackpt.persist.convert import read_checkpoint, read_folder, write_checkpoint, write_folder
from megackpt.train.generate import Sampling, load_generator
from tests.pool import run_distributed

transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES = {"vocab_size": 257, "hidden_size": 48, "intermediate_size": 168, "num_hidden_layers": 5}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CASES: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 257, "n_positions": 61, "n_embd": 48, "n_layer": 5, "n_head": 6, "n_inner": 168},
    "llama 6/3": SIZES | {"num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 61},
    "llama 8/2, head 10, biases, tied, scaled": SIZES
    | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 16384}
    | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    | {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
    "qwen3 6/2, head 14": SIZES
    | {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 14, "max_position_embeddings": 61},
    "llama 6/3, linear": SIZES
    | {"num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 61}
    | {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
}


def model_of(name: str) -> Any:
    """A model of that shape whose every parameter is random (biases and norms too)."""
    kind = {"gpt2": ("GPT2Config", "GPT2LMHeadModel"), "qwen3": ("Qwen3Config", "Qwen3ForCausalLM")}
    config, made = kind.get(name.split()[0], ("LlamaConfig", "LlamaForCausalLM"))
    model = getattr(transformers, made)(getattr(transformers, config)(**CASES[name]))
    generator = torch.Generator().manual_seed(9)
    for key, parameter in model.named_parameters():
        one = key.endswith("weight") and ("norm" in key or "ln_" in key)
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1 + one
    return model.eval()


def ours(rank: int, world_size: int, root: str, ids: Tensor, count: int) -> tuple[Tensor, list[int]]:
    """Logits at every position, a token at a time after the first five; and the greedy continuation of the first."""
    parallel = ParallelConfig(tensor=world_size, world_size=world_size)
    generator = load_generator(root, parallel, DeviceSeam.create("cpu", rank, None))
    decoder = Decoder(generator.chunk, generator.tp, sequences=len(ids), capacity=ids.shape[1])
    logits = [decoder(part) for part in ids.split([5, *[1] * (ids.shape[1] - 5)], dim=1)]
    return torch.stack(logits, dim=1), generator.continue_(ids[0].tolist(), count, Sampling())


@pytest.mark.parametrize("name", CASES)
def test_logits_and_continuations_are_theirs(tmp_path: Path, name: str) -> None:
    theirs = model_of(name)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="100KB")
    write_checkpoint(tmp_path / "ours", read_folder(tmp_path / "theirs"), file_bytes=50_000)
    ids = torch.randint(257, (2, 24), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = theirs(ids).logits[:, 4:]
        continued = theirs.generate(ids[:1], max_new_tokens=15, do_sample=False, pad_token_id=0)[0, 24:].tolist()
    for ranks in (1,) if "6/3" in name else (1, 2):
        for logits, made in run_distributed(ours, ranks, str(tmp_path / "ours"), ids, 15):
            assert (logits - expected).abs().max() <= 1e-5
            assert made == continued


@pytest.mark.parametrize("name", CASES)
def test_exported_folders_load_and_agree(tmp_path: Path, name: str) -> None:
    theirs = model_of(name)
    theirs.save_pretrained(tmp_path / "theirs")
    write_checkpoint(tmp_path / "ours", read_folder(tmp_path / "theirs"))
    write_folder(tmp_path / "back", read_checkpoint(tmp_path / "ours"), file_bytes=60_000)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    ids = torch.randint(257, (2, 24), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        assert torch.equal(again(ids).logits, theirs(ids).logits)
    kept = ("hidden_act", "activation_function", "rms_norm_eps", "layer_norm_epsilon", "rope_theta", "rope_scaling")
    kept += ("tie_word_embeddings", "vocab_size", "num_key_value_heads", "max_position_embeddings")
    for field in kept:
        assert getattr(again.config, field, None) == getattr(theirs.config, field, None), field
