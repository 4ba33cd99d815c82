"""What ends a run before its last iteration, with a checkpoint: a signal on any rank, or the time that it was given."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megackpt.config.schedule import TrainConfig


class Ending:
    """Asked by all ranks together between two iterations: they stop at the same one or nowhere."""

    def __init__(
        self, config: TrainConfig, group: ProcessGroup | None, began: float, signalled: Callable[[], bool]
    ) -> None:
        """`began`: when the process took up work, by `time.monotonic`. `signalled`: this rank has the signal. `group`:
        see ``persist.coordination_group``."""
        self._signal = config.exit_signal if config.exit_signal_handler else None
        self._minutes, self._group = config.exit_duration_minutes, group
        self._began, self._signalled = began, signalled

    def reason(self, *, trained: bool = True) -> str | None:
        """Why the run stops here, in words; None: it goes on.  One small message on the host, only if flags ask.  A run
        that has not `trained` yet is not late: started again and again it would never get anywhere."""
        if self._signal is None and not self._minutes:
            return None
        late = trained and bool(self._minutes) and time.monotonic() - self._began > 60 * self._minutes
        mine = 2 if self._signal is not None and self._signalled() else int(late)
        found = torch.tensor(mine)
        if dist.get_world_size() > 1:
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        words = (None, f"--exit-duration-in-mins {self._minutes:g} are over", f"{self._signal} was received")
        return words[int(found.item())]
