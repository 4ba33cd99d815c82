"""From words to values: command lines, YAML files, and how they override each other.

A *source* is one command line or one YAML file.  Reading one never stops at the first mistake: unknown and refused
flags are collected, so that a user sees them all at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from megackpt.config.checks import did_you_mean
from megackpt.config.errors import UsageError
from megackpt.config.flag import Flag, Layer, Value, key_of
from megackpt.config.flags import BY_KEY, DETAILS, EXCLUSIVE, FLAGS

SECTIONS = (
    "model",
    "parallel",
    "batch",
    "optimizer",
    "train",
    "recompute",
    "precision",
    "data",
    "checkpoint",
    "logging",
)


@dataclass
class Source:
    """What one source says: values by key, and the flags among them that cannot be used."""

    name: str = ""
    """How messages name it; empty for the command line."""
    values: dict[str, Value] = field(default_factory=dict)
    config_files: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)
    """Flags that are taken without effect."""
    errors: list[str] = field(default_factory=list)
    """Values that cannot be read."""

    @property
    def prefix(self) -> str:
        """What messages begin with: nothing for the command line."""
        return f"{self.name}: " if self.name else ""

    def take(self, flag: Flag, raw: Sequence[object]) -> None:
        """Record one flag with its words; of a flag given twice the last counts (``--config`` adds up)."""
        try:
            value = flag.convert(raw, self.name)
        except UsageError as error:
            self.errors.append(str(error))
            return
        refusal = flag.refusal(value)
        if refusal is not None:
            self.refused.append(self.prefix + refusal)
        elif flag.state != "works":
            self.accepted.append(flag.name)
        elif flag.key == "config":
            self.config_files.append(str(value))
        else:
            self.values[flag.key] = value

    def unknown_name(self, name: str) -> None:
        """Record a name that is not in the table, with the nearest one that is."""
        near = did_you_mean("--" + key_of(name), [flag.name for flag in FLAGS])
        self.unknown.append(f"{self.prefix}unknown flag {name}{near}")


def read_words(words: Sequence[str], name: str = "") -> Source:
    """Read a command line: ``--flag``, ``--flag value``, ``--flag=value``, ``--flag v1 v2 ...``.

    Names are never abbreviated; `-` and `_` are interchangeable in them."""
    source = Source(name)
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if word == "-h":
            word = "--help"
        if not word.startswith("--") or word == "--":
            source.errors.append(f"{source.prefix}unexpected word {word!r}: flags begin with --.")
            continue
        flag_name, equals, attached = word.partition("=")
        flag = BY_KEY.get(key_of(flag_name))
        following = [] if equals else _until_next_flag(words[place:])
        if flag is None:
            source.unknown_name(flag_name)
            place += len(following)
            continue
        if equals:
            source.take(flag, attached.split() if flag.kind == "many" else [attached])
            continue
        limit = {"switch": 0, "many": len(following)}.get(flag.kind, 1)
        source.take(flag, following[:limit])
        place += min(limit, len(following))
    return source


def read_yaml(path: str) -> Source:
    """Read a YAML file of flag names, flat or under section names.  Raises UsageError if it cannot be read."""
    source = Source(path)
    try:
        document = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_StrictLoader)
    except OSError as error:
        raise UsageError(f"--config {path} cannot be read: {error.strerror or error}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path} is not valid YAML: {' '.join(str(error).split())}.") from None
    if document is not None and not isinstance(document, Mapping):
        raise UsageError(f"--config {path} must hold names and values; it holds a {type(document).__name__}.")
    read_mapping(document or {}, source)
    return source


def read_mapping(document: Mapping[str, object], source: Source) -> None:
    """Add names and values, flat or under section names, to ``source``; null means not given."""
    seen: set[str] = set()
    for name, content in document.items():
        if isinstance(content, Mapping):
            if name not in SECTIONS:
                source.unknown.append(f"{source.prefix}unknown section {name!r}{did_you_mean(str(name), SECTIONS)}")
                continue
            for inner, value in content.items():
                _take_named(source, str(inner), value, seen)
        else:
            _take_named(source, str(name), content, seen)


def merge(layers: Iterable[Layer]) -> dict[str, Value]:
    """One mapping from layers of rising strength, without flags that stand for others (see ``expand``).

    EXCLUSIVE and DETAILS say what a stronger layer replaces beside the same flag; ``--bf16=false`` takes back what
    ``bf16: true`` of a weaker layer stood for."""
    merged: dict[str, Value] = {}
    for values in layers:
        for key, value in values.items():
            for other, implied in BY_KEY[key].implies:
                if value is False and merged.get(other) == implied:
                    del merged[other]
        layer = expand(values)
        for rivals in EXCLUSIVE:
            given = {key for key in rivals if layer.get(key, False) not in (False, ())}
            if given:
                for key in rivals - given:
                    merged.pop(key, None)
        for main, details in DETAILS.items():
            if main in layer and layer[main] != merged.get(main, layer[main]):
                for key in details:
                    merged.pop(key, None)
        merged.update(layer)
    return merged


def expand(values: Layer) -> dict[str, Value]:
    """Replace flags that stand for others by what they stand for.

    Raises UsageError where one says otherwise than another flag of the same source."""
    expanded = {key: value for key, value in values.items() if not BY_KEY[key].implies}
    origin = {key: BY_KEY[key].name for key in expanded}
    for key, value in values.items():
        flag = BY_KEY[key]
        if value is False:
            continue
        for other, fixed in flag.implies:
            implied = value if fixed is None else fixed
            if expanded.get(other, implied) != implied:
                given = _said(BY_KEY[other], expanded[other], origin[other])
                raise UsageError(
                    f"{_said(flag, value, flag.name)} and {given} contradict each other:"
                    f" {flag.name} means {_said(BY_KEY[other], implied, BY_KEY[other].name)}."
                )
            expanded[other] = implied
            origin.setdefault(other, flag.name)
    return expanded


def _said(flag: Flag, value: Value, name: str) -> str:
    if name != flag.name:  # said by way of a flag that stands for it
        return name
    if flag.kind == "switch":
        return name if value else f"{name}=false"
    return f"{name} {' '.join(value) if isinstance(value, tuple) else value}"


def _until_next_flag(words: Sequence[str]) -> list[str]:
    following: list[str] = []
    for word in words:
        if word.startswith("--") or word == "-h":
            break
        following.append(word)
    return following


def _take_named(source: Source, name: str, value: object, seen: set[str]) -> None:
    flag = BY_KEY.get(key_of(name))
    if flag is None:
        source.unknown_name(name)
    elif flag.key in ("config", "print-config", "help"):
        source.errors.append(f"{source.prefix}{flag.name} works on the command line only.")
    elif flag.key in seen:
        source.errors.append(f"{source.prefix}{flag.name} is given twice.")
    elif value is not None:
        seen.add(flag.key)
        source.take(flag, value if isinstance(value, list | tuple) else [value])


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping, where YAML's own loader silently takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)
