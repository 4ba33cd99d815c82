"""Hugging Face folders, both ways; logits of converted weights are tests/train/test_generate.py's business."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megackpt.config.errors import UsageError
from megackpt.config.model import ModelConfig
from megackpt.persist.agree import CheckpointError
from megackpt.persist.convert import format_of, read_checkpoint, read_folder, write_checkpoint, write_folder
from megackpt.persist.convert.weights import join_qkv, split_qkv, with_vocabulary
from tests.persist.convert.made import GPT2, MODELS, VOCAB, equal, llama, tensors_of, weights_of

SMALL_FILES = 60_000  # bytes: several files, the table alone in one


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_ours_to_theirs_and_back_is_exact(tmp_path: Path, model: ModelConfig) -> None:
    write_checkpoint(tmp_path / "ours", weights_of(model), file_bytes=SMALL_FILES)
    ours = read_checkpoint(tmp_path / "ours")
    assert ours.model == model and ours.vocab == VOCAB and equal(ours, tensors_of(model))
    write_folder(tmp_path / "theirs", ours, file_bytes=SMALL_FILES)
    assert len(list((tmp_path / "theirs").glob("model-*.safetensors"))) > 5
    theirs = read_folder(tmp_path / "theirs")
    assert theirs.model == model and equal(theirs, tensors_of(model))
    assert [format_of(tmp_path / name) for name in ("ours", "theirs")] == ["megackpt", "hf"]


def test_config_says_what_the_model_does(tmp_path: Path) -> None:  # CV-05
    write_folder(tmp_path / "gpt2", weights_of(GPT2))
    gpt2 = json.loads((tmp_path / "gpt2" / "config.json").read_text())
    assert (gpt2["activation_function"], gpt2["n_inner"], gpt2["n_positions"], gpt2["vocab_size"]) == (
        "gelu_new", 168, 37, VOCAB,
    )  # fmt: skip
    assert gpt2["tie_word_embeddings"] is True and gpt2["layer_norm_epsilon"] == 1e-5
    write_folder(tmp_path / "llama", weights_of(llama()), dtype=torch.bfloat16)
    config = json.loads((tmp_path / "llama" / "config.json").read_text())
    wanted = {"hidden_act": "silu", "rms_norm_eps": 3e-6, "rope_theta": 50000.0, "head_dim": 10}
    wanted |= {"attention_bias": False, "torch_dtype": "bfloat16"}
    wanted |= {"num_key_value_heads": 3, "tie_word_embeddings": False, "rope_scaling": None}
    assert {name: config[name] for name in wanted} == wanted
    write_folder(tmp_path / "qwen3", weights_of(replace(llama(), qk_layernorm=True)))
    config = json.loads((tmp_path / "qwen3" / "config.json").read_text())
    wanted = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "use_sliding_window": False, "head_dim": 10}
    assert {name: config[name] for name in wanted} == wanted


def test_numbers_that_a_type_cannot_hold_are_refused(tmp_path: Path) -> None:
    tensors = tensors_of(GPT2)
    tensors["layers.3.mlp.down.bias"][5] = -7e4
    large = replace(weights_of(GPT2), tensors={name: lambda t=t: t for name, t in tensors.items()})
    for write in (write_checkpoint, write_folder):
        with pytest.raises(UsageError, match=r"3\.mlp\.down\.bias has numbers up to 7e\+04, which float16 cannot"):
            write(tmp_path / "half", large, dtype=torch.float16)
        assert not list(tmp_path.glob("half/*")) and not list(tmp_path.glob(".half*"))
        write(tmp_path / write.__name__, large, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("scaling", "fields"),
    [
        ({"rope_type": "linear", "factor": 4.0}, {"rotary_interpolation": 4.0}),
        (
            {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            {"use_rope_scaling": True, "rope_scaling_factor": 32.0},
        ),
    ],
)
def test_rotary_settings_come_and_go(tmp_path: Path, scaling: dict[str, object], fields: dict[str, object]) -> None:
    write_folder(tmp_path / "a", weights_of(llama()))
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    (tmp_path / "a" / "config.json").write_text(json.dumps(config | {"rope_scaling": scaling}))
    read = read_folder(tmp_path / "a")
    assert {name: getattr(read.model, name) for name in fields} == fields
    write_folder(tmp_path / "b", read)
    assert json.loads((tmp_path / "b" / "config.json").read_text())["rope_scaling"] == scaling


def test_biases_in_attention_only_become_zero_elsewhere(tmp_path: Path) -> None:
    model = llama(bias=True)
    write_folder(tmp_path / "a", weights_of(model))
    content = load_file(tmp_path / "a" / "model.safetensors")
    kept = {name: tensor for name, tensor in content.items() if ".mlp." not in name or not name.endswith(".bias")}
    save_file(kept, tmp_path / "a" / "model.safetensors")
    read = read_folder(tmp_path / "a")
    assert len(read.notes) == 10 and not read.make("layers.3.mlp.up.bias").any()
    assert torch.equal(read.make("layers.3.attn.qkv.bias"), tensors_of(model)["layers.3.attn.qkv.bias"])


def test_names_without_prefix_and_stored_masks(tmp_path: Path) -> None:
    """As the hub's own gpt2 has them."""
    write_folder(tmp_path / "a", weights_of(GPT2))
    content = load_file(tmp_path / "a" / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in content.items()}
    bare |= {f"h.{i}.attn.bias": torch.ones(1, 1, 37, 37) for i in range(5)}
    save_file(bare, tmp_path / "a" / "model.safetensors")
    assert equal(read_folder(tmp_path / "a"), tensors_of(GPT2))


def test_grouped_rows(tmp_path: Path) -> None:  # CV-01
    """Row j of group g: its r queries, then its key, then its value."""
    model = llama(8, 2, 4)
    q, k, v = torch.arange(32.0), 100 + torch.arange(8.0), 200 + torch.arange(8.0)
    packed = join_qkv(model, q, k, v)
    group = [*range(16), *range(100, 104), *range(200, 204)]
    second = [*range(16, 32), *range(104, 108), *range(204, 208)]
    assert packed.tolist() == [float(x) for x in (*group, *second)]
    assert all(torch.equal(a, b) for a, b in zip(split_qkv(model, packed), (q, k, v), strict=True))


REFUSED = [
    ({"model_type": "bert"}, UsageError, "model_type 'bert' cannot be converted; gpt2, llama, qwen3 can"),
    ({"hidden_act": "gelu"}, UsageError, "hidden_act 'gelu' is not something this model does; it does 'silu'"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, UsageError, "of type 'yarn'"),
    ({"rope_scaling": {"rope_type": "linear"}}, UsageError, "config.json lacks 'factor' in its rotary settings"),
    ({"rope_scaling": {"type": "linear", "factor": "x"}}, UsageError, "a value that cannot be one: could not convert"),
    ({"rope_scaling": "linear"}, UsageError, "config.json has a value that cannot be one"),
    ({"hidden_size": "abc"}, UsageError, "config.json has a value that cannot be one: invalid literal for int"),
    ({"num_key_value_heads": [3]}, UsageError, "config.json has a value that cannot be one"),
    ({"num_hidden_layers": 4}, UsageError, "has tensors that a llama model here has not: layers.4.input_layernorm"),
    ({"num_hidden_layers": 6}, CheckpointError, "has no tensor layers.5."),
    ({"intermediate_size": 160}, CheckpointError, r"layers.0.mlp.down.weight comes out as \[48, 168\]"),
]


@pytest.mark.parametrize(("change", "error", "words"), REFUSED)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, change: dict[str, object], error: type[Exception], words: str
) -> None:
    write_folder(tmp_path / "a", weights_of(llama()))
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    (tmp_path / "a" / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(error, match=words):
        write_checkpoint(tmp_path / "b", read_folder(tmp_path / "a"))
    assert not list(tmp_path.glob("b/iter_*")) and not list(tmp_path.glob("b/.*"))


def test_types_of_weights(tmp_path: Path) -> None:
    """The widest one there is holds them all; what is no type of weights is refused by name."""
    write_folder(tmp_path / "a", weights_of(llama()))
    content, path = load_file(tmp_path / "a" / "model.safetensors"), tmp_path / "a" / "model.safetensors"
    key = "model.layers.3.self_attn.k_proj.weight"
    for others, one, expected in (
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float16, torch.bfloat16, torch.float32),
    ):
        save_file({name: tensor.to(one if name == key else others) for name, tensor in content.items()}, path)
        assert read_folder(tmp_path / "a").dtype == expected
    for wrong in (torch.int32, torch.float8_e4m3fn):
        save_file(content | {key: content[key].to(wrong)}, path)
        with pytest.raises(UsageError, match=rf"{key} is of type \w+; weights are F32, BF16, F16 or F64"):
            read_folder(tmp_path / "a")


def test_an_index_stays_in_its_folder(tmp_path: Path) -> None:
    write_folder(tmp_path / "a", weights_of(GPT2), file_bytes=SMALL_FILES)
    index = tmp_path / "a" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["transformer.wte.weight"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"names a file outside of its folder: '\.\./elsewhere"):
        read_folder(tmp_path / "a")


def test_what_a_family_cannot_express_is_named(tmp_path: Path) -> None:
    squared = ModelConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, seq_length=4, vocab_size=VOCAB, squared_relu=True,
        add_bias_linear=False,
    )  # fmt: skip
    with pytest.raises(UsageError, match="cannot express: --squared-relu, --disable-bias-linear"):
        write_folder(tmp_path / "a", weights_of(squared))
    with pytest.raises(UsageError, match="a gpt2 model of Hugging Face cannot express: --qk-layernorm"):
        write_folder(tmp_path / "a", weights_of(replace(GPT2, qk_layernorm=True)))
    with pytest.raises(UsageError, match="a qwen3 model of Hugging Face cannot express: biases"):
        write_folder(tmp_path / "a", weights_of(replace(llama(bias=True), qk_layernorm=True)))


def test_memory_is_one_tensor_not_the_model(tmp_path: Path) -> None:
    """Each tensor is made once, when its turn comes, and is gone before the one after the next is made."""
    import weakref

    model, alive, most = llama(), weakref.WeakSet(), 0
    order: list[str] = []

    def made(name: str) -> torch.Tensor:
        nonlocal most
        tensor = tensors_of(model)[name]
        alive.add(tensor)
        most = max(most, len(alive))
        order.append(name)
        return tensor

    weights = weights_of(model)
    counted = type(weights)(
        model, VOCAB, {name: (lambda name=name: made(name)) for name in weights.tensors}, torch.float32, "made"
    )
    write_checkpoint(tmp_path / "a", counted, dtype=torch.bfloat16)
    assert sorted(order) == sorted(weights.tensors) and most <= 2


def test_fewer_rows_of_the_vocabulary(tmp_path: Path) -> None:
    cut = with_vocabulary(weights_of(llama()), 250)
    write_checkpoint(tmp_path / "a", cut)
    read = read_checkpoint(tmp_path / "a")
    assert read.vocab == 250 and torch.equal(read.make("head.weight"), tensors_of(llama())["head.weight"][:250])
    with pytest.raises(UsageError, match="--vocab-size 300: made has 257 rows"):
        with_vocabulary(weights_of(llama()), 300)
