"""One error for everything that can go wrong while a schedule runs: it says who was doing what with whom."""

from __future__ import annotations

import re
import time
from collections import deque

from megackpt.plan.schedule import Action

_REMEMBERED = 4  # completed actions that an error shows
_SOURCE_LINE = re.compile(r"^\[[^\]]*:\d+\] ")  # gloo begins with the place in its own source


class PipelineError(RuntimeError):
    """A schedule could not be run to its end. The cause, if there is one, is `__cause__`.

    `rank` is global; `action` as printed (``F3.0``); `peer` is the global rank of the other end of a failed
    transfer, None where the failure was this rank's own.
    """

    rank: int = -1
    stage: int = -1
    action: str = ""
    peer: int | None = None


class Progress:
    """What a rank is doing right now and did last; kept so that a failure can be named. Costs three
    assignments.
    """

    def __init__(self, rank: int, stage: int, stages: int) -> None:
        self.rank, self.stage, self.stages = rank, stage, stages
        self._done: deque[Action] = deque(maxlen=_REMEMBERED)
        self._verb = "start"
        self._action: Action | None = None
        self._peer: int | None = None
        self._since = time.monotonic()

    def enter(self, verb: str, action: Action | None, peer: int | None = None) -> None:
        """`verb` is compute, recv or send; `peer` the global rank at the other end of a transfer."""
        self._verb, self._action, self._peer = verb, action, peer
        self._since = time.monotonic()

    def complete(self, action: Action) -> None:
        self._done.append(action)

    def words(self) -> str:
        """What is being done now, with whom, since when, and what was done last."""
        last = " ".join(str(action) for action in tuple(self._done)) or "none"
        return f"{self._doing()} for {time.monotonic() - self._since:.1f} s; last completed: {last}"

    def _doing(self) -> str:
        doing = self._verb if self._action is None else f"{self._verb} for {self._action}"
        return doing if self._peer is None else f"{doing} {'to' if self._verb == 'send' else 'from'} rank {self._peer}"

    def error(self, cause: BaseException) -> PipelineError:
        """The error for a failure of what was entered last."""
        last = " ".join(str(action) for action in self._done) or "none"
        seconds = time.monotonic() - self._since
        error = PipelineError(
            f"rank {self.rank} (stage {self.stage} of {self.stages}): {self._doing()} failed after"
            f" {seconds:.1f} s: {type(cause).__name__}: {reason_of(cause)}; last completed: {last}"
        )
        error.rank, error.stage, error.peer = self.rank, self.stage, self._peer
        error.action = "" if self._action is None else str(self._action)
        return error


def reason_of(cause: BaseException) -> str:
    """The first line of an error's text, without the place in gloo's sources that it may begin with and its advice."""
    return (_SOURCE_LINE.sub("", str(cause).strip()).splitlines() or [""])[0].partition(". This is typically ")[0]
