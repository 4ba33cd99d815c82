"""Meeting and parting of the processes: the default process group of torch.distributed."""

from __future__ import annotations

import gc
import os
import sys
import traceback
import warnings
from datetime import timedelta

import torch.distributed as dist

from megackpt.config.parallel import ParallelConfig
from megackpt.mesh.device import DeviceSeam
from megackpt.mesh.launch import LaunchEnvironment


def init_process_group(parallel: ParallelConfig, launch: LaunchEnvironment, seam: DeviceSeam) -> None:
    """Join the other processes of this run. A wait of more than `timeout_minutes` anywhere later is an error.

    A process on its own needs no address: it meets itself in memory. The default group is not bound to a device,
    so that its communicator, and those of the groups made later, are built by the ranks that use them only.
    """
    # torch 2.13 renamed these; 2.11 knows the old names only, and they are the same functions.
    warnings.filterwarnings(
        "ignore", r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated", FutureWarning
    )
    timeout = timedelta(minutes=parallel.timeout_minutes)
    if launch.world_size == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(seam.backend, store=store, rank=0, world_size=1, timeout=timeout)
        return
    # torchrun's agent may host the store itself, which only its own environment tells: leave that to torch.
    where = "env://" if launch.source == "torchrun" else f"tcp://{launch.master_address}:{launch.master_port}"
    dist.init_process_group(
        seam.backend, init_method=where, rank=launch.rank, world_size=launch.world_size, timeout=timeout
    )


def shutdown() -> None:
    """Leave the default group and all others, if any was joined. Safe to call twice.

    A group that garbage still refers to keeps its threads. One of them may be about to free a tensor when the
    interpreter goes away, and the process would end with SIGABRT after all its work; so they end here.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()


def leave_broken(error: BaseException | None = None) -> None:
    """Call where this rank fails and the others do not, before anything is cleaned up.  Returns where it need not act.

    NCCL's groups are only destroyed, in `shutdown` and by the interpreter at its end, when all that was started has
    come to an end; what waits for a peer, or a peer for us, never does, and then no traceback is printed and the
    launcher never hears of the failure.  So a process of such a group prints the traceback of `error`, if that is for
    the user, and ends here.  gloo's groups end with the process.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() != "nccl":
        return
    if error is not None:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
