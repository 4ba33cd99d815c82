"""A run says what it left out, `--full` runs it, and a test that hangs is ended."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.pool import ROOT

CASES = """
import threading, time
import pytest, torch

@pytest.mark.full
def test_long():
    pass

@pytest.mark.timeout(1)
def test_hangs():
    time.sleep(60)

def test_one_thread():
    assert torch.get_num_threads() == 1
    assert torch.initial_seed() == 1234
"""


@pytest.mark.parametrize(("options", "counts"), [
    ([], "1 failed, 1 passed, 1 skipped"),
    (["--full"], "1 failed, 2 passed"),
])  # fmt: skip
def test_options_and_limits(options: list[str], counts: str, tmp_path: Path) -> None:
    (tmp_path / "test_cases.py").write_text(CASES)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml"),
               "-p", "no:cacheprovider", *options, str(tmp_path / "test_cases.py")]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert counts in done.stdout
    assert "FAILED" in done.stdout
    assert "Timeout" in done.stdout
    assert ("not run: 1 (part of the full suite: run with --full)" in done.stdout) == (not options)
