"""Does a checkpoint fit this run? Every way in which it does not is named, with the tensor and the flag.

What becomes of keys that only one side has is the user's choice (`--dist-ckpt-strictness`, Megatron's words):

    raise_all                                 an error either way (the default)
    raise_unexpected, assume_ok_unexpected    an error if the run has a tensor that the checkpoint lacks
    log_all, log_unexpected                   named, and the run goes on
    ignore_all                                counted, and the run goes on
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from megackpt.config.errors import UsageError
from megackpt.persist.manifest import Manifest, StoredTensor
from megackpt.persist.state import Piece, group_of
from megackpt.persist.tensor_file import DTYPE_NAMES

_NEEDS_ALL = ("raise_unexpected", "assume_ok_unexpected")
_NAMED = 5  # keys that a message lists in full
_LEFT_OUT = {
    "model": "model weights; is it a checkpoint of a training run?",
    "optimizer": "optimizer state (saved with --no-save-optim): give --no-load-optim to begin with a fresh one",
    "rng": "RNG states (saved with --no-save-rng): give --no-load-rng to begin from the seed",
}


@dataclass(frozen=True)
class Fit:
    """What this rank reads: `pieces`, after zeroing `padding` (views of what the checkpoint does not have)."""

    pieces: list[Piece]
    padding: list[Tensor]
    messages: list[str]


def check_fit(
    directory: Path,
    manifest: Manifest,
    pieces: Sequence[Piece],
    keys: set[str],
    wanted: Collection[str],
    strictness: str,
) -> Fit:
    """Compare this rank's wanted `pieces`, and the `keys` that all ranks want together, with a checkpoint.

    Raises UsageError naming what is missing, surplus or of another shape, as far as `strictness` does not allow it.
    """
    for group in sorted({group_of(key) for key in keys} - manifest.groups):
        raise UsageError(f"{directory} has no {_LEFT_OUT[group]}")
    missing = sorted(keys - set(manifest.tensors))
    surplus = sorted(key for key in manifest.tensors if group_of(key) in wanted and key not in keys)
    messages = _one_sided(directory, missing, surplus, strictness)
    present = [piece for piece in pieces if piece.key in manifest.tensors]
    misfits = [fault for piece in present if (fault := _misfit(piece, manifest.tensors[piece.key]))]
    if misfits:
        raise UsageError(f"{directory} does not fit this run: " + _listed(misfits, "; "))
    padding = [
        rows for piece in present if (rows := _uncovered(piece, manifest.tensors[piece.key])) is not None
    ]
    return Fit(present, padding, messages + _conversions(present, manifest))


def _one_sided(directory: Path, missing: list[str], surplus: list[str], strictness: str) -> list[str]:
    """What to say of keys that only one side has. Raises UsageError if `strictness` says so."""
    if strictness == "ignore_all" and (missing or surplus):
        return [f"{directory}: {len(missing)} tensors of this run are not there, {len(surplus)} others are ignored"]
    lacks = [f"{directory} lacks {_listed(missing)}, which this run has"] if missing else []
    has = [f"{directory} has {_listed(surplus)}, which this run has not"] if surplus else []
    fatal = lacks + has if strictness == "raise_all" else lacks if strictness in _NEEDS_ALL else []
    if fatal:
        raise UsageError("\n".join([*fatal, _advice([*missing, *surplus])]))
    return lacks + has


def _misfit(piece: Piece, stored: StoredTensor) -> str | None:
    """Shapes must agree, but for padding."""
    own, there, dim = piece.global_shape, stored.shape, piece.padded_dim
    if len(own) != len(there) or any(a != b for d, (a, b) in enumerate(zip(own, there, strict=True)) if d != dim):
        return f"{piece.key} has shape {list(there)} there and {list(own)} here"
    if piece.valid is None and stored.valid is None:
        return None if own == there else f"{piece.key} has shape {list(there)} there and {list(own)} here"
    of_heads = ".attn." in piece.key
    if own == there and not of_heads:  # another vocabulary in the same table: ids tell
        return None
    mine = own[dim] if piece.valid is None else piece.valid
    theirs = there[dim] if stored.valid is None else stored.valid
    flag = "--unpadded-query-groups" if of_heads else "--vocab-size"
    what = "rows" if dim == 0 else "columns"
    return None if mine == theirs else f"{piece.key} has {theirs} {what} there and {mine} here ({flag})"


def _uncovered(piece: Piece, stored: StoredTensor) -> Tensor | None:
    """View of what the piece has beyond the stored tensor: padding that another padded size has added."""
    if piece.global_shape == stored.shape:
        return None
    dim, held = piece.padded_dim, piece.tensor.shape[piece.padded_dim]
    covered = min(held, max(0, stored.shape[dim] - piece.offsets[dim]))
    return piece.tensor.detach().narrow(dim, covered, held - covered)


def _conversions(pieces: Sequence[Piece], manifest: Manifest) -> list[str]:
    kinds: dict[tuple[str, str], list[str]] = {}
    for piece in pieces:
        there, here = manifest.tensors[piece.key].dtype, DTYPE_NAMES[piece.tensor.dtype]
        if there != here:
            kinds.setdefault((there, here), []).append(piece.key)
    return [f"converted from {a} to {b}: {_listed(keys)}" for (a, b), keys in kinds.items()]


def _advice(keys: Sequence[str]) -> str:
    """What to do about keys that only one side has."""
    if any(group_of(key) != "optimizer" for key in keys):
        return "the model flags (such as --num-layers) must be those of that run"
    narrow = all(key.startswith("optimizer.master.") for key in keys)  # only these have masters
    what = "the number format of the parameters (--bf16, --params-dtype)" if narrow else "the optimizer (--optimizer)"
    return (
        f"{what} is not that run's: keep it, or give --no-load-optim to begin with a fresh optimizer on its weights"
    )


def _listed(items: Sequence[str], separator: str = ", ") -> str:
    rest = len(items) - _NAMED
    return separator.join(items[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")
