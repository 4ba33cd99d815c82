"""Megatron-LM's torch checkpoints, written here as its versions write them from weights that are known."""

from __future__ import annotations

import argparse
import os
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megackpt.config.errors import UsageError
from megackpt.config.model import ModelConfig
from megackpt.persist.agree import CheckpointError
from megackpt.persist.convert import format_of, read_megatron
from tests.persist.convert.made import GPT2, VOCAB, equal, llama, tensors_of

OLD = {
    "attn.norm": "input_layernorm",
    "attn.qkv": "self_attention.query_key_value",
    "attn.proj": "self_attention.dense",
    "mlp.norm": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}
CORE = {
    "attn.norm": "self_attention.linear_qkv.layer_norm_",
    "attn.qkv": "self_attention.linear_qkv",
    "attn.proj": "self_attention.linear_proj",
    "attn.q_norm": "self_attention.q_layernorm",
    "attn.k_norm": "self_attention.k_layernorm",
    "mlp.norm": "mlp.linear_fc1.layer_norm_",
    "mlp.up": "mlp.linear_fc1",
    "mlp.down": "mlp.linear_fc2",
}
SPLIT = {"attn.qkv": (0, 0), "attn.proj": (1, None), "mlp.up": (0, 0), "mlp.down": (1, None)}


def arguments(model: ModelConfig, **more: object) -> argparse.Namespace:
    names = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "kv_channels", "ffn_hidden_size")
    names += ("max_position_embeddings", "normalization", "norm_epsilon", "swiglu", "add_bias_linear", "rotary_base")
    names += ("position_embedding_type", "hidden_dropout", "attention_dropout", "qk_layernorm")
    return argparse.Namespace(
        **{name: getattr(model, name) for name in names},
        group_query_attention=model.num_query_groups != model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        untie_embeddings_and_output_weights=not model.tie_embeddings,
        vocab_size=VOCAB,
        params_dtype=torch.bfloat16,
        **more,
    )


def part(name: str, tensor: Tensor, model: ModelConfig, tp: int, t: int, version: float) -> Tensor:
    """Tensor-parallel rank t's part of one of our layers' tensors, in the layout of that checkpoint version."""
    module, _, kind = name.rpartition(".")
    dim = SPLIT.get(module, (None, None))[kind == "bias"]
    if module == "mlp.up" and model.gated:  # [2, f, ...]: gate columns, then the others
        return tensor.chunk(tp, 1)[t].flatten(0, 1)
    if dim is None:
        return tensor
    shard = tensor.chunk(tp, dim)[t]
    if module == "attn.qkv" and version < 2:
        heads = shard.unflatten(0, (-1, 3, model.kv_channels))
        return (heads.transpose(0, 1) if version < 1 else heads.transpose(1, 2)).flatten(0, 2)
    return shard


def rank_file(
    model: ModelConfig, tp: int, t: int, chunks: list[range], *, core: bool, version: float
) -> dict[str, Any]:
    """The content of one rank's file: `chunks` are the layers of its model chunks."""
    made, content, pad = tensors_of(model), {}, 7
    names = CORE if core else OLD
    for number, layers in enumerate(chunks):
        flat: dict[str, Tensor] = {}
        stack = "decoder" if core else "language_model.encoder"
        for local, layer in enumerate(layers):
            for ours, theirs in names.items():
                for kind in ("weight", "bias"):
                    tensor = made.get(f"layers.{layer}.{ours}.{kind}")
                    if tensor is not None:
                        joint = "" if theirs.endswith("_") else "."
                        key = f"{stack}.layers.{local}.{theirs}{joint}{kind}"
                        flat[key] = part(f"{ours}.{kind}", tensor, model, tp, t, version).clone()
        table = torch.cat([made["embedding.word.weight"], torch.zeros(pad, model.hidden_size)]).chunk(tp)[t].clone()
        front = "" if core else "language_model."
        if 0 in layers:
            flat[f"{front}embedding.word_embeddings.weight"] = table
            if "embedding.position.weight" in made:
                flat[f"{front}embedding.position_embeddings.weight"] = made["embedding.position.weight"]
        if model.num_layers - 1 in layers:
            for kind in ("weight", "bias"):
                if f"head.norm.{kind}" in made:
                    flat[f"{stack}.final_{'layernorm' if core else 'norm'}.{kind}"] = made[f"head.norm.{kind}"]
            if "head.weight" in made:
                flat[f"{front}output_layer.weight"] = torch.cat(
                    [made["head.weight"], torch.zeros(pad, model.hidden_size)]
                ).chunk(tp)[t].clone()  # fmt: skip
            elif 0 not in layers:
                flat["word_embeddings_for_head.weight"] = table
        content[f"model{number}" if len(chunks) > 1 else "model"] = flat if core else nested(flat)
    rng = {"random_rng_state": (3, (1, 2), None), "np_rng_state": np.random.RandomState(3).get_state()}
    return {"args": arguments(model), "checkpoint_version": version, "iteration": 7, "rng_state": [rng], **content}


def nested(flat: dict[str, Tensor]) -> dict[str, Any]:
    """As the older generation stores it: a dictionary for each submodule down to the stack of layers."""
    tree: dict[str, Any] = {}
    for name, tensor in flat.items():
        here, parts = tree, name.split(".", 2)
        for word in parts[:-1]:
            here = here.setdefault(word, {})
        here[parts[-1]] = tensor
    return tree


def write(
    root: Path, model: ModelConfig, tp: int, stages: list[list[range]], *, core: bool, version: float = 3.0
) -> None:
    """`stages`: for each pipeline rank the layers of its chunks."""
    (root / "latest_checkpointed_iteration.txt").write_text("7")
    for p, chunks in enumerate(stages):
        for t in range(tp):
            name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if len(stages) > 1 else "")
            path = root / "iter_0000007" / name
            path.mkdir(parents=True)
            torch.save(
                rank_file(model, tp, t, chunks, core=core, version=version), path / "model_optim_rng.pt"
            )


WHOLE = [[range(5)]]
CASES = {
    "gpt2, old names": (GPT2, 1, WHOLE, False, 3.0),
    "gpt2, version 0, tp 2": (GPT2, 2, WHOLE, False, 0.0),
    "gpt2, version 1, tp 2": (GPT2, 2, WHOLE, False, 1.0),
    "gpt2, core names, tp 2 pp 2 uneven": (GPT2, 2, [[range(2)], [range(2, 5)]], True, 3.0),
    "llama, core names, tp 3": (llama(), 3, WHOLE, True, 3.0),
    "heads normed, tp 2": (replace(llama(6, 2), qk_layernorm=True), 2, WHOLE, True, 3.0),
    "llama, two chunks on two stages": (
        llama(8, 2, bias=True),
        2,
        [[range(2), range(3, 4)], [range(2, 3), range(4, 5)]],
        True,
        3.0,
    ),
}


@pytest.mark.parametrize(("model", "tp", "stages", "core", "version"), CASES.values(), ids=CASES.keys())
def test_every_tensor_arrives(
    tmp_path: Path, model: ModelConfig, tp: int, stages: list[list[range]], core: bool, version: float
) -> None:
    write(tmp_path, model, tp, stages, core=core, version=version)
    assert format_of(tmp_path) == "megatron"
    read = read_megatron(tmp_path)
    assert read.vocab == VOCAB and equal(read, tensors_of(model))
    for name in ("num_query_groups", "kv_channels", "ffn_hidden_size", "normalization", "swiglu", "tie_embeddings"):
        assert getattr(read.model, name) == getattr(model, name)


class Hostile:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (os.environ["HOSTILE"],)


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTILE", str(tmp_path / "made-by-pickle"))
    write(tmp_path, GPT2, 1, WHOLE, core=True)
    path = tmp_path / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    torch.save(content | {"opt": Hostile()}, path)
    with pytest.raises(CheckpointError, match=r"wants to run (posix|nt)\.mkdir: it is refused"):
        read_megatron(tmp_path)
    assert not (tmp_path / "made-by-pickle").exists()


def test_enumerations_of_its_own_are_read_as_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments hold members of megatron.core's enumerations; their class is not here and not needed."""
    module = types.ModuleType("megatron.core.enums")
    kind = type("ModelType", (), {"__module__": "megatron.core.enums", "__reduce__": lambda self: (kind, (1,))})
    kind.__init__ = lambda self, *words: None  # type: ignore[misc]
    module.ModelType = kind  # type: ignore[attr-defined]
    packages = {name: types.ModuleType(name) for name in ("megatron", "megatron.core")}
    with monkeypatch.context() as patch:
        for name, value in {**packages, "megatron.core.enums": module}.items():
            patch.setitem(sys.modules, name, value)
        write(tmp_path, GPT2, 1, WHOLE, core=True)
        path = tmp_path / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt"
        content = torch.load(path, weights_only=False)
        content["args"].model_type = kind(1)
        torch.save(content, path)
    assert equal(read_megatron(tmp_path), tensors_of(GPT2))


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    write(tmp_path, GPT2, 2, [[range(2)], [range(2, 5)]], core=True)
    path = tmp_path / "iter_0000007" / "mp_rank_01_001" / "model_optim_rng.pt"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"mp_rank_01_001/model_optim_rng.pt cannot be read"):
        read_megatron(tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match="lacks mp_rank_01_001"):
        read_megatron(tmp_path)


def changed(root: Path, model: ModelConfig, change: Callable[[dict[str, Any]], None]) -> None:
    """A checkpoint of one rank whose content was changed."""
    write(root, model, 1, WHOLE, core=True)
    path = root / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("num_experts", 4),
        ("rotary_interleaved", True),
        ("apply_residual_connection_post_layernorm", True),
        ("window_size", (128, 0)),
        ("mtp_num_layers", 1),
    ],
)
def test_models_of_another_kind_are_refused(tmp_path: Path, argument: str, value: object) -> None:
    changed(tmp_path, GPT2, lambda content: setattr(content["args"], argument, value))
    with pytest.raises(UsageError, match=f"trained with --{argument.replace('_', '-')}, which this model does not"):
        read_megatron(tmp_path)


def test_a_tensor_that_the_model_has_nothing_for_is_refused(tmp_path: Path) -> None:
    name = "decoder.layers.1.post_mlp_layernorm.weight"
    changed(tmp_path, GPT2, lambda content: content["model"].update({name: torch.ones(GPT2.hidden_size)}))
    with pytest.raises(UsageError, match=f"has tensors that this model has not: {name}$"):
        read_megatron(tmp_path)


def test_what_holds_no_weights_is_left_out(tmp_path: Path) -> None:
    more = {"decoder.layers.0.mlp.linear_fc1._extra_state": torch.zeros(3), "rotary_pos_emb.inv_freq": torch.ones(2)}
    changed(tmp_path, GPT2, lambda content: content["model"].update(more))
    assert read_megatron(tmp_path).notes == ()


def test_another_gelu_is_said(tmp_path: Path) -> None:
    changed(tmp_path, GPT2, lambda content: setattr(content["args"], "bias_gelu_fusion", False))
    (note,) = read_megatron(tmp_path).notes
    assert "--no-bias-gelu-fusion" in note and "tanh" in note
