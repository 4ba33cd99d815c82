"""Saves and ends of runs through the real launcher."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megackpt.config.checkpoint_folder import tracked_iteration
from megackpt.train.checkpoint import load_run
from tests.layouts import SMALL_GPT, Flags, Layout, built, words
from tests.pool import ROOT, SINGLE_THREAD, run_distributed


def _run(flags: Flags, processes: int) -> tuple[int, str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    line = [sys.executable, *(launcher if processes > 1 else []), "pretrain_gpt.py", *words(flags)]
    done = subprocess.run(
        line, cwd=ROOT, env={**os.environ, **SINGLE_THREAD}, capture_output=True, text=True, timeout=100
    )
    return done.returncode, done.stdout + done.stderr


def _position(rank: int, world: int, flags: Flags, layout: Layout) -> int:
    return load_run(built(flags, layout)).position.iteration


def test_an_exit_right_after_a_save_beside_training_leaves_it_whole(tmp_path: Path) -> None:  # CD-04, CD-05
    layout = Layout(tp=2)
    flags = SMALL_GPT | layout.flags | {"save": str(tmp_path), "async-save": True, "save-interval": 5}
    began = time.monotonic()
    code, text = _run(flags, 2)
    assert code == 0 and time.monotonic() - began < 60, text
    assert text.count(f"megackpt: saved {tmp_path}/iter_0000005") == 1, text
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert run_distributed(_position, 2, SMALL_GPT | {"load": str(tmp_path)}, layout) == [5, 5]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no permission to mount a small file system")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.full
def test_a_full_disk_ends_the_run_with_its_reason(small_disk: Path) -> None:  # CD-08
    flags = SMALL_GPT | {"save": str(small_disk), "load": str(small_disk), "save-interval": 1}
    code, text = _run(flags, 1)
    assert code == 1 and "Traceback" not in text, text
    assert "megackpt: error: could not save: rank 0: OSError: [Errno 28] No space left on device" in text, text
    newest = tracked_iteration(small_disk)
    assert newest is not None and newest >= 1
    torn = small_disk / ".iter_0000009.tmp-0badcafe"  # as a kill would have left it
    torn.mkdir()
    code, text = _run(flags | {"save-retain-last": 1, "train-iters": newest}, 1)
    assert code == 0 and f"loaded {small_disk}/iter_{newest:07d} (iteration {newest})" in text, text
    assert f"removed {torn.name}, left over from an interrupted save" in text and not torn.exists()
