"""The other end of `tests/pool.py`: a template process that forks workers, and what a worker does.

The template imports torch and never runs an operation or starts a thread, which is what makes forking it safe.
Run as `python -m tests.pool_worker FOLDER STORE_PORT`.
"""
from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import reduce
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy
import pytest  # noqa: F401  (test modules import it: once here, not once per worker)
import torch
import torch.distributed as dist
import torch.utils.checkpoint

from tests.pool import Report

SEED = 1234


def main(folder: Path, store_port: int) -> None:
    """Serve fork and status requests until the control connection ends."""
    control = _connect(folder)
    environment, directory = dict(os.environ), os.getcwd()
    _reset(environment, directory)  # some of torch's switches import half of it on first use
    gc.collect()
    gc.freeze()  # what was imported so far is never scanned again: collecting after each case stays cheap
    statuses: dict[int, int] = {}
    with contextlib.suppress(EOFError, OSError):
        while True:
            request, *operands = control.recv()
            if request == "fork":
                if os.fork() == 0:
                    control.close()
                    _worker(folder, store_port)
                    os._exit(0)
            else:
                control.send(_exit_status(operands[0], statuses))


def _exit_status(pid: int, statuses: dict[int, int]) -> int:
    while pid not in statuses:
        ended, status = os.wait()
        statuses[ended] = status
    return statuses[pid]


def _connect(folder: Path) -> Connection:
    client = socket.socket(socket.AF_UNIX)
    client.connect(str(folder / "socket"))
    return Connection(client.detach())


# -- a worker --------------------------------------------------------------------------------------------------------


def _worker(folder: Path, store_port: int) -> None:
    os.setsid()  # a group of its own, so that what a case starts dies with its worker
    stack = open(folder / f"stack.{os.getpid()}", "w")  # noqa: SIM115  (open for the life of the process)
    faulthandler.register(signal.SIGUSR2, file=stack, all_threads=False)
    template = os.getppid()
    threading.Thread(target=_end_with, args=(template,), daemon=True).start()
    connection = _connect(folder)
    connection.send(os.getpid())
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False, wait_for_workers=False)
    environment, directory = dict(os.environ), os.getcwd()
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            return
        _reset(environment, directory)
        case, rank, world_size, prefix, timeout = pickle.loads(message)
        report = _run(case, rank, world_size, dist.PrefixStore(prefix, store), timeout)
        connection.send_bytes(pickle.dumps(report))
        if report.status != "ok" or connection.recv_bytes() != b"close":
            time.sleep(3600)  # the pool ends a failed worker; until then peers must not see its connections close
            return
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # a group that a reference cycle keeps alive keeps its sockets
        connection.send_bytes(b"closed")


def _end_with(template: int) -> None:
    """End this process once the template is gone, even if the case hangs in native code."""
    while os.getppid() == template:
        time.sleep(0.5)
    os._exit(1)


def _reset(environment: dict[str, str], directory: str) -> None:
    """Put back every process-wide setting that a case may have changed."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    random.seed(SEED)
    numpy.random.seed(SEED)
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(False)
    torch.set_autocast_enabled("cpu", False)


def _run(case: tuple[list[str], str, str, bytes], rank: int, world_size: int, store: Any, timeout: float) -> Report:
    path, module, name, arguments = case
    sys.path.extend(entry for entry in path if entry not in sys.path)
    os.environ.update({name: str(rank) for name in ("RANK", "LOCAL_RANK")})
    os.environ.update({name: str(world_size) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")})
    try:
        fn: Callable[..., Any] = reduce(getattr, name.split("."), importlib.import_module(module))
        limit = timedelta(seconds=timeout + 60)  # the pool ends a hang first, and shows where it stood
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
        result = fn(rank, world_size, *pickle.loads(arguments))
        sys.stdout.flush()
        # pickle itself writes a tensor's bytes; only multiprocessing's pickler would pass shared memory instead
        return Report("ok", payload=pickle.dumps(result))
    except BaseException as error:  # pytest's own outcomes are no Exceptions; SystemExit must be reported too
        summary = " ".join(f"{type(error).__name__}: {error}".split())
        return Report("raised", summary[:300], traceback.format_exc())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
