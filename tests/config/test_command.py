"""The entry script as a process: exit codes, who speaks, and no torch before a run is accepted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.config.base import run, words

ROOT = Path(__file__).parent.parent.parent
# A process in which importing torch fails, and nobody sleeps.
WITHOUT_TORCH = (
    "import runpy, sys, time; sys.modules['torch'] = None; sys.argv[0] = 'pretrain_gpt.py'; time.sleep = print;"
    "sys.path.insert(0, '.'); runpy.run_path('pretrain_gpt.py', run_name='__main__')"
)


def start(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    outside = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MEGACKPT_ARGS")}
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *argv],
        cwd=ROOT,
        env={k: v for k, v in outside.items() if not k.startswith("SLURM_")} | env,
        capture_output=True,
        text=True,
        timeout=60,
    )


def torchrun(rank: int, world_size: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }


def srun(rank: int, world_size: int) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NTASKS": str(world_size),
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_NODELIST": "n1",
    }


def test_help_needs_no_torch() -> None:
    done = start("--help", "--num-layers", "x")
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("usage: pretrain_gpt.py") and "--recompute-keep boundaries|layer-input" in done.stdout


@pytest.mark.parametrize("launcher", [torchrun, srun])
def test_only_rank_0_says_why_a_run_is_refused(launcher: object) -> None:
    line = words("--tensor-model-parallel-size", "2")
    first, second = (start(*line, **launcher(rank, 3)) for rank in (0, 1))  # type: ignore[operator]
    assert (first.returncode, first.stdout) == (2, "")
    assert first.stderr == (
        "megackpt: error: 3 processes cannot be arranged as --tensor-model-parallel-size 2 x"
        " --pipeline-model-parallel-size 1 = 2 ranks per copy of the model. Nearest valid number of processes: 2 or"
        " 4.\n"
    )
    # it gives rank 0 the time to speak, which its launcher would end with it
    assert (second.returncode, second.stdout, second.stderr) == (2, "10.0\n", "")


def test_a_broken_launch_environment_is_refused_the_same_way() -> None:
    first, second = (start(*words(), RANK=rank, WORLD_SIZE="two") for rank in "01")
    assert first.returncode == second.returncode == 2
    assert first.stderr.startswith("megackpt: error: WORLD_SIZE='two'") and second.stderr == ""


def test_print_config_goes_to_stdout_on_rank_0_and_notices_to_stderr() -> None:
    line = words("--print-config", "--manual-gc")
    first, second = (start(*line, **torchrun(rank, 4)) for rank in (0, 1))
    assert first.returncode == second.returncode == 0
    assert first.stdout == run(world_size=4).to_yaml()
    assert first.stderr == "megackpt: accepted, no effect here: --manual-gc\n"
    assert (second.stdout, second.stderr) == ("", "")


def test_flags_of_the_environment_count() -> None:
    done = start(*words("--print-config"), MEGACKPT_ARGS="--seed 77")
    assert "seed: 77\n" in done.stdout
