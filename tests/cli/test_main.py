"""The dispatcher: its table, its exit codes, and that it loads only what it runs."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from megackpt import __version__
from megackpt.cli.main import COMMANDS, main, usage

ROOT = Path(__file__).parent.parent.parent


def test_every_command_of_the_table_exists() -> None:
    for command in COMMANDS.values():
        assert importlib.util.find_spec(command.module) is not None


@pytest.mark.parametrize("argv", [[], ["--help"], ["help"], ["-h"]])
def test_help_lists_the_commands(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert out == usage() and all(f"  {name}" in out for name in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"megackpt {__version__}\n"


def test_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert capsys.readouterr().err.startswith("megackpt: error: unknown command 'trian'.\nusage: megackpt COMMAND")


def test_dispatcher_loads_no_command_and_no_torch() -> None:
    code = (
        "import sys; from megackpt.cli.main import main; main(['--help']);"
        "sys.exit('torch' in sys.modules or 'megackpt.cli.train' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=60).returncode == 0


def test_train_help_is_the_flag_page(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("usage: pretrain_gpt.py")
