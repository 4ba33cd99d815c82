"""Our own checkpoints as a source and a target of conversions: whole tensors, one at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megackpt.config.checkpoint_folder import MANIFEST, RUN_FILE, saved_directories
from megackpt.config.checks import nearest_divisors
from megackpt.config.errors import UsageError
from megackpt.config.model import ModelConfig
from megackpt.config.stored import dump_sections, read_section
from megackpt.persist import directory
from megackpt.persist.agree import CheckpointError
from megackpt.persist.convert.weights import VOCABULARY_TABLES, Weights, shapes
from megackpt.persist.manifest import Manifest, StoredPart, StoredTensor
from megackpt.persist.tensor_file import DTYPE_NAMES, DTYPES, FileDigest, Part, write_bytes, write_tensors
from megackpt.persist.torch_file import open_file


def read_checkpoint(root: str | Path, iteration: int | None = None) -> Weights:
    """The weights of the newest checkpoint under `root`, or of the one of `iteration`; its files are verified.

    Raises UsageError if there is none, CheckpointError if it is not whole.
    """
    folder, run = open_checkpoint(root, iteration)
    manifest = Manifest.read(folder)
    for name in manifest.files:
        if fault := manifest.fault_of(folder, name):
            raise CheckpointError(f"{folder} is not whole: {fault}")
    model = read_section(run["extra"]["config"], "model")
    assert isinstance(model, ModelConfig)
    vocab = int(run["extra"]["vocab_size"])
    stored = {key[len("model.") :]: tensor for key, tensor in manifest.tensors.items() if key.startswith("model.")}
    if "embedding.word.weight" not in stored:
        raise CheckpointError(f"{folder} has no model weights")
    tensors = {
        name: partial(_whole, folder, manifest, f"model.{name}", vocab if name in VOCABULARY_TABLES else None)
        for name in stored
    }
    model = model.with_query_groups(model.unpadded_query_groups)
    return Weights(model, vocab, tensors, DTYPES[stored["embedding.word.weight"].dtype], str(folder))


def open_checkpoint(root: str | Path, iteration: int | None = None) -> tuple[Path, Mapping[str, Any]]:
    """The directory of a checkpoint under `root` (the newest, or that of `iteration`) and what its run says."""
    root = Path(root)
    found, saved = directory.latest_iteration(root) if iteration is None else iteration, saved_directories(root)
    if found is None or found not in saved:
        wanted = "no checkpoint" if iteration is None else f"no checkpoint of iteration {iteration}"
        raise UsageError(f"{root} has {wanted}; it has {', '.join(map(str, saved)) or 'none'}")
    folder = saved[found]
    try:
        run = json.loads((folder / RUN_FILE).read_bytes())
        run["extra"]["config"], run["extra"]["vocab_size"]
    except OSError as error:
        raise CheckpointError(f"{folder / RUN_FILE} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / RUN_FILE} is not that of a training run ({error!r})") from error
    return folder, run


def _whole(folder: Path, manifest: Manifest, key: str, rows: int | None) -> Tensor:
    """One whole tensor from its parts, without padding; of a vocabulary table the first `rows` rows."""
    stored = manifest.tensors[key]
    whole = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
    for part in stored.parts:
        with closing(open_file(manifest.format, folder / part.file)) as file:
            target = whole
            for dim, (start, length) in enumerate(zip(part.offsets, part.shape, strict=True)):
                target = target.narrow(dim, start, length)
            file.read(part.entry or key, (0,) * len(part.shape), target)
    if rows is not None:
        return whole[:rows]
    if stored.valid is None:
        return whole
    dim = 1 if key.endswith("attn.proj.weight") else 0
    if whole.narrow(dim, stored.valid, whole.shape[dim] - stored.valid).count_nonzero():
        raise CheckpointError(f"{folder}: {key} is not zero in the heads that are padding (--unpadded-query-groups)")
    return whole.narrow(dim, 0, stored.valid)


def write_checkpoint(
    root: str | Path,
    weights: Weights,
    *,
    dtype: torch.dtype | None = None,
    file_bytes: int = 4 << 30,
    tensor_parallel: int = 1,
) -> Path:
    """Write `weights` as a checkpoint of iteration 0 under `root`, one tensor in memory at a time.

    It has no optimizer state and no random states: a run loads it with --finetune. With `tensor_parallel` its
    configuration has so many padding heads that a run which takes it (--use-checkpoint-args) can be split by that; the
    tensors are those of the model: a load pads them. Raises UsageError if `root` holds checkpoints already.
    """
    root, dtype = Path(root), dtype or weights.dtype
    groups = -(-weights.model.unpadded_query_groups // tensor_parallel) * tensor_parallel
    model = weights.model.with_query_groups(groups)
    if model.ffn_hidden_size % tensor_parallel:
        raise UsageError(
            f"--target-tensor-parallel-size {tensor_parallel} does not divide {model.ffn_hidden_size} columns of the"
            f" MLP. Nearest valid: {nearest_divisors(tensor_parallel, model.ffn_hidden_size)}."
        )
    if saved := saved_directories(root):
        raise UsageError(f"{root} has checkpoints already (iteration {max(saved)}): give a new folder")
    temporary = directory.begin(root, 0)
    try:
        tensors, files = _write_tensors(temporary, weights, dtype, file_bytes)
        files[RUN_FILE] = write_bytes(temporary / RUN_FILE, _run_file(weights, model))
        write_bytes(temporary / MANIFEST, Manifest(0, files, tensors).to_bytes())
        directory.sync_directory(temporary)
        return directory.commit(root, temporary, 0)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_tensors(
    folder: Path, weights: Weights, dtype: torch.dtype, file_bytes: int
) -> tuple[dict[str, StoredTensor], dict[str, FileDigest]]:
    padded = weights.model.padded_vocab_size(weights.vocab, 1)
    tensors: dict[str, StoredTensor] = {}
    groups: list[list[Part]] = [[]]
    for name, shape in shapes(weights.model, weights.vocab).items():
        table = name in VOCABULARY_TABLES
        full = (padded, *shape[1:]) if table else shape
        part = Part(f"model.{name}", dtype, full, (0,) * len(full), partial(_padded, weights, name, dtype, full[0]))
        if groups[-1] and sum(p.size for p in groups[-1]) + part.size > file_bytes:
            groups.append([])
        groups[-1].append(part)
        where = StoredPart(_file_name(len(groups) - 1), part.offsets, full)
        tensors[part.entry] = StoredTensor(DTYPE_NAMES[dtype], full, weights.vocab if table else None, (where,))
    names = [_file_name(i) for i in range(len(groups))]
    return tensors, {name: write_tensors(folder / name, group) for name, group in zip(names, groups, strict=True)}


def _file_name(index: int) -> str:
    return f"rank_{index:05d}.safetensors"


def _padded(weights: Weights, name: str, dtype: torch.dtype, rows: int) -> Tensor:
    tensor = weights.make_as(name, dtype)
    if tensor.shape[0] == rows:
        return tensor
    padded = tensor.new_zeros((rows, *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    return padded


def _run_file(weights: Weights, model: ModelConfig) -> bytes:
    run = {
        "iteration": 0,
        "layout": {"tp": 1, "cp": 1, "dp": 1, "pp": 1},
        "torch": torch.__version__,
        "extra": {
            "iteration": 0,
            "consumed_samples": 0,
            "vocab_size": weights.vocab,
            "config": dump_sections({"model": model}),
            "converted_from": weights.source,
        },
    }
    return json.dumps(run, indent=1).encode()
