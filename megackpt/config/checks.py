"""Small checks that the settings share.  Each raises UsageError with the flag, the number and what would be valid."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence

from megackpt.config.errors import UsageError


def at_least(flag: str, value: int | float | None, low: int | float) -> None:
    """Refuse a number below ``low`` (or one that is not a number); None passes."""
    if value is not None and not value >= low:
        raise UsageError(f"{flag} must be at least {low}; got {value}.")


def above_zero(flag: str, value: float) -> None:
    """Refuse a number that is not finite and above 0."""
    if not 0 < value < math.inf:
        raise UsageError(f"{flag} must be above 0; got {value}.")


def within(flag: str, value: float, low: float, high: float, *, closed: bool = False) -> None:
    """Refuse a number outside [low, high), or outside [low, high] when ``closed``."""
    if not (low <= value <= high if closed else low <= value < high):
        raise UsageError(f"{flag} must be in [{low}, {high}{']' if closed else ')'}; got {value}.")


def one_of(flag: str, value: object, choices: Sequence[str]) -> None:
    """Refuse a word that is not among ``choices``, with the nearest one."""
    if value not in choices:
        raise UsageError(f"{flag} takes {either(choices)}; got {value!r}{did_you_mean(str(value), choices, 0.8)}")


def did_you_mean(word: str, known: Iterable[str], likeness: float = 0.7) -> str:
    """`. Did you mean ...?` when something among ``known`` is spelled much like ``word``; else a full stop."""
    spelled = {_plain(name): name for name in known}
    near = difflib.get_close_matches(_plain(word), list(spelled), n=1, cutoff=likeness)
    return f". Did you mean {spelled[near[0]]}?" if near else "."


def either(words: Sequence[object]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    texts = [str(word) for word in words]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


def nearest_multiples(value: int, base: int) -> str:
    """The multiples of ``base`` (above 0) next to ``value``: `8 or 12`."""
    below = value // base * base
    return either([number for number in (below, below + base) if number > 0])


def nearest_divisors(value: int, number: int) -> str:
    """The divisors of ``number`` next to ``value``, from below and above: `2 or 4`."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = [d for d in divisors if d < value][-1:]
    return either(below + [d for d in divisors if d > value][:1])


def _plain(word: str) -> str:
    return word.lower().replace("_", "-")
