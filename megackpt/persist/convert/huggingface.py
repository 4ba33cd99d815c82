"""Hugging Face folders: config.json and safetensors, in one file or in several with an index."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megackpt.config.errors import UsageError
from megackpt.config.model import ModelConfig
from megackpt.persist.agree import CheckpointError
from megackpt.persist.convert.families import Entry, Family
from megackpt.persist.convert.gpt2 import GPT2
from megackpt.persist.convert.llama import LLAMA, QWEN3
from megackpt.persist.convert.weights import Make, Weights, shapes
from megackpt.persist.tensor_file import DTYPES

FAMILIES: Mapping[str, Family] = {family.name: family for family in (GPT2, LLAMA, QWEN3)}
_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_WEIGHTS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_HEAD = "lm_head.weight"  # the one tensor outside of the family's prefix


def read_folder(folder: str | Path) -> Weights:
    """The weights of a Hugging Face folder, unread until they are asked for.

    Raises UsageError for an architecture or setting that our model does not compute in the same way, CheckpointError
    for a folder that is not whole.
    """
    folder = Path(folder)
    config = _json(folder / "config.json")
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise UsageError(
            f"{folder}: model_type {config.get('model_type')!r} cannot be converted; {', '.join(FAMILIES)} can"
        )
    model, vocab = _read_config(family, config, folder)
    files = _Files(folder, family)
    notes: list[str] = []
    tensors: dict[str, Make] = {}
    for entry in family.entries(model):
        if entry.optional and not any(name in files.places for name in entry.theirs):
            shape = shapes(model, vocab)[entry.ours]
            tensors[entry.ours] = partial(torch.zeros, shape, dtype=files.dtype)
            notes.append(f"{entry.ours} is not in the folder and becomes zero")
        else:
            tensors[entry.ours] = partial(files.join, entry)
    if surplus := files.unused(family.entries(model), tied=model.tie_embeddings):
        raise UsageError(f"{folder} has tensors that a {family.name} model here has not: {', '.join(surplus[:5])}")
    return Weights(model, vocab, tensors, files.dtype, str(folder), tuple(notes))


def _read_config(family: Family, config: Mapping[str, Any], folder: Path) -> tuple[ModelConfig, int]:
    try:
        return family.read(config)
    except UsageError:
        raise
    except KeyError as error:
        raise UsageError(f"{folder / 'config.json'} lacks {error} in its rotary settings") from error
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise UsageError(f"{folder / 'config.json'} has a value that cannot be one: {error}") from error


class _Files:
    """Where each tensor lies; names without the family's prefix."""

    def __init__(self, folder: Path, family: Family) -> None:
        self.folder = folder
        self.places: dict[str, tuple[str, str]] = {}  # short name -> (file, full name)
        types: dict[str, str] = {}  # of the file format -> a tensor that has it
        for file in _files(folder):
            try:
                with safe_open(str(folder / file), framework="pt") as opened:
                    names = {name: str(opened.get_slice(name).get_dtype()) for name in opened.keys()}  # noqa: SIM118
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{folder / file} cannot be read: {error}") from error
            for name, kind in names.items():
                if not name.endswith(family.ignored):
                    types.setdefault(kind, name)
                    self.places[name.removeprefix(family.prefix)] = (file, name)
        self.dtype = self._dtype(types)

    def _dtype(self, types: Mapping[str, str]) -> torch.dtype:
        """The narrowest type that holds all weights.  UsageError for one that is not a type of weights."""
        if not types:
            raise CheckpointError(f"{self.folder} holds no tensors")
        for kind, name in types.items():
            if DTYPES.get(kind) not in _WEIGHTS:
                raise UsageError(f"{self.folder}: {name} is of type {kind}; weights are F32, BF16, F16 or F64")
        return reduce(torch.promote_types, (DTYPES[kind] for kind in types))

    def get(self, name: str) -> Tensor:
        if name not in self.places:
            raise CheckpointError(f"{self.folder} has no tensor {name}")
        file, full = self.places[name]
        with safe_open(str(self.folder / file), framework="pt") as opened:
            return opened.get_tensor(full)

    def join(self, entry: Entry) -> Tensor:
        return entry.join(*(self.get(name) for name in entry.theirs))

    def unused(self, entries: list[Entry], *, tied: bool) -> list[str]:
        """Tensors that no entry reads; a tied model may store its head a second time."""
        known = {name for entry in entries for name in entry.theirs} | ({_HEAD} if tied else set())
        return sorted(set(self.places) - known)


def _files(folder: Path) -> list[str]:
    if (folder / _INDEX).is_file():
        index = _json(folder / _INDEX).get("weight_map")
        if not isinstance(index, Mapping) or not all(isinstance(name, str) for name in index.values()):
            raise CheckpointError(f"{folder / _INDEX} has no weight_map")
        names = sorted(set(index.values()))
        if outside := [name for name in names if Path(name).name != name or name in ("", ".", "..")]:
            raise CheckpointError(f"{folder / _INDEX} names a file outside of its folder: {outside[0]!r}")
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise CheckpointError(f"{folder} lacks {', '.join(missing)}")
        return names
    if (folder / _ONE).is_file():
        return [_ONE]
    raise CheckpointError(f"{folder} has neither {_ONE} nor {_INDEX}")


def _json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return document


def write_folder(
    folder: str | Path, weights: Weights, *, dtype: torch.dtype | None = None, file_bytes: int = 4 << 30
) -> Path:
    """Write `weights` as a Hugging Face folder that `transformers` loads; files of at most `file_bytes`, but for
    tensors that are larger alone.  It appears whole, by one rename.

    Raises UsageError if no family expresses the model or if the folder exists.
    """
    folder, dtype = Path(folder), dtype or weights.dtype
    if folder.exists() and any(folder.iterdir() if folder.is_dir() else [folder]):
        raise UsageError(f"{folder} exists already: give a new folder")
    family = QWEN3 if weights.model.qk_layernorm else LLAMA
    if weights.model.position_embedding_type == "learned_absolute":
        family = GPT2
    config = family.write(weights.model, weights.vocab) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        _write_files(temporary, weights, family, dtype, file_bytes)
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if folder.exists():
            folder.rmdir()
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return folder


def _write_files(folder: Path, weights: Weights, family: Family, dtype: torch.dtype, file_bytes: int) -> None:
    wanted = shapes(weights.model, weights.vocab)
    sizes = {name: torch.Size(shape).numel() * dtype.itemsize for name, shape in wanted.items()}
    groups: list[list[Entry]] = [[]]
    filled = 0
    for entry in family.entries(weights.model):
        if groups[-1] and filled + sizes[entry.ours] > file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(entry)
        filled += sizes[entry.ours]
    count = len(groups)
    names = [_ONE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    places: dict[str, str] = {}
    for file, group in zip(names, groups, strict=True):
        content: dict[str, Tensor] = {}
        for entry in group:
            made = entry.split(weights.make_as(entry.ours, dtype))
            for theirs, tensor in zip(entry.theirs, made, strict=True):
                full = theirs if theirs == _HEAD else family.prefix + theirs
                content[full] = tensor.contiguous()
                places[full] = file
        save_file(content, str(folder / file), metadata={"format": "pt"})
    if len(groups) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
