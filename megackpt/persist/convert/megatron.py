"""Megatron-LM's `torch` checkpoints: one pickle per tensor- and pipeline-parallel rank.

    release/ or iter_0000010/
      mp_rank_00/model_optim_rng.pt           tensor-parallel rank, or
      mp_rank_00_001/model_optim_rng.pt       tensor- and pipeline-parallel rank

Two generations of names exist, `language_model.encoder...` and `decoder...` (with the norms inside the linear layers
where transformer-engine made them); both are read.  Pickles can run code, so nothing is unpickled but tensors, plain
containers and the names below; everything else refuses the file.
"""

from __future__ import annotations

import argparse
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megackpt.config.errors import UsageError
from megackpt.config.model import ModelConfig
from megackpt.persist.agree import CheckpointError
from megackpt.persist.convert.megatron_names import Named, canonical, layer_count, merge, unknown
from megackpt.persist.convert.weights import Make, Weights, with_vocabulary

FILE = "model_optim_rng.pt"
_RANK = re.compile(r"mp_rank_(\d{2,3})(?:_(\d{3}))?")


class Inert:
    """Stands for an object of Megatron-LM's own classes (enumerations among the arguments): it does nothing."""

    def __init__(self, *words: object) -> None:
        self.words = words


def rank_folders(root: Path) -> dict[tuple[int, int], Path]:
    """Files by (tensor-parallel, pipeline-parallel) rank under `root`, or under what its tracker names."""
    base = root
    tracker = root / "latest_checkpointed_iteration.txt"
    if tracker.is_file():
        word = tracker.read_text(errors="replace").strip()
        base = root / ("release" if word == "release" else f"iter_{int(word):07d}" if word.isdigit() else ".")
    found: dict[tuple[int, int], Path] = {}
    for entry in sorted(base.iterdir()) if base.is_dir() else ():
        match = _RANK.fullmatch(entry.name)
        if match and (entry / FILE).is_file():
            found[int(match[1]), int(match[2] or 0)] = entry / FILE
    return found


def read_megatron(root: str | Path, vocab: int | None = None) -> Weights:
    """The weights of a Megatron-LM checkpoint, mapped from its files and merged tensor by tensor.

    `vocab`: rows of the vocabulary before padding; without it what the checkpoint says, or its padded rows. Raises
    UsageError for a model that ours does not compute in the same way, CheckpointError for files that are missing,
    damaged or hold more than weights and plain values.
    """
    root = Path(root)
    files = rank_folders(root)
    if not files:
        raise CheckpointError(f"{root} has no mp_rank_*/{FILE}")
    tp, pp = (1 + max(rank[axis] for rank in files) for axis in (0, 1))
    if missing := [f"mp_rank_{t:02d}_{p:03d}" for p in range(pp) for t in range(tp) if (t, p) not in files]:
        raise CheckpointError(f"{root} lacks {', '.join(missing)}")
    ranks = {rank: _Rank(path) for rank, path in files.items()}
    args = ranks[0, 0].args
    chunks = _chunks(ranks, tp, pp)
    model = _model(args)
    found = sum(layer_count(chunk[0]) for chunk in chunks)
    if found != model.num_layers:
        raise CheckpointError(f"{root} holds {found} layers, its arguments say {model.num_layers}")
    if strange := sorted({name for chunk in chunks for tensors in chunk for name in unknown(tensors)}):
        raise UsageError(f"{root} has tensors that this model has not: {', '.join(strange[:5])}")
    tensors: dict[str, Make] = {}
    offset = 0
    for chunk in chunks:
        for name in canonical(chunk[0], offset):
            tensors[name.ours] = partial(_merged, chunk, name, model, ranks[0, 0].version)
        offset += layer_count(chunk[0])
    if model.tie_embeddings:
        tensors.pop("head.weight", None)
    sample = tensors["embedding.word.weight"]() if "embedding.word.weight" in tensors else None
    if sample is None:
        raise CheckpointError(f"{root} has no word embedding")
    whole = Weights(model, sample.shape[0], tensors, sample.dtype, str(root), _notes(args, model))
    return with_vocabulary(whole, vocab or getattr(args, "vocab_size", None) or sample.shape[0])


class _Rank:
    """One rank's file: its arguments, and its tensors by name for each chunk (virtual stage)."""

    def __init__(self, path: Path) -> None:
        content = load_restricted(path)
        if not isinstance(content, Mapping) or not isinstance(content.get("args"), argparse.Namespace):
            raise CheckpointError(f"{path} has no arguments: it is not a checkpoint of Megatron-LM training")
        self.args: argparse.Namespace = content["args"]
        self.version = float(content.get("checkpoint_version", 0.0))
        keys = sorted((key for key in content if re.fullmatch(r"model\d*", key)), key=lambda key: int(key[5:] or 0))
        self.chunks = [dict(_flat(content[key])) for key in keys]
        if not self.chunks:
            raise CheckpointError(f"{path} has no model")


def load_restricted(path: Path) -> Any:
    """Unpickle with torch's weights-only reader and the few names that a Megatron-LM checkpoint needs besides.

    Raises CheckpointError naming what else the file wants to run.
    """
    try:
        wanted = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    except (RuntimeError, OSError, ValueError, pickle.UnpicklingError, EOFError) as error:
        raise CheckpointError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from error
    known = {"argparse.Namespace", *_NUMPY}
    inert = [name for name in wanted if name.startswith("megatron.")]
    strange = sorted(set(wanted) - known - set(inert))
    if strange:
        raise CheckpointError(f"{path} wants to run {', '.join(strange)}: it is refused")
    try:
        # numpy's scalar types are asked for while unpickling, without being named in the file.
        allowed: list[Any] = [argparse.Namespace, *((value, name) for name, value in _NUMPY.items())]
        with torch.serialization.safe_globals([*allowed, *((Inert, name) for name in inert)]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, OSError, ValueError, TypeError, pickle.UnpicklingError, EOFError) as error:
        raise CheckpointError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from error


def _numpy_names() -> dict[str, Any]:
    """What numpy's random state, which such checkpoints store, is pickled with; by old and new module names."""
    reconstruct = np.empty(0).__reduce__()[0]
    names: dict[str, Any] = {"numpy.ndarray": np.ndarray, "numpy.dtype": np.dtype}
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        names[f"{module}._reconstruct"] = reconstruct
    for kind in ("UInt32DType", "Float64DType", "Int64DType"):
        names[f"numpy.dtypes.{kind}"] = getattr(np.dtypes, kind)
    return names


_NUMPY = _numpy_names()


def _flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors of nested dictionaries by dotted name."""
    for key, value in tree.items() if isinstance(tree, Mapping) else ():
        name = f"{prefix}{key}"
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")


def _chunks(ranks: Mapping[tuple[int, int], _Rank], tp: int, pp: int) -> list[list[dict[str, Tensor]]]:
    """Tensors of all tensor-parallel ranks, chunk after chunk in the order of the model."""
    virtual = {len(rank.chunks) for rank in ranks.values()}
    if len(virtual) != 1:
        raise CheckpointError(f"ranks have different numbers of model chunks: {sorted(virtual)}")
    return [[ranks[t, p].chunks[v] for t in range(tp)] for v in range(virtual.pop()) for p in range(pp)]


def _merged(chunk: list[dict[str, Tensor]], name: Named, model: ModelConfig, version: float) -> Tensor:
    try:
        parts = [tensors[name.theirs] for tensors in chunk]
    except KeyError as error:
        raise CheckpointError(f"a tensor-parallel rank lacks {error}") from None
    return merge(parts, name, model, version)


@dataclass(frozen=True)
class _Field:
    """A field of our configuration: where the arguments have it."""

    name: str
    attribute: str


_FIELDS = (
    _Field("num_layers", "num_layers"),
    _Field("hidden_size", "hidden_size"),
    _Field("num_attention_heads", "num_attention_heads"),
    _Field("seq_length", "seq_length"),
    _Field("kv_channels", "kv_channels"),
    _Field("ffn_hidden_size", "ffn_hidden_size"),
    _Field("max_position_embeddings", "max_position_embeddings"),
    _Field("make_vocab_size_divisible_by", "make_vocab_size_divisible_by"),
    _Field("position_embedding_type", "position_embedding_type"),
    _Field("rotary_base", "rotary_base"),
    _Field("rotary_percent", "rotary_percent"),
    _Field("rotary_interpolation", "rotary_seq_len_interpolation_factor"),
    _Field("use_rope_scaling", "use_rope_scaling"),
    _Field("rope_scaling_factor", "rope_scaling_factor"),
    _Field("normalization", "normalization"),
    _Field("norm_epsilon", "layernorm_epsilon"),
    _Field("norm_epsilon", "norm_epsilon"),
    _Field("qk_layernorm", "qk_layernorm"),
    _Field("swiglu", "swiglu"),
    _Field("squared_relu", "squared_relu"),
    _Field("add_bias_linear", "add_bias_linear"),
    _Field("hidden_dropout", "hidden_dropout"),
    _Field("attention_dropout", "attention_dropout"),
    _Field("init_method_std", "init_method_std"),
)
_ABSENT = (
    "num_experts",
    "multi_latent_attention",
    "apply_layernorm_1p",
    "add_qkv_bias",
    "rotary_interleaved",
    "apply_residual_connection_post_layernorm",
    "window_size",
    "no_rope_freq",
    "qk_l2_norm",
    "attention_output_gate",
    "quick_geglu",
    "mtp_num_layers",
    "heterogeneous_layers_config_path",
)
"""Arguments with which another function is computed from (mostly) the same tensors."""


def _notes(args: argparse.Namespace, model: ModelConfig) -> tuple[str, ...]:
    """Differences that are too small to refuse."""
    if model.swiglu or model.squared_relu or getattr(args, "bias_gelu_fusion", True):
        return ()
    return ("trained with --no-bias-gelu-fusion: its GELU is the exact one, this model's is the tanh approximation",)


def _model(args: argparse.Namespace) -> ModelConfig:
    given = {field.name: getattr(args, field.attribute, None) for field in _FIELDS}
    fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if strange := [name for name in _ABSENT if getattr(args, name, None)]:
        flags = ", ".join("--" + name.replace("_", "-") for name in strange)
        raise UsageError(f"the checkpoint was trained with {flags}, which this model does not have")
    if getattr(args, "use_rotary_position_embeddings", False):
        fields["position_embedding_type"] = "rope"
    if getattr(args, "group_query_attention", False):
        fields["num_query_groups"] = args.num_query_groups
    fields["tie_embeddings"] = not getattr(args, "untie_embeddings_and_output_weights", False)
    if missing := [f for f in ("num_layers", "hidden_size", "num_attention_heads", "seq_length") if f not in fields]:
        raise CheckpointError(f"the checkpoint's arguments lack {', '.join(missing)}")
    return ModelConfig(**fields)
