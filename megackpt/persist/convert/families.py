"""The Hugging Face families: what their configurations say, and which of their tensors make which of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megackpt.config.errors import UsageError
from megackpt.config.model import ModelConfig


@dataclass(frozen=True)
class Entry:
    """One of our tensors and the ones of theirs that hold the same numbers.

    `join` makes ours from theirs (in the order of `theirs`), `split` the reverse.  `optional`: theirs may be absent,
    all of them; ours is then zero.
    """

    ours: str
    theirs: tuple[str, ...]
    join: Callable[..., Tensor]
    split: Callable[[Tensor], tuple[Tensor, ...]]
    optional: bool = False


@dataclass(frozen=True)
class Family:
    """A model architecture of the Hugging Face hub.

    `read` makes a ModelConfig and the vocabulary of a config.json; `write` the reverse, or UsageError naming what the
    family cannot express; `ignored` are name endings of tensors that hold no weights.
    """

    name: str
    read: Callable[[Mapping[str, Any]], tuple[ModelConfig, int]]
    write: Callable[[ModelConfig, int], dict[str, Any]]
    entries: Callable[[ModelConfig], list[Entry]]
    prefix: str
    ignored: tuple[str, ...]


def same(tensor: Tensor) -> Tensor:
    return tensor


def alone(tensor: Tensor) -> tuple[Tensor, ...]:
    return (tensor,)


def plain(ours: str, theirs: str, *, optional: bool = False) -> Entry:
    """The same tensor under another name."""
    return Entry(ours, (theirs,), same, alone, optional)


def needed(config: Mapping[str, Any], name: str) -> Any:
    """A value that config.json must have.  Raises UsageError."""
    if config.get(name) is None:
        raise UsageError(f"config.json has no {name!r}")
    return config[name]


def must_be(config: Mapping[str, Any], name: str, *allowed: Any) -> None:
    """UsageError unless a value, where there is one, is one that our model computes in the same way."""
    if name in config and config[name] not in allowed:
        raise UsageError(
            f"config.json: {name} {config[name]!r} is not something this model does; it does"
            f" {' or '.join(repr(value) for value in allowed if value is not None)}"
        )


def inexpressible(family: str, faults: Mapping[str, bool]) -> None:
    """UsageError naming every flag for which `faults` is true."""
    wrong = [name for name, bad in faults.items() if bad]
    if wrong:
        raise UsageError(f"a {family} model of Hugging Face cannot express: {', '.join(wrong)}")
