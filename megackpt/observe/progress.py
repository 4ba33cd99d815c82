"""Time left of a run, from what its last iterations really took, evaluation and saving included."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

WINDOW = 64


def format_duration(seconds: float) -> str:
    """`0:01:23`, or `2d 03:04:05` from a day on; `?` when not finite."""
    if not math.isfinite(seconds):
        return "?"
    whole = max(0, round(seconds))
    days, rest = divmod(whole, 86400)
    hours, minutes, secs = rest // 3600, rest // 60 % 60, rest % 60
    return f"{days}d {hours:02d}:{minutes:02d}:{secs:02d}" if days else f"{hours}:{minutes:02d}:{secs:02d}"


class Progress:
    """Estimates the time left.

    The rate is wall-clock time per iteration over the last `WINDOW` marks. Between two marks lies everything
    the loop does, so evaluations and saves are in it in proportion. The first iteration of a process
    (warm-up, first allocations, compilation) is left out as soon as there is a second.
    """

    def __init__(self, total: int, done: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        """`total` iterations of the run, of which `done` were done before this process started."""
        self.total = total
        self._clock = clock
        self._start = (done, clock())
        self._marks: deque[tuple[int, float]] = deque(maxlen=WINDOW)

    def mark(self, iteration: int) -> None:
        """Call at the end of an iteration (counted from 1); later calls must not go backwards."""
        self._marks.append((iteration, self._clock()))

    def left(self) -> float | None:
        """Seconds until `total` is reached; None before the first iteration has ended."""
        if not self._marks:
            return None
        (last, now) = self._marks[-1]
        (first, then) = self._marks[0] if len(self._marks) > 1 else self._start
        if last <= first:
            return None
        return max(0, self.total - last) * (now - then) / (last - first)
