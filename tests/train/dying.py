"""`pretrain_gpt.py` with one rank that is killed, or stands still, at a chosen place: for tests through torchrun.

    dying.py RANK HOW PLACE -- flags

HOW is kill, freeze, sleep or raise; PLACE is what `Progress.enter` is told in the second iteration (`F2.0 compute`), or
`update`: between the reduction of its gradients and the update.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from megackpt.cli.train import main
from megackpt.pipeline.errors import Progress
from megackpt.train.step import Stepper


def end(how: str) -> None:
    print(f"dying: {how} at {time.time():.3f}", flush=True)
    if how == "sleep":
        time.sleep(600)
    if how == "raise":
        raise ValueError("planted")
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}[how])


def plant(how: str, place: str) -> None:
    """Let this process end when it comes to `place` for the second time round (iteration 2)."""
    iteration = [0]
    accumulate, enter = Stepper.accumulate, Progress.enter

    def counted(self: Stepper, *args: Any) -> Any:
        iteration[0] += 1
        result = accumulate(self, *args)
        if place == "update" and iteration[0] == 2:
            end(how)
        return result

    def entered(self: Progress, verb: str, action: Any, peer: int | None = None) -> None:
        enter(self, verb, action, peer)
        if iteration[0] == 2 and f"{action} {verb}" == place:
            end(how)

    Stepper.accumulate, Progress.enter = counted, entered  # type: ignore[method-assign]


if __name__ == "__main__":
    rank, how, place, *flags = sys.argv[1:]
    if os.environ["RANK"] == rank:
        plant(how, place)
    sys.exit(main(flags[1:]))
