"""Launch environments of torchrun, srun and a bare process, and that reading them needs no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megackpt.config.errors import UsageError
from megackpt.mesh.launch import LaunchEnvironment, first_host

SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "gpu[007-008,12]",
}


def test_torchrun() -> None:
    env = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29501",
    }
    assert LaunchEnvironment.detect(env) == LaunchEnvironment("torchrun", 3, 4, 1, "10.0.0.1", 29501)
    # torchrun started by srun, once per node: torchrun's ranks count, Slurm's do not
    assert LaunchEnvironment.detect({**SRUN, **env}) == LaunchEnvironment(
        "torchrun", 3, 4, 1, "10.0.0.1", 29501
    )


def test_srun() -> None:
    launch = LaunchEnvironment.detect(SRUN)
    assert launch == LaunchEnvironment("srun", 5, 8, 1, "gpu007", 20000 + (4711 * 7 + 2) % 10000)
    assert LaunchEnvironment.detect({**SRUN, "SLURM_STEP_ID": "3"}).master_port == launch.master_port + 1
    named = LaunchEnvironment.detect({**SRUN, "MASTER_ADDR": "head", "MASTER_PORT": "1234"})
    assert (named.master_address, named.master_port) == ("head", 1234)
    # a step smaller than its job, on nodes of its own
    step = LaunchEnvironment.detect({**SRUN, "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_NODELIST": "gpu008"})
    assert (step.world_size, step.master_address) == (6, "gpu008")
    minimal = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "a,b"}
    assert LaunchEnvironment.detect(minimal).master_address == "a"


def test_a_single_process() -> None:
    single = LaunchEnvironment("single", 0, 1, 0, "localhost", 0)
    assert LaunchEnvironment.detect({}) == single
    # the shell of an allocation carries the job's numbers, but srun started nothing in it
    shell = {key: value for key, value in SRUN.items() if key != "SLURM_STEP_ID"}
    assert LaunchEnvironment.detect({**shell, "SLURM_PROCID": "0"}) == single


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("node1", "node1"),
        ("n[01-04,7]", "n01"),
        ("n[7,01-04],m2", "n7"),
        ("a,n[1-2]", "a"),
        ("r[1-2]n[03,5]-ib,x", "r1n03-ib"),
        ("cn-1.site.org,cn-2.site.org", "cn-1.site.org"),
    ],
)
def test_first_host(node_list: str, host: str) -> None:
    assert first_host(node_list) == host


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "0"}, "lacks WORLD_SIZE"),
        (
            {"RANK": "4", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_PORT": "1"},
            "rank 4 is outside a world of 4",
        ),
        ({"RANK": "x", "WORLD_SIZE": "4"}, "RANK='x' in the launch environment is not a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "lacks LOCAL_RANK"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}, "set MASTER_ADDR"),
        (
            {"SLURM_PROCID": "2", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "a"},
            "rank 2 is out",
        ),
    ],
)
def test_contradictions_are_refused(env: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LaunchEnvironment.detect(env)
    with pytest.raises(UsageError, match="cannot read the first host"):
        first_host("")


def test_layout_and_launch_do_not_import_torch() -> None:
    code = "import sys, megackpt.mesh.layout, megackpt.mesh.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
