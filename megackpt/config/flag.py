"""One row of the flag table, and how its words become a value.

States of a flag:

works   it does what Megatron's flag of that name does (or what its help says, for flags of our own)
accept  taken and without effect here: what it asks for is always so, or there is nothing to switch
reject  refused for good, with a sentence on what to use
later   refused in this version, with a sentence on what to use meanwhile where there is something
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megackpt.config.checks import at_least, one_of
from megackpt.config.errors import UsageError

State = Literal["works", "accept", "reject", "later"]
Kind = Literal["switch", "int", "float", "text", "many"]
Value = bool | int | float | str | tuple[str, ...]
Layer = Mapping[str, Value]
"""Values by flag key (the name without dashes in front, `_` as `-`) from one source, such as one YAML file."""

METAVARS: Mapping[Kind, str] = {"switch": "", "int": "N", "float": "X", "text": "TEXT", "many": "TEXT ..."}


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag.  ``help`` says what it does; for a refused flag, what to use instead (may be empty)."""

    name: str
    group: str
    state: State
    kind: Kind
    help: str = ""
    target: str | None = None
    """`section.field` of RunConfig that it sets.  At most one flag per field."""
    const: bool = True
    """Of a switch: what it sets the field to."""
    words: tuple[tuple[str, Value], ...] = ()
    """(word of the user, value of the field) pairs; the first pair of a value is how it is written back."""
    choices: tuple[str, ...] = ()
    implies: tuple[tuple[str, Value | None], ...] = ()
    """(key of another flag, value) that this flag stands for; the value None passes on its own."""
    minimum: int | None = None
    metavar: str = ""
    required: bool = False
    default: str | None = None
    """How help words a default that is not simply the field's."""
    neutral: tuple[str, ...] = ()
    """Of a refused flag: the values that ask for nothing and are accepted."""
    warning: str = ""
    """Said once when the flag is given."""

    @property
    def key(self) -> str:
        """Name without the leading dashes, `_` as `-`: what a YAML file is matched by."""
        return key_of(self.name)

    @property
    def usage(self) -> str:
        """`--name METAVAR` for help pages."""
        value = "|".join(self.choices or [word for word, _ in self.words]) or self.metavar or METAVARS[self.kind]
        return f"{self.name} {value}".rstrip()

    def convert(self, raw: Sequence[object], origin: str = "") -> Value:
        """The value of the given words (strings of a command line, or scalars of YAML).

        Raises UsageError that names the flag, and ``origin`` where it is not the command line."""
        where = f"{origin}: " if origin else ""
        try:
            value = self._many(raw) if self.kind == "many" else self._scalar(raw)
            if self.minimum is not None and isinstance(value, int):
                at_least(self.name, value, self.minimum)
            choices = self.choices or tuple(word for word, _ in self.words)
            if choices and self.state == "works":
                one_of(self.name, value, choices)
        except UsageError as error:
            raise UsageError(f"{where}{error}") from None
        return value

    def _many(self, raw: Sequence[object]) -> tuple[str, ...]:
        if not raw:
            raise UsageError(f"{self.name} needs at least one value.")
        if any(isinstance(word, bool) or not isinstance(word, str | int | float) for word in raw):
            raise UsageError(f"{self.name} takes a list of words; got {list(raw)!r}.")
        return tuple(str(word) for word in raw)

    def _scalar(self, raw: Sequence[object]) -> Value:
        if self.kind == "switch":
            word = raw[0] if raw else True
            value = {"true": True, "false": False}.get(str(word).lower())
            if len(raw) > 1 or value is None:
                raise UsageError(f"{self.name} is a switch: give it alone, or with =true or =false; got {word!r}.")
            return value
        if len(raw) != 1:
            got = " ".join(str(word) for word in raw) if raw else "none"
            raise UsageError(f"{self.name} takes one value; got {got}.")
        word = raw[0]
        if isinstance(word, bool) or not isinstance(word, str | int | float):
            raise UsageError(f"{self.name} takes {_NOUNS[self.kind]}; got {word!r}.")
        if self.kind == "text":
            return str(word)
        try:
            number = int(str(word)) if self.kind == "int" else float(word)
        except ValueError:
            raise UsageError(f"{self.name} takes {_NOUNS[self.kind]}; got {word!r}.") from None
        if not math.isfinite(number):
            raise UsageError(f"{self.name} takes a finite number; got {word!r}.")
        return number

    def field_value(self, value: Value) -> Value:
        """What the target field becomes when the user says ``value``."""
        if self.kind == "switch":
            return self.const if value else not self.const
        for word, field in self.words:
            if value == word:
                return field
        return value

    def user_value(self, field: Value | None) -> Value | None:
        """The inverse of ``field_value``: what a user would say to get ``field``."""
        if self.kind == "switch":
            return field == self.const
        for word, value in self.words:
            if field == value:
                return word
        return field

    def refusal(self, value: Value) -> str | None:
        """Why this flag with this value cannot be used; None if it can."""
        words = " ".join(value) if isinstance(value, tuple) else str(value)
        if self.state in ("works", "accept") or words in self.neutral or (self.kind == "switch" and not value):
            return None
        shown = self.name if self.kind == "switch" else f"{self.name} {words}"
        reason = "is not available in this version" if self.state == "later" else "is not part of megackpt"
        return f"{shown} {reason}{': ' + self.help if self.help else '.'}"


_NOUNS: Mapping[Kind, str] = {"int": "an integer", "float": "a number", "text": "a word"}


def key_of(name: str) -> str:
    """`--foo_bar`, `foo_bar` and `foo-bar` are one flag: `foo-bar`."""
    return name.removeprefix("--").replace("_", "-")


def works(name: str, group: str, kind: Kind, target: str | None, help: str, **details: object) -> Flag:
    """A row of state works."""
    return _row(name, group, "works", kind, help, target=target, **details)


def accept(name: str, group: str, kind: Kind, help: str) -> Flag:
    """A row of state accept; ``help`` says why it has no effect."""
    return _row(name, group, "accept", kind, help)


def reject(name: str, group: str, kind: Kind, help: str, *neutral: str) -> Flag:
    """A row of state reject; ``help`` says what to use."""
    return _row(name, group, "reject", kind, help, neutral=neutral)


def later(name: str, group: str, kind: Kind, help: str = "", *neutral: str) -> Flag:
    """A row of state later; ``help`` says what to use meanwhile, if anything."""
    return _row(name, group, "later", kind, help, neutral=neutral)


def _row(name: str, group: str, state: State, kind: Kind, help: str, **details: object) -> Flag:
    return Flag(name=name, group=group, state=state, kind=kind, help=help, **details)  # type: ignore[arg-type]
