"""Loading: find a whole checkpoint, check that it fits, fill the given tensors.

Files are checked against the manifest's digests before anything is read (the work is shared among ranks). If the
checkpoint that the tracker names is not whole, the newest whole one before it is taken and the report says so.
Tensors go to whatever layout asks for them, and a rank reads only what it needs, a block at a time; only the states
of RNG streams mean nothing on another layout.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup

from megackpt.config.checkpoint_folder import MANIFEST, RUN_FILE, in_order_of_trust, saved_directories
from megackpt.config.errors import UsageError
from megackpt.mesh.process_mesh import ProcessMesh
from megackpt.persist.agree import CheckpointError, Ranks
from megackpt.persist.fit import Fit, check_fit
from megackpt.persist.manifest import Manifest, read_whole
from megackpt.persist.planner import Reading, plan_reading
from megackpt.persist.state import GROUPS, RunState, group_of, layout_of, pieces_of
from megackpt.persist.tensor_reader import Staging
from megackpt.persist.torch_file import open_file

_LARGEST_RUN_FILE = 64 << 20  # bytes


@dataclass(frozen=True)
class LoadReport:
    """What was loaded. `messages` are for the user, on one rank; they are the same on all.

    `rng_loaded` False means that this run's RNG streams still stand where its seed put them. `missing`: keys that
    any rank wanted and that are not there, as `strictness` allows; their tensors are untouched.
    """

    iteration: int
    directory: Path
    extra: dict[str, Any]
    messages: tuple[str, ...]
    rng_loaded: bool
    missing: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Found:
    directory: Path
    manifest: Manifest
    run: dict[str, Any]


def load(
    root: str | Path,
    state: RunState,
    mesh: ProcessMesh,
    *,
    want: Collection[str] = GROUPS,
    strictness: str = "raise_all",
    iteration: int | None = None,
    group: ProcessGroup | None = None,
) -> LoadReport | None:
    """Fill the tensors of `state` from the newest whole checkpoint under `root`; None if there is none at all.

    Called by all ranks together. `want`: which of "model", "optimizer", "rng" to read; tensors of other groups stay
    as they are (`--finetune` wants the model, `--no-load-optim` all but the optimizer). `iteration`: this one and
    no other. `strictness`: what becomes of keys that only one side has, see `persist.fit`.
    Raises UsageError if the checkpoint does not fit the run (naming tensors, shapes and flags) or if there are
    checkpoints and none is whole, CheckpointError if reading fails: the tensors then hold neither old nor new.
    """
    root, ranks, wanted = Path(root), Ranks(group), frozenset(want)
    if unknown := wanted - set(GROUPS):
        raise ValueError(f"want has {sorted(unknown)}; a checkpoint has {', '.join(GROUPS)}")
    pieces = [p for p in ranks.together("load", lambda: pieces_of(state, mesh)) if p.group in wanted]
    found, messages = _find(ranks, root, iteration)
    if found is None:
        return None
    keys = set().union(*ranks.gather([piece.key for piece in pieces]))
    rng_keys = {key for key in keys if group_of(key) == "rng"}
    if rng_keys and (why := _other_streams(found, rng_keys, layout_of(mesh))):
        wanted, keys = wanted - {"rng"}, keys - rng_keys
        pieces = [piece for piece in pieces if piece.key in keys]
        messages.append(why)
    fit = ranks.together(
        "load", lambda: check_fit(found.directory, found.manifest, pieces, keys, wanted, strictness)
    )
    messages += _union(ranks.gather(fit.messages))
    _read(ranks, fit, found)
    rng_loaded = any(piece.group == "rng" for piece in fit.pieces)
    missing = frozenset(keys - set(found.manifest.tensors))
    return LoadReport(
        found.manifest.iteration, found.directory, found.run["extra"], tuple(messages), rng_loaded, missing
    )


def _read(ranks: Ranks, fit: Fit, found: _Found) -> None:
    for padding in fit.padding:
        padding.zero_()
    ranks.together("load", lambda: _fill(found, plan_reading(found.manifest, fit.pieces)))


def _fill(found: _Found, readings: Sequence[Reading]) -> None:
    by_file: dict[str, list[Reading]] = defaultdict(list)
    for reading in readings:
        by_file[reading.file].append(reading)
    staging = Staging()
    for name, wanted in by_file.items():
        try:
            with closing(open_file(found.manifest.format, found.directory / name, staging)) as file:
                for reading in wanted:
                    file.read(reading.entry, reading.offsets, reading.target)
        except ValueError as error:
            raise CheckpointError(f"{found.directory / name}: {error}") from error


def _find(ranks: Ranks, root: Path, iteration: int | None) -> tuple[_Found | None, list[str]]:
    """The first whole checkpoint among the candidates, and what to tell the user about those passed over."""
    candidates, messages = ranks.from_first("load", lambda: _candidates(root, iteration))
    faults: list[str] = []
    for path in candidates:
        fault, manifest = _check(ranks, path)
        if manifest is not None:
            run = ranks.from_first("load", partial(_run, path))
            messages += [f"{fault}: loading {path.name} instead" for fault in faults]
            return _Found(path, manifest, run), messages
        faults.append(f"{path} is not whole: {fault}")
    if faults:
        raise UsageError("no checkpoint can be loaded\n" + "\n".join([*messages, *faults]))
    return None, messages


def _candidates(root: Path, iteration: int | None) -> tuple[list[Path], list[str]]:
    """Checkpoints in the order in which they are tried, and what to say of the tracker."""
    if (root / MANIFEST).is_file():
        raise UsageError(
            f"{root} is one checkpoint; --load takes the folder around it, {root.parent}, which may hold several"
            " (--ckpt-step chooses)"
        )
    if root.exists() and not root.is_dir():
        raise UsageError(f"{root} is a file; --load and --pretrained-checkpoint take a folder that holds checkpoints")
    if iteration is None:
        candidates, fault = in_order_of_trust(root)
        return candidates, [f"{root}: {fault}; trying the newest checkpoint"] if fault else []
    saved = saved_directories(root)
    if iteration not in saved:
        raise UsageError(f"{root} has no checkpoint of iteration {iteration}; it has {[*saved] or 'none'}")
    return [saved[iteration]], []


def _check(ranks: Ranks, path: Path) -> tuple[str, Manifest | None]:
    """The manifest of a whole checkpoint, or what is wrong with it. Each rank checks its share of the files."""
    fault, manifest = ranks.from_first("load", lambda: _manifest(path))
    if manifest is None:
        return fault, None
    mine = sorted(manifest.files)[ranks.rank :: ranks.size]
    faults = ranks.gather([found for name in mine if (found := manifest.fault_of(path, name))])
    flat = [fault for of_rank in faults for fault in of_rank]
    return "; ".join(flat), None if flat else manifest


def _manifest(path: Path) -> tuple[str, Manifest | None]:
    try:
        return "", Manifest.read(path)
    except CheckpointError as error:
        return str(error), None


def _run(path: Path) -> dict[str, Any]:
    try:
        run: dict[str, Any] = json.loads(read_whole(path / RUN_FILE, _LARGEST_RUN_FILE))
        if not isinstance(run["extra"], dict) or not isinstance(run["layout"], dict):
            raise TypeError("its parts are not what they should be")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{path / RUN_FILE} cannot be understood ({error})") from error
    return run


def _other_streams(found: _Found, keys: set[str], own: dict[str, int]) -> str | None:
    """Why the RNG states of a checkpoint, if it has any, mean nothing to this run."""

    def words(layout: dict[str, int]) -> str:
        return " ".join(f"{axis}={size}" for axis, size in layout.items())

    stored = {key for key in found.manifest.tensors if group_of(key) == "rng"}
    if not stored:
        return None
    saved, whose = found.run["layout"], ""
    if saved != own:
        whose = f"those of {words(saved)} and this run is {words(own)}"
    elif stored != keys:
        names = sorted({key.split(".", 2)[2] for key in stored ^ keys})
        whose = f"of other generators than this run's, as on another device ({', '.join(names)})"
    return whose and (
        f"RNG states are {whose}: they are not loaded, dropout continues "
        "from this run's seed (--no-load-rng says the same without this message)"
    )


def _union(of_ranks: list[list[str]]) -> list[str]:
    return list(dict.fromkeys(message for messages in of_ranks for message in messages))
