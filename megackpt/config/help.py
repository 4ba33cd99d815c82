"""``--help`` and ``docs/flags.md``, written from the flag table."""

from __future__ import annotations

import textwrap
from dataclasses import MISSING, fields

from megackpt.config.flag import Flag, State, Value
from megackpt.config.flags import FLAGS, GROUPS
from megackpt.config.resolve import SECTION_TYPES

WIDTH = 100
_INDENT = 30

_INTRO = """\
usage: pretrain_gpt.py [--flag [value ...]] ...        (or: megackpt train ...)

Train a GPT model. Flags are Megatron-LM's where it has them, with its meanings and defaults. Names are not
abbreviated; - and _ are interchangeable in them; --switch=false takes a switch back. Strength: defaults < YAML files
(--config) < the environment variable MEGACKPT_ARGS < command line. Every flag with its state: docs/flags.md.
"""

_STATES: dict[State, str] = {
    "works": "works",
    "accept": "accepted, no effect",
    "reject": "refused",
    "later": "not in this version",
}

_PAGE = """\
# Flags

Written by `python tools/write_flag_docs.py` from the flag table in `megackpt/config/`; do not edit.

Names are Megatron-LM's, with its meanings and defaults. They are never abbreviated, `-` and `_` are interchangeable in
them, and `--switch=false` takes a switch back. A flag that stands twice counts the last time.

- **works**: does what it says.
- **accepted, no effect**: taken, and listed in one line on rank 0: what it asks for is always so, or there is nothing
  to switch.
- **refused**, **not in this version**: the run stops with code 2 before any process group exists and says what to use.
  `--ignore-unsupported` runs without these flags, with a warning for each.
- Anything else is an unknown flag: an error that names the nearest known one.

Strength: defaults < YAML files (`--config run.yaml`, repeatable, later files win) < the environment variable
`MEGACKPT_ARGS` < command line. A YAML file has the same names without dashes in front, flat or under the sections that
`--print-config` prints; `null` means not given. What `--print-config` prints reads back to the same run.
"""


def help_text() -> str:
    """The page of --help: flags that work by group, the rest as lists."""
    lines = [textwrap.fill(part, WIDTH) if "usage" not in part else part for part in _INTRO.strip().split("\n\n")]
    text = "\n\n".join(lines)
    for group in GROUPS:
        rows = [flag for flag in FLAGS if flag.group == group and flag.state == "works"]
        if rows:
            text += f"\n\n{group}:\n" + "\n".join(_entry(flag) for flag in rows)
    for state, title in (
        ("accept", "Accepted, no effect here"),
        ("later", "Refused: not available in this version"),
        ("reject", "Refused, with a sentence on what to use"),
    ):
        names = sorted(flag.name for flag in FLAGS if flag.state == state)
        wrapped = textwrap.fill(
            "  ".join(names), WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
        )
        text += f"\n\n{title}:\n{wrapped}"
    return text + "\n"


def markdown() -> str:
    """The page docs/flags.md."""
    text = _PAGE
    for group in GROUPS:
        text += f"\n## {group}\n\n| flag | state | default | meaning |\n|---|---|---|---|\n"
        for flag in FLAGS:
            if flag.group == group:
                cells = (f"`{flag.usage}`", _STATES[flag.state], default_of(flag), _meaning(flag))
                text += f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"
    return text


def default_of(flag: Flag) -> str:
    """How the default of a working flag reads; empty for switches and for flags without one."""
    if flag.state != "works":
        return ""
    if flag.required:
        return "must be given"
    if flag.default is not None:
        return flag.default
    if flag.target is None or flag.kind == "switch":
        return ""
    shown = field_default(flag)
    if shown is None:
        return ""
    return " ".join(shown) if isinstance(shown, tuple) else str(shown)


def field_default(flag: Flag) -> Value | None:
    """What the field of a flag is if nobody says otherwise, as a user would give it; None: nothing, or it must be
    given."""
    assert flag.target is not None
    section, name = flag.target.split(".")
    value = next(f.default for f in fields(SECTION_TYPES[section]) if f.name == name)
    return None if value is MISSING else flag.user_value(value)


def _entry(flag: Flag) -> str:
    default = default_of(flag)
    body = flag.help + (f" [{default}]" if default else "")
    lines = textwrap.wrap(body, WIDTH - _INDENT, break_on_hyphens=False)
    head = "  " + flag.usage
    if len(head) < _INDENT - 1:
        head = head.ljust(_INDENT) + lines.pop(0)
    return "\n".join([head, *(" " * _INDENT + line for line in lines)])


def _meaning(flag: Flag) -> str:
    text = flag.help[:1].upper() + flag.help[1:]
    if flag.neutral:
        values = " and ".join(f"`{word}`" for word in flag.neutral)
        text = f"{text} {values} {'is' if len(flag.neutral) == 1 else 'are'} accepted.".strip()
    return text
