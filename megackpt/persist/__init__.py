"""Checkpoints on disk: whole or not there, checked when read, and free of pickles.

    root/
      latest_checkpointed_iteration.txt     "10"
      iter_0000010/
        rank_00000.safetensors …            what each rank wrote (ordinary safetensors files)
        run.json                            iteration, layout, and the caller's `extra`
        manifest.json                       every tensor's global shape and place, every file's size and crc32

`torch.distributed.checkpoint` plans who writes and reads what (replicas once, any layout from any other); the files,
their digests and the atomic commit are ours.
"""

from megackpt.persist.agree import CheckpointError, coordination_group
from megackpt.persist.directory import latest_iteration, prepare_directory
from megackpt.persist.load import LoadReport, load
from megackpt.persist.save import save
from megackpt.persist.state import GROUPS, NamedShard, RunState

__all__ = [
    "GROUPS",
    "CheckpointError",
    "LoadReport",
    "NamedShard",
    "RunState",
    "coordination_group",
    "latest_iteration",
    "load",
    "prepare_directory",
    "save",
]
