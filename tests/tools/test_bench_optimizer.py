"""The data-parallel benchmark runs, its sides agree, and the bytes it counts are the formula's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.pool import ROOT, SINGLE_THREAD


def test_a_small_run(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "tools/bench_optimizer.py", "--rounds", "2", "--layers", "2", "--hidden", "64"]
    environment = {**os.environ, **SINGLE_THREAD, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--json", str(out)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    count = found["parameters"]
    assert count == 2 * (2 * 4 * 64 * 64 + 5 * 64)
    assert [len(run["wall"]) for run in found["runs"]] == [2, 2, 2]
    state = 4 * 8  # the scalar step of each parameter, fp32
    for name, bytes_per_parameter in (("ours", 12), ("ours, bf16", 12)):
        assert 0 <= found["held"][name] - bytes_per_parameter * count <= 2 * state + 2048, name
