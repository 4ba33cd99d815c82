"""Checkpoints on disk: whole or not there, checked when read, and free of pickles.

    root/
      latest_checkpointed_iteration.txt     "10"
      iter_0000010/
        rank_00000.safetensors …            what each rank wrote (ordinary safetensors files; see also torch_file.py)
        run.json                            iteration, layout, and the caller's `extra`
        manifest.json                       every tensor's global shape and place, every file's size and crc32

`torch.distributed.checkpoint` plans who writes and reads what (replicas once, any layout from any other); the files,
their digests, the writer beside training and the atomic commit are ours.

Host memory beyond the run's own tensors: a blocking save and a load hold one block (8 MiB) and the manifest; a
background save holds a copy of what this rank writes.
"""

from megackpt.persist.agree import CheckpointError, coordination_group
from megackpt.persist.directory import claimed, latest_iteration, prepare_directory
from megackpt.persist.load import LoadReport, load
from megackpt.persist.retention import Retention
from megackpt.persist.save import Saver, save
from megackpt.persist.state import GROUPS, NamedShard, RunState
from megackpt.persist.writing import HostCopy

__all__ = [
    "GROUPS",
    "CheckpointError",
    "HostCopy",
    "LoadReport",
    "NamedShard",
    "Retention",
    "RunState",
    "Saver",
    "claimed",
    "coordination_group",
    "latest_iteration",
    "load",
    "prepare_directory",
    "save",
]
