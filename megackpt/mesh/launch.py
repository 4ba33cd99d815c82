"""Who started this process: torchrun, `srun`, or nobody. Needs no torch, so the parser may ask for the world size.

torchrun says everything in RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT. `srun` says who each task is,
but not where to meet: we take the first host of the step's node list, and a port computed from the job's number,
which is the same on every task. A shell inside an allocation (sbatch script, salloc) also carries SLURM_PROCID and
SLURM_NTASKS although `srun` started nothing there; such a process is a single one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from megackpt.config.errors import UsageError

_LOWEST_PORT, _PORTS = 20000, 10000  # below the range from which Linux hands out ports by itself
_OUTER_COMMA = re.compile(r",(?![^\[]*\])")
_BRACKET = re.compile(r"\[([^\]]*)\]")


@dataclass(frozen=True)
class LaunchEnvironment:
    """This process among its peers. `source` is "torchrun", "srun" or "single"."""

    source: str
    rank: int
    world_size: int
    local_rank: int
    master_address: str
    master_port: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"{self.source}: rank {self.rank} is outside a world of {self.world_size}")
        if self.local_rank < 0:
            raise UsageError(f"{self.source}: local rank {self.local_rank} is negative")

    @staticmethod
    def detect(env: Mapping[str, str]) -> LaunchEnvironment:
        """Read the variables of torchrun or, failing these, of `srun`. Raises UsageError if they contradict."""
        if "RANK" in env or "WORLD_SIZE" in env:
            return _torchrun(env)
        if _started_by_srun(env):
            return _srun(env)
        return LaunchEnvironment("single", 0, 1, 0, "localhost", 0)


def first_host(node_list: str) -> str:
    """First host of a Slurm node list: `n[01-04,7]` is n01, `a,b[1-2]` is a, `r[1-2]n[3,5]-ib` is r1n3-ib."""
    first = _OUTER_COMMA.split(node_list.strip())[0]
    host = _BRACKET.sub(lambda bracket: re.split("[,-]", bracket.group(1))[0].strip(), first)
    if not host or "[" in host or "]" in host:
        raise UsageError(f"cannot read the first host of the Slurm node list {node_list!r}; set MASTER_ADDR")
    return host


def _torchrun(env: Mapping[str, str]) -> LaunchEnvironment:
    world_size = _integer(env, "WORLD_SIZE")
    return LaunchEnvironment(
        source="torchrun",
        rank=_integer(env, "RANK"),
        world_size=world_size,
        local_rank=_integer(env, "LOCAL_RANK", default=0 if world_size == 1 else None),
        master_address=env.get("MASTER_ADDR", "localhost"),
        master_port=_integer(env, "MASTER_PORT", default=0 if world_size == 1 else None),
    )


def _started_by_srun(env: Mapping[str, str]) -> bool:
    if "SLURM_PROCID" not in env or not {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"} & set(env):
        return False
    # Every task of `srun` has a step number; the batch script or shell of an allocation (it has a job) has none.
    return "SLURM_JOB_ID" not in env or "SLURM_STEP_ID" in env or "SLURM_STEPID" in env


def _srun(env: Mapping[str, str]) -> LaunchEnvironment:
    world_size = _integer(env, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS")
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    address = env.get("MASTER_ADDR")
    if not address:
        if not hosts and world_size > 1:
            raise UsageError("srun: no SLURM_JOB_NODELIST, so the meeting point is unknown; set MASTER_ADDR")
        address = first_host(hosts) if hosts else "localhost"
    job = _integer(env, "SLURM_JOB_ID", default=0)
    step = _integer(env, "SLURM_STEP_ID", default=0)  # two steps of one job must not meet each other
    return LaunchEnvironment(
        source="srun",
        rank=_integer(env, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_integer(env, "SLURM_LOCALID", default=0 if world_size == 1 else None),
        master_address=address,
        master_port=_integer(env, "MASTER_PORT", default=_LOWEST_PORT + (job * 7 + step) % _PORTS),
    )


def _integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None or text == "":
        if default is None:
            raise UsageError(f"the launch environment lacks {name}; start with torchrun or srun")
        return default
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name}={text!r} in the launch environment is not a whole number") from None
