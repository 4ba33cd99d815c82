"""Warm worker processes for distributed tests.

A test that needs four ranks would spend seconds on starting four interpreters that import torch, and only
milliseconds on what it tests. So one *template* process imports torch once per test run and forks workers on
demand; the workers stay and serve one case after another. A case gets a fresh gloo group of exactly its size and
a reset process state (`tests/pool_worker.py`), so nothing leaks from one case into the next. A hung or failed
case costs its workers: they are killed, with everything they started, and forked anew in milliseconds.

    def norms(rank, world_size, scale):          # module-level: it travels by name
        ...
    results = run_distributed(norms, 4, 2.0)     # list of what each rank returned, by rank
"""
from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MAX_WORKERS = 8
START_SECONDS = 180.0  # importing torch on a machine that is busy with something else
GRACE_SECONDS = 1.0  # how long the other ranks may still report once one has failed
CLOSE_SECONDS = 10.0
SINGLE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
}


@dataclass(frozen=True)
class Report:
    """How one rank's part of a case ended."""

    status: str  # "ok", "raised", "died" or "hung"
    summary: str = ""  # one line
    detail: str = ""  # traceback, or the stack of a rank that hung
    payload: bytes = b""  # the pickled result of status "ok"


class DistributedFailure(AssertionError):
    """A case failed on at least one rank. `rank` is the first that did, `reports` what every rank ended with."""

    def __init__(self, name: str, rank: int, reports: list[Report]) -> None:
        self.rank = rank
        self.reports = reports
        lines = [f"{name} on {len(reports)} ranks: rank {rank} {reports[rank].status}: {reports[rank].summary}"]
        lines += [f"  rank {i}: {report.status} {report.summary}".rstrip() for i, report in enumerate(reports)]
        super().__init__("\n".join([*lines, reports[rank].detail]))


class DistributedTimeout(DistributedFailure):
    """No rank failed, but at least one did not end in time; the message shows where it stood."""


@dataclass(frozen=True)
class Worker:
    pid: int
    connection: Connection


@dataclass
class Pool:
    """Owns the template process, its workers and the store through which groups meet."""

    workers: list[Worker] = field(default_factory=list)
    _cases: itertools.count[int] = field(default_factory=itertools.count)
    _folder: Path | None = None
    _listener: socket.socket | None = None
    _template: subprocess.Popen[bytes] | None = None
    _control: Connection | None = None
    _store: Any = None

    def run(self, fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], timeout: float) -> list[Any]:
        name, case = _describe(fn, args)
        if not 1 <= world_size <= MAX_WORKERS:
            raise ValueError(f"world_size {world_size} is not between 1 and {MAX_WORKERS}")
        self._grow(world_size)
        team = self.workers[:world_size]
        try:
            prefix = f"case{next(self._cases)}"
            for rank, worker in enumerate(team):
                worker.connection.send_bytes(pickle.dumps((case, rank, world_size, prefix, timeout)))
            reports, first = self._collect(team, timeout)
            if first is None:
                self._close_groups(team)
                return [pickle.loads(report.payload) for report in reports]
        except BaseException:  # also a KeyboardInterrupt or the per-test time-out: never leave a case running
            self._kill(team)
            raise
        self._kill(team)
        kind = DistributedTimeout if reports[first].status == "hung" else DistributedFailure
        raise kind(name, first, reports)

    def shutdown(self) -> None:
        """End every process and remove the folder. The pool starts anew if it is used again."""
        self._kill(list(self.workers))
        if self._control is not None:
            self._control.close()  # the template ends when its control connection does
        if self._template is not None:
            try:
                self._template.wait(5)
            except subprocess.TimeoutExpired:
                self._template.kill()
                self._template.wait()
        if self._listener is not None:
            self._listener.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = self._listener = self._template = self._control = self._store = None

    # -- starting ------------------------------------------------------------------------------------------------

    def _grow(self, count: int) -> None:
        if self._template is not None and self._template.poll() is not None:
            self.shutdown()
        if self._template is None:
            self._start_template()
        assert self._control is not None
        missing = count - len(self.workers)
        for _ in range(missing):
            self._control.send(("fork",))
        for _ in range(missing):
            connection = self._accept()
            self.workers.append(Worker(connection.recv(), connection))

    def _start_template(self) -> None:
        from torch.distributed import TCPStore  # a run without workers never pays for it

        self._folder = Path(tempfile.mkdtemp(prefix="megackpt-pool-"))
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._folder / "socket"))
        self._listener.listen(MAX_WORKERS + 1)
        self._listener.settimeout(START_SECONDS)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment = {**os.environ, **SINGLE_THREAD}
        if Path("/sys/class/net/lo").exists():
            environment["GLOO_SOCKET_IFNAME"] = "lo"  # a machine whose host name does not resolve is still fine
        environment.pop("PYTEST_CURRENT_TEST", None)
        command = [sys.executable, "-m", "tests.pool_worker", str(self._folder), str(self._store.port)]
        self._template = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL)
        self._control = self._accept()

    def _accept(self) -> Connection:
        assert self._listener is not None
        return Connection(self._listener.accept()[0].detach())

    # -- one case ------------------------------------------------------------------------------------------------

    def _collect(self, team: list[Worker], timeout: float) -> tuple[list[Report], int | None]:
        """Reports by rank, and the rank whose failure explains the others (None if all went well)."""
        deadline = time.monotonic() + timeout
        reports: dict[int, Report] = {}
        failed: list[int] = []  # in order of time
        pending = {worker.connection: rank for rank, worker in enumerate(team)}
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = pending.pop(connection)  # type: ignore[arg-type]
                reports[rank] = self._receive(team[rank])
                if reports[rank].status != "ok":
                    failed.append(rank)
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        for rank in pending.values():
            reports[rank] = Report("hung", _waited(timeout, failed), self._stack(team[rank]))
        # A rank that died tears its connections down, and a peer's complaint may overtake the end of file here.
        died = [rank for rank in failed if reports[rank].status == "died"]
        explanation = [*died, *failed, *sorted(pending.values())]
        return [reports[rank] for rank in range(len(team))], explanation[0] if explanation else None

    def _receive(self, worker: Worker) -> Report:
        try:
            return pickle.loads(worker.connection.recv_bytes())
        except (EOFError, OSError):
            return Report("died", self._exit_status(worker))

    def _close_groups(self, team: list[Worker]) -> None:
        """All ranks are done: now none still talks to a peer, and the groups may go."""
        for worker in team:
            worker.connection.send_bytes(b"close")
        deadline = time.monotonic() + CLOSE_SECONDS
        for rank, worker in enumerate(team):
            if not worker.connection.poll(max(0.0, deadline - time.monotonic())):
                raise RuntimeError(f"rank {rank} did not close its process group within {CLOSE_SECONDS:g} s")
            worker.connection.recv_bytes()

    # -- ending --------------------------------------------------------------------------------------------------

    def _kill(self, team: list[Worker]) -> None:
        for worker in team:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)  # each worker leads its own process group
            worker.connection.close()
        self.workers = [worker for worker in self.workers if worker not in team]

    def _stack(self, worker: Worker) -> str:
        """Python stack of a worker that does not answer, written by its fault handler."""
        assert self._folder is not None
        path = self._folder / f"stack.{worker.pid}"
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGUSR2)
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline and not (path.exists() and path.stat().st_size):
            time.sleep(0.01)
        time.sleep(0.02)
        return path.read_text() if path.exists() else "(no stack)"

    def _exit_status(self, worker: Worker) -> str:
        assert self._control is not None
        self._control.send(("status", worker.pid))
        if not self._control.poll(5):
            return "its connection closed"
        code = os.waitstatus_to_exitcode(self._control.recv())
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"process exited with code {code}"


def _waited(timeout: float, failed: list[int]) -> str:
    if failed:
        return f"still running {GRACE_SECONDS:g} s after rank {failed[0]} had failed"
    return f"still running after {timeout:g} s"


def _describe(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, tuple[list[str], str, str, bytes]]:
    """Name of the case and the form in which it travels: by module and qualified name, arguments pickled."""
    module, name = fn.__module__, fn.__qualname__
    if "<" in name:
        raise ValueError(f"{name} is not defined at module level, so a worker cannot import it")
    return f"{module}.{name}", (list(sys.path), module, name, pickle.dumps(args))


_POOL = Pool()  # one per test run; tests are the one place where a process-wide value is the point
atexit.register(_POOL.shutdown)


def run_distributed(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """Run `fn(rank, world_size, *args)` on ranks 0..world_size-1 and return their results by rank.

    `fn` is a module-level function; arguments and results are pickled (tensors travel as plain bytes). While it
    runs, the default process group is a gloo group of exactly `world_size` ranks, the process has one thread, and
    RANK, WORLD_SIZE and LOCAL_RANK are set. Raises DistributedFailure with the traceback of the first failing
    rank, or DistributedTimeout with the stacks of ranks that still ran after `timeout` seconds.
    """
    return _POOL.run(fn, world_size, args, timeout)


def shutdown() -> None:
    """End all workers (called once at the end of a test session)."""
    _POOL.shutdown()
