"""Saving: all or nothing, and every rank knows which.

Ranks write into a temporary directory, tell each other how it went, and only then rank 0 renames it into place and
moves the tracker. A full disk, a failing rank or a kill at any point leaves the previous checkpoint and the tracker
as they were.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed import ProcessGroup

from megackpt.mesh.process_mesh import ProcessMesh
from megackpt.persist import directory
from megackpt.persist.agree import CheckpointError, Ranks, through_dcp
from megackpt.persist.planner import PieceSavePlanner, as_state_dict
from megackpt.persist.state import Piece, RunState, layout_of, pieces_of
from megackpt.persist.storage import ShardWriter


def save(
    root: str | Path, iteration: int, state: RunState, mesh: ProcessMesh, group: ProcessGroup | None = None
) -> Path:
    """Write `state` as the checkpoint of `iteration` under `root`; returns its directory.

    Called by all ranks together; `root` is on a file system that all of them see. What flags leave out
    (`--no-save-optim`, `--no-save-rng`) is simply not in `state`. An existing checkpoint of the same iteration is
    replaced once the new one is complete. `group`: see coordination_group.
    Raises CheckpointError on every rank if any rank failed; earlier checkpoints and the tracker are then untouched.
    """
    root, ranks = Path(root), Ranks(group)
    pieces = ranks.together("save", lambda: pieces_of(state, mesh))
    run = ranks.from_first("save", lambda: _run_file(iteration, state, mesh))
    temporary = ranks.from_first("save", lambda: directory.begin(root, iteration))
    try:
        ranks.together("save", lambda: _must_see(temporary))
        _write(ranks, pieces, ShardWriter(temporary, iteration, run))
        return ranks.from_first("save", lambda: directory.commit(root, temporary, iteration))
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)  # a full disk should not stay full
        raise


def _write(ranks: Ranks, pieces: list[Piece], writer: ShardWriter) -> None:
    through_dcp(
        "save",
        lambda: dcp.save(
            as_state_dict(pieces),
            storage_writer=writer,
            planner=PieceSavePlanner(),
            process_group=ranks.group,
            no_dist=not ranks.connected,
        ),
    )
    ranks.together("save", writer.settle)


def _run_file(iteration: int, state: RunState, mesh: ProcessMesh) -> bytes:
    run = {
        "iteration": iteration,
        "layout": layout_of(mesh),
        "torch": torch.__version__,
        "extra": state.extra,
    }
    try:
        text = json.dumps(run, indent=1)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"`extra` cannot be written as JSON: {error}") from error
    return text.encode()


def _must_see(path: Path) -> None:
    if not path.is_dir():
        raise CheckpointError(
            f"{path} was made by rank 0 and is not visible here: --save must be on a shared disk"
        )
