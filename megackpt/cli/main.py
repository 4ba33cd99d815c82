"""The ``megackpt`` command: finds the command's module in a table and loads only that."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megackpt import __version__


@dataclass(frozen=True)
class Command:
    """A command: the module whose ``main(argv) -> int`` runs it, and one line about it."""

    module: str
    summary: str


COMMANDS: Mapping[str, Command] = {
    "train": Command("megackpt.cli.train", "train a GPT model (the same as pretrain_gpt.py)"),
    "plan": Command("megackpt.cli.plan", "memory and time of a run before it starts, and the recompute that fits"),
    "convert": Command("megackpt.cli.convert", "weights from and to Hugging Face, and from Megatron-LM"),
    "generate": Command("megackpt.cli.generate", "continue a text with the weights of a checkpoint"),
    "calibrate": Command("megackpt.cli.calibrate", "measure this machine for plan --machine FILE"),
    "compare": Command("megackpt.cli.compare", "two plans written by plan --json, side by side"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code (2 for a command that does not exist)."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage(), end="")
        return 0
    if words[0] == "--version":
        print(f"megackpt {__version__}")
        return 0
    command = COMMANDS.get(words[0])
    if command is None:
        print(f"megackpt: error: unknown command {words[0]!r}.\n{usage()}", file=sys.stderr, end="")
        return 2
    code: int = importlib.import_module(command.module).main(words[1:])
    return code


def usage() -> str:
    """The page of ``megackpt --help``."""
    rows = "".join(f"  {name:<10}{command.summary}\n" for name, command in COMMANDS.items())
    return f"usage: megackpt COMMAND ...\n\n{rows}\nmegackpt COMMAND --help describes one.\n"
