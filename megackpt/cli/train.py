"""``megackpt train`` and ``pretrain_gpt.py``: flags -> RunConfig -> train.run."""

from __future__ import annotations

import os
from collections.abc import Sequence

from megackpt.config.errors import UsageError
from megackpt.config.parse import configure, refuse
from megackpt.mesh.launch import LaunchEnvironment


def main(argv: Sequence[str]) -> int:
    """Train as ``argv`` asks; returns the exit code.

    A run that is refused ends with code 2 before torch is imported, and rank 0 says why."""
    try:
        launch = LaunchEnvironment.detect(os.environ)
    except UsageError as error:
        refuse(error, _rank_by_name())
    config = configure(argv, os.environ, rank=launch.rank, world_size=launch.world_size)

    from megackpt.train import run  # imports torch: only for a run that can start

    return run(config, launch)


def _rank_by_name() -> int:
    """The rank as the launcher names it, when the rest of its environment makes no sense; 0 if that does not either."""
    for name in ("RANK", "SLURM_PROCID"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 0
