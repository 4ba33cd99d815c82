"""Keep secrets out of what leaves the process: dashboards store a run's configuration in clear.

A value is hidden when its key contains token, key, secret or password in any case, with these exceptions:

* a `tokenizer` in the key is cut out before the key is tested, so `tokenizer_model` is shown and
  `tokenizer_access_token` is not;
* true, false and null are shown: `apply_query_key_layer_scaling: true` gives nothing away;
* a whole section under such a key is hidden with everything in it.

In texts, credentials inside a URL (`https://user:password@host`) and `NAME=value` assignments whose name
matches are hidden too, and so is the text after an option that matches in a list (`["--api-key", "abc"]`).
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "<redacted>"
SECRET_KEY = re.compile(r"token|key|secret|password", re.IGNORECASE)
HARMLESS = re.compile(r"tokeniz(?:er|ation|e)s?", re.IGNORECASE)
URL_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+(?=@)")
ASSIGNMENT = re.compile(r"([\w-]*(?:token|key|secret|password)[\w-]*=)\S+", re.IGNORECASE)


def is_secret(key: str) -> bool:
    """Whether a value under `key` must be hidden."""
    return SECRET_KEY.search(HARMLESS.sub("", key)) is not None


def redact(value: Any) -> Any:
    """A copy of `value` (mappings, dataclasses, sequences, scalars) made of plain JSON types, secrets hidden.

    Other objects become their `str`, redacted as text.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _under(str(k), v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return _sequence(list(value))
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return _text(os.fspath(value) if isinstance(value, os.PathLike) else str(value))


def _under(key: str, value: Any) -> Any:
    if is_secret(key) and value is not None and not isinstance(value, bool):
        return HIDDEN
    return redact(value)


def _sequence(values: list[Any]) -> list[Any]:
    shown = []
    follows_secret_option = False
    for value in values:
        shown.append(HIDDEN if follows_secret_option and not _is_option(value) else redact(value))
        follows_secret_option = _is_option(value) and "=" not in value and is_secret(value)
    return shown


def _is_option(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("--")


def _text(text: str) -> str:
    def assignment(match: re.Match[str]) -> str:
        return match[1] + HIDDEN if is_secret(match[1]) else match[0]

    return ASSIGNMENT.sub(assignment, URL_CREDENTIALS.sub(HIDDEN, text))
