"""The board: what every rank was doing, for the moment when one of them fails.

A rank that dies says nothing, and one that stands still says nothing either; their peers only know that a message did
not come. So each rank writes a line about itself to the store of the process group every fifth of a second, from a
thread, and the first rank that fails reads all of them, looks again a little later at who still writes, and prints the
table. The thread also ends the process when its launcher is gone, and on SIGTERM, which the main thread would not see
while it waits inside a collective: it then says where that was. One signal may be left for the run to act on
(`asks`): the thread only remembers it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist

BEAT_S = 0.2
LOOK_AGAIN_S = 5 * BEAT_S
_STORE_LIMIT = timedelta(seconds=5)
_FAILURE = "board/failure"
_ENDING = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class Line:
    """What a rank last said of itself: a counter that moves while it lives, its place in the mesh, what it was doing,
    and, if it has ended by itself, how.
    """

    beat: int
    place: str
    doing: str
    ended: str = ""


class Board:
    """This rank's side of the board; a context manager around the life of the process group.

    `launcher` is the process whose end ends this one (None: nobody's). `asks`: the signal that asks this process to
    end when it is ready, however often it comes; `asked` says whether it did. Outside of a main thread signals are left
    as they are.
    """

    def __init__(
        self, rank: int, world_size: int, *, launcher: int | None = None, asks: signal.Signals | None = None
    ) -> None:
        self.rank, self.world_size, self.launcher = rank, world_size, launcher
        self.place = f"rank {rank}"
        self.asked = False
        self._asks, self._ending = asks, tuple(number for number in _ENDING if number != asks)
        self._doing: Callable[[], str] = lambda: "start-up"
        self._store: Any = None
        self._beat = 0
        self._stop = False
        self._ended = ""
        self._failed, self._reported = False, False
        self._lock, self._reporting = threading.Lock(), threading.Lock()
        self._wake_read, self._wake_write = -1, -1
        self._before: tuple[int, dict[signal.Signals, Any]] | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Board:
        if self.world_size > 1:
            # A connection of its own: the main thread may wait on the other one for minutes.
            store: Any = dist.distributed_c10d._get_default_store()
            self._store = store.clone()
            self._store.set_timeout(_STORE_LIMIT)
            self._publish()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        if threading.current_thread() is threading.main_thread():
            numbers = self._ending if self._asks is None else (*self._ending, self._asks)
            handlers = {number: signal.signal(number, _ignore) for number in numbers}
            self._before = (signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False), handlers)
        self._thread = threading.Thread(target=self._run, name="board", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop = True
        os.write(self._wake_write, b"\0")
        assert self._thread is not None
        self._thread.join()
        if self._before is not None:
            signal.set_wakeup_fd(self._before[0])
            for number, handler in self._before[1].items():
                signal.signal(number, handler)
            self._before = None
        if error is None and not self._failed:
            with contextlib.suppress(RuntimeError):
                self._publish("finished")
        self._doing = lambda: "over"  # what told it holds the whole run
        os.close(self._wake_read)
        os.close(self._wake_write)

    def says(self, place: str, doing: Callable[[], str]) -> None:
        """From now on: who this rank is, and what tells in words where it is.  `doing` is called from the thread and
        must be cheap and safe at any moment.
        """
        self.place, self._doing = place, doing
        os.write(self._wake_write, b"\0")

    def failed(self, message: str, how: str) -> None:
        """Print `message`; `how` tells the others in a few words how this rank ends.  The first rank to come here adds
        what every rank was doing, once, whichever of its threads comes here first."""
        self._failed = True
        print(f"megackpt: error: {message}", file=sys.stderr, flush=True)
        if self._store is None:
            return
        with self._reporting:
            if not self._reported:
                self._reported = True
                self._report(how)

    def _report(self, how: str) -> None:
        lines: list[str] = []
        try:
            self._publish(how)
            if self._store.compare_set(_FAILURE, "", str(self.rank)) == str(self.rank).encode():
                lines = self._everyone()
        except RuntimeError:  # the store lived in a process that is gone
            lines = ["  not known: the process that kept the record is gone"]
        if lines:
            print("\n".join(["megackpt: where every rank was:", *lines]), file=sys.stderr, flush=True)

    def _publish(self, ended: str = "") -> None:
        if self._store is None:
            return
        with self._lock:
            self._beat += 1
            self._ended = ended or self._ended
            line = Line(self._beat, self.place, self._words(), self._ended)
            self._store.set(f"board/{self.rank}", json.dumps(asdict(line)))

    def _words(self) -> str:
        try:
            return self._doing()
        except Exception as error:  # the main thread may be changing what is described
            return f"busy ({type(error).__name__})"

    def _lines(self) -> dict[int, Line]:
        found = {}
        for rank in range(self.world_size):
            key = f"board/{rank}"
            if self._store.check([key]):
                found[rank] = Line(**json.loads(self._store.get(key)))
        return found

    def _everyone(self) -> list[str]:
        """One line for each rank. Who does not write any more, without having said that it ends, is dead or frozen."""
        before = self._lines()
        time.sleep(LOOK_AGAIN_S)
        words = []
        for rank, line in sorted(self._lines().items()):
            silent = not line.ended and rank != self.rank and line.beat == before[rank].beat
            state = f"{line.ended}; " if line.ended else ""
            if silent:
                state = f"no sign of life; at most {BEAT_S} s before the last one it was in "
            words.append(f"  {line.place}: {state}{line.doing}")
        return words

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop:
            ready, _, _ = select.select([self._wake_read], [], [], BEAT_S)
            signals = os.read(self._wake_read, 64) if ready else b""
            if self._stop:
                return
            self.asked = self.asked or (self._asks is not None and self._asks in signals)
            for number in self._ending:
                if number in signals:
                    self._end(f"ended by {number.name}", number)
            if self.launcher is not None and os.getppid() != self.launcher:
                self._end("ended, because its launcher is gone", signal.SIGTERM)
            with contextlib.suppress(RuntimeError):  # a store that is gone is for the main thread to find out
                self._publish()

    def _end(self, how: str, number: signal.Signals) -> None:
        """Say how and where, then end the whole process as the signal would have: the main thread may be waiting for a
        message in C++.
        """
        if self._reporting.locked():  # the main thread is at it
            self._reporting.acquire(timeout=4 * LOOK_AGAIN_S)
        else:
            self.failed(f"{self.place} {how} in {self._words()}", how)
        os._exit(128 + number)


def _ignore(number: int, frame: FrameType | None) -> None:
    """The board's thread acts on the signal."""
