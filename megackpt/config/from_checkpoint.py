"""`--use-checkpoint-args`: the model as the checkpoint has it, whatever the other flags say.

Only the configuration is read here, without torch and before any process group; whether the checkpoint is whole is
for the load to find out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import yaml

from megackpt.config.checkpoint_folder import RUN_FILE, in_order_of_trust
from megackpt.config.errors import UsageError
from megackpt.config.flag import Layer, Value
from megackpt.config.flags import BY_KEY
from megackpt.config.sources import Source, expand, read_mapping

_TOKENIZER = frozenset(
    {
        "tokenizer-type",
        "tokenizer-model",
        "vocab-file",
        "merge-file",
        "tokenizer-hf-include-special-tokens",
        "tiktoken-pattern",
        "tiktoken-num-special-tokens",
        "tiktoken-special-tokens",
    }
)
_FREE = frozenset(
    {
        "seq-length",
        "compile",
        "loss-chunk-size",
        "make-vocab-size-divisible-by",
        "hidden-dropout",
        "attention-dropout",
        "init-method-std",
        "attention-softmax-in-fp32",
        "attention-backend",
    }
)
"""Flags of the model that leave its weights alone: taken where the user says nothing."""
_LARGEST = 64 << 20  # bytes


def with_checkpoint(values: Layer) -> tuple[dict[str, Value], list[str]]:
    """``values`` with the model and the tokenizer of the newest checkpoint in --load (else --pretrained-checkpoint).

    Returns notices of what was overruled too.  Raises UsageError if there is no such checkpoint.
    """
    directory, document, _ = _found(values)
    return _merged(values, _padded(_layer(directory, document), values), directory)


def checkpoint_vocabulary(values: Layer) -> int | None:
    """Rows of the vocabulary before padding, if the checkpoint that ``with_checkpoint`` takes says how many."""
    return _found(values)[2]


def _found(values: Layer) -> tuple[Path, Mapping[str, object], int | None]:
    folders = [str(values[key]) for key in ("load", "pretrained-checkpoint") if key in values]
    if not folders:
        raise UsageError("--use-checkpoint-args needs --load: the folder whose checkpoint says what the model is.")
    for folder in folders:
        found = _stored(Path(folder))
        if found is not None:
            return found
    raise UsageError(f"--use-checkpoint-args: {' and '.join(folders)} has no checkpoint with a readable {RUN_FILE}.")


def _stored(root: Path) -> tuple[Path, Mapping[str, object], int | None] | None:
    for directory in in_order_of_trust(root)[0]:
        try:
            with (directory / RUN_FILE).open("rb") as file:
                run = json.loads(file.read(_LARGEST))
            document = yaml.safe_load(run["extra"]["config"])
            if isinstance(document["model"], Mapping) and isinstance(document.get("data", {}), Mapping):
                vocab = run["extra"].get("vocab_size")
                return directory, document, vocab if isinstance(vocab, int) else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, yaml.YAMLError):
            continue  # an older one has the same model
    return None


def _layer(directory: Path, document: Mapping[str, object]) -> dict[str, Value]:
    model, data = document["model"], document.get("data", {})  # converted weights have no data
    assert isinstance(model, Mapping) and isinstance(data, Mapping)
    source = Source(f"{directory / RUN_FILE}")
    read_mapping({**model, **{key: value for key, value in data.items() if key in _TOKENIZER}}, source)
    problems = [*source.unknown, *source.refused, *source.errors]
    if problems:
        raise UsageError("\n".join(problems))
    return expand(source.values)


def _padded(stored: dict[str, Value], values: Layer) -> dict[str, Value]:
    """``stored`` with as many padding heads as --tensor-model-parallel-size needs, if it has any that do not divide."""
    own, tensor = stored.get("unpadded-query-groups"), values.get("tensor-model-parallel-size", 1)
    heads, groups = stored.get("num-attention-heads"), stored.get("num-query-groups")
    if not (isinstance(own, int) and isinstance(tensor, int) and isinstance(heads, int)) or tensor < 1:
        return stored
    groups = groups if isinstance(groups, int) else heads
    if not 1 <= own <= groups or groups % tensor == 0:
        return stored
    wanted = -(-own // tensor) * tensor
    grouped = {"num-query-groups": wanted} if "num-query-groups" in stored else {}
    return stored | {"num-attention-heads": heads // groups * wanted} | grouped


def _merged(values: Layer, stored: Layer, directory: Path) -> tuple[dict[str, Value], list[str]]:
    ruled = {key for key in values if key not in _FREE and (key in _TOKENIZER or _of_model(key))}
    notices = []
    for key in sorted(ruled):
        if key in stored and values[key] != stored[key]:
            said = f"--{key} {_words(stored[key])} instead of {_words(values[key])}"
            notices.append(f"--use-checkpoint-args: {said}, from {directory}")
    free = {key: value for key, value in stored.items() if key not in _FREE or key not in values}
    return {key: value for key, value in values.items() if key not in ruled} | free, notices


def _of_model(key: str) -> bool:
    target = BY_KEY[key].target
    return target.startswith("model.") if target else key == "group-query-attention"


def _words(value: Value) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)
