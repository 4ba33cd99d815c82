"""Parts of the input, several at once in processes of their own, with one line of progress for all.

A worker takes the next part that nobody has, until none is left. It ends with its parent, however that ends, and its
error is the parent's. Nothing is lost by a worker that dies: its part is missing, and the next run makes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megackpt.config.errors import UsageError
from megackpt.data.compressed import is_compressed
from megackpt.data.preprocess_part import Part, PreprocessOptions, PreprocessReport, write_part
from megackpt.data.tokenizer import Tokenizer, build_tokenizer

Work = Mapping[int, tuple[Part, str]]
"""Part and prefix of its files, by its number."""
_POLL_SECONDS = 0.1


class Progress:
    """Bytes read, documents and tokens of every part, and the lines about them."""

    def __init__(
        self,
        parts: Sequence[Part],
        done: Sequence[PreprocessReport | None],
        say: Callable[[str], None],
        interval_s: float,
    ) -> None:
        compressed = any(is_compressed(Path(part.path)) for part in parts)
        sizes = [part.stop - part.start for part in parts]
        self.counts: Any = [0] * (3 * len(parts))
        for number, report in enumerate(done):
            if report is not None:
                size = 0 if compressed else sizes[number]
                self.set(number, size, sum(report.documents.values()), sum(report.tokens.values()))
        self._total = 0 if compressed else sum(sizes)
        self._before = sum(self.counts[0::3])
        self._say, self._interval = say, interval_s
        self._start = self._last = time.monotonic()

    def set(self, number: int, size: int, documents: int, tokens: int) -> None:
        """Where part `number` is."""
        self.counts[3 * number], self.counts[3 * number + 1], self.counts[3 * number + 2] = size, documents, tokens

    def line(self) -> None:
        """Say where everything is, if it is time."""
        now = time.monotonic()
        if now - self._last < self._interval:
            return
        self._last = now
        done, documents, tokens = (sum(self.counts[i::3]) for i in range(3))
        rate = (done - self._before) / 1e6 / (now - self._start)
        share = f"{100 * done / self._total:5.1f} % | " if self._total else ""
        left = f" | {(self._total - done) / 1e6 / rate:.0f} s left" if self._total and rate > 0 else ""
        self._say(f"{share}{documents:,} documents | {tokens:,} tokens | {done / 1e6:.1f} MB, {rate:.2f} MB/s{left}")


def run_parts(
    work: Work,
    options: PreprocessOptions,
    tokenizer: Tokenizer,
    workers: int,
    partitions: int,
    progress: Progress,
) -> None:
    """Write all parts of `work`.  Raises the first error of a worker once all have ended."""
    processes = min(partitions, len(work))
    if processes <= 1:
        for number, (part, prefix) in work.items():

            def step(size: int, documents: int, tokens: int, number: int = number) -> None:
                progress.set(number, size, documents, tokens)
                progress.line()

            write_part(part, prefix, options, tokenizer, workers, step)
        return
    _Pool(work, options, processes, max(1, workers // processes), progress).run()


class _Pool:
    def __init__(
        self, work: Work, options: PreprocessOptions, processes: int, threads: int, progress: Progress
    ) -> None:
        context = get_context("spawn")  # tokenizers run threads, and those do not survive a fork
        self._progress = progress
        self._counts: Any = context.Array(ctypes.c_int64, list(progress.counts), lock=False)
        progress.counts = self._counts
        self._taken = context.Value(ctypes.c_int64, 0)  # kept: its semaphore must outlive the start of the workers
        self._errors, theirs = context.Pipe(duplex=False)
        arguments = (os.getpid(), dict(work), options, threads, self._counts, self._taken, theirs)
        self._processes = [context.Process(target=_worker, args=arguments, daemon=True) for _ in range(processes)]
        self._theirs = theirs

    def run(self) -> None:
        error: BaseException | None = None
        try:
            for process in self._processes:
                process.start()
            self._theirs.close()  # the workers hold it now: the pipe ends with the last of them
            while error is None and any(process.is_alive() for process in self._processes):
                error = self._error(_POLL_SECONDS)
                error = error or self._death()
                self._progress.line()
            error = error or self._error(0) or self._death()
        finally:
            for process in self._processes:
                if process.is_alive():
                    process.terminate()
            for process in self._processes:
                if process.pid is not None:
                    process.join()
            self._progress.counts = list(self._counts)
        if error is not None:
            raise error

    def _error(self, seconds: float) -> BaseException | None:
        """What a worker sent, if anything comes within that time."""
        try:
            if self._errors.poll(seconds):
                sent: BaseException = self._errors.recv()
                return sent
        except (EOFError, OSError):
            time.sleep(seconds)  # no worker is left that could send
        return None

    def _death(self) -> BaseException | None:
        for process in self._processes:
            if process.exitcode not in (None, 0):
                return self._error(0) or UsageError(
                    f"a worker ended with exit code {process.exitcode} (-9: killed, often for want of memory)."
                    " Start again with the same arguments to go on with the parts that are missing; fewer --partitions"
                    " need less memory."
                )
        return None


def _worker(
    parent: int,
    work: dict[int, tuple[Part, str]],
    options: PreprocessOptions,
    threads: int,
    counts: Any,
    taken: Any,
    errors: Connection,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too, and ends its workers
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        tokenizer = build_tokenizer(options.tokenizer)
        numbers = list(work)
        while True:
            with taken.get_lock():
                place = taken.value
                taken.value += 1
            if place >= len(numbers):
                return
            number = numbers[place]

            def step(size: int, documents: int, tokens: int, base: int = 3 * number) -> None:
                counts[base], counts[base + 1], counts[base + 2] = size, documents, tokens

            part, prefix = work[number]
            write_part(part, prefix, options, tokenizer, threads, step)
    except Exception as error:
        with contextlib.suppress(OSError):
            errors.send(error if isinstance(error, UsageError | OSError) else RuntimeError(repr(error)))
        raise SystemExit(1) from None


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os._exit(1)
