"""Flags out of a public Megatron launch script, without running it.

The script is read as far as it says what is started: assignments, arrays, conditions on known values, and the command
that has ``--num-layers``.  Commands are never executed; what only they know (``$(hostname)``) stays open.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megackpt.config.errors import UsageError
from megackpt.config.shell import Shell, statements

MARK = "--num-layers"
SILENT = ("echo", "printf", "tee")
_SBATCH = re.compile(r"^#SBATCH\s+(?:--(nodes|ntasks-per-node|ntasks)[= ]|-(N|n)\s*)(\d+)", re.M)


@dataclass(frozen=True)
class LaunchScript:
    """What a script starts: the words after the program, and how many processes."""

    path: str
    program: str
    words: tuple[str, ...]
    world_size: int | None
    """None where the script does not say, or says it through something that only the cluster knows."""
    notices: tuple[str, ...] = field(default=())


def read_launch_script(path: str, env: Mapping[str, str]) -> LaunchScript:
    """Read the file.  ``env``: variables from outside, as the shell that starts it would have.

    Raises UsageError when it cannot be read or starts no training."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    return parse_launch_script(text, env, path)


def parse_launch_script(text: str, env: Mapping[str, str], path: str = "script") -> LaunchScript:
    """The same for a script's text."""
    shell = Shell({**_of_slurm(text), **env})
    found: list[list[str]] = []
    _run(shell, text, found)
    candidates = [command for command in found if any(word.split("=")[0].replace("_", "-") == MARK for word in command)]
    if not candidates:
        raise UsageError(
            f"{path} starts no training that can be recognised: no command has {MARK}."
            + (f" Variables that it expects from outside: {', '.join(shell.unset)}." if shell.unset else "")
        )
    command = candidates[0]
    place = _program(command)
    outside = ("SLURM", "MASTER", "NODE_RANK")
    unset = [name for name in shell.unset if name not in shell.variables and not name.startswith(outside)]
    notices = []
    if unset:
        notices.append(f"{path}: variables that are not set, read as empty: {', '.join(unset)}")
    if len(candidates) > 1:
        notices.append(f"{path} starts {len(candidates)} runs; the first one is planned")
    notices += [f"{path}: {text}" for text in shell.notices]
    return LaunchScript(path, command[place], tuple(command[place + 1 :]), _processes(command[:place]), tuple(notices))


def _run(shell: Shell, text: str, found: list[list[str]], depth: int = 0) -> None:
    """Follow the statements; a command that is itself a line of shell is followed in turn."""
    for words in statements(shell, text):
        line = _line_of_shell(words)
        if line is not None and depth < 4:
            _run(shell, line, found, depth + 1)
        elif words and words[0] not in SILENT:
            found.append(words)


def _line_of_shell(words: Sequence[str]) -> str | None:
    """What ``eval ...``, ``bash -c '...'`` and ``srun ... bash -c '...'`` run."""
    if words[:1] == ["eval"]:
        return " ".join(words[1:])
    for place, word in enumerate(words[:-1]):
        shell = Path(words[place - 1]).name if place else ""
        if shell in ("bash", "sh") and re.fullmatch(r"-\w*c", word):
            return words[place + 1]
    return None


def _program(command: Sequence[str]) -> int:
    """The place of the training program: the last word before the flags that ends in .py."""
    mark = next(k for k, word in enumerate(command) if word.split("=")[0].replace("_", "-") == MARK)
    places = [k for k in range(mark) if command[k].endswith(".py")]
    if places:
        return places[0]
    launchers = [k for k in range(mark) if command[k] in ("torchrun", "train") or command[k].startswith("torch.distr")]
    return launchers[-1] if launchers else 0


def _processes(launcher: Sequence[str]) -> int | None:
    """Nodes times processes per node, as torchrun, torch.distributed.launch, deepspeed and srun say it."""
    per_node = _option(launcher, "nproc-per-node", "num-gpus")
    nodes = _option(launcher, "nnodes", "num-nodes")
    if per_node is not None:
        return per_node * (nodes or 1) if nodes is not None or not _has(launcher, "nnodes", "num-nodes") else None
    if _has(launcher, "nproc-per-node"):
        return None
    if any(Path(word).name == "srun" for word in launcher):
        tasks = _option(launcher, "ntasks", "n")
        each, machines = _option(launcher, "ntasks-per-node"), _option(launcher, "nodes", "N")
        return tasks if tasks is not None else each * machines if each and machines else None
    return 1 if any(re.fullmatch(r"python[\d.]*", Path(word).name) for word in launcher) else None


def _option(words: Sequence[str], *names: str) -> int | None:
    """The number behind ``--name``, ``--name=`` or ``-n``; `-` and `_` are interchangeable."""
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if _plain(name) in names and name.startswith("-"):
            value = value if equals else words[place + 1] if place + 1 < len(words) else ""
            if value.isdigit():
                return int(value)
    return None


def _has(words: Sequence[str], *names: str) -> bool:
    return any(word.startswith("-") and _plain(word.partition("=")[0]) in names for word in words)


def _plain(name: str) -> str:
    return name.lstrip("-").replace("_", "-")


def _of_slurm(text: str) -> dict[str, str]:
    """Variables that Slurm sets from the script's #SBATCH lines."""
    known: dict[str, str] = {}
    for long, short, number in _SBATCH.findall(text):
        name = long or {"N": "nodes", "n": "ntasks"}[short]
        for variable in {
            "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
            "ntasks": ("SLURM_NTASKS",),
            "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
        }[name]:
            known[variable] = number
    return known
