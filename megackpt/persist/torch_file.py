"""`--ckpt-format torch`: Megatron's folder layout, one file of `torch.save` per tensor- and pipeline-parallel rank.

    iter_0000010/mp_rank_01/model_optim_rng.pt          without pipeline stages
    iter_0000010/mp_rank_01_002/model_optim_rng.pt      tensor-parallel rank 1 of stage 2

A file holds plain dictionaries, lists, numbers, texts and tensors under our names and is read with `weights_only`:
a pickle that wants more than that is refused. The manifest beside them says where each tensor lies in the whole
model, so that these files too load at any layout. Every file repeats what its ranks have in common.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megackpt.mesh.process_mesh import ProcessMesh
from megackpt.persist.agree import Ranks
from megackpt.persist.state import Piece, group_of
from megackpt.persist.tensor_file import FileDigest, Part, SummedFile
from megackpt.persist.tensor_reader import Staging, TensorReader, open_regular

_NAME = "model_optim_rng.pt"
VERSION = 3.0  # what Megatron calls its own layout of these dictionaries


def file_name(mesh: ProcessMesh) -> str:
    """Where this rank's state lies; "" if another data-parallel rank writes it."""
    if mesh.dp.index or mesh.cp.index:
        return ""
    stage = f"_{mesh.pp.index:03d}" if mesh.pp.size > 1 else ""
    return f"mp_rank_{mesh.tp.index:02d}{stage}/{_NAME}"


def pieces_of_file(ranks: Ranks, mesh: ProcessMesh, pieces: Sequence[Piece]) -> list[Piece]:
    """What this rank's file holds: its own pieces and the random states of the ranks that write none."""
    own = [piece for piece in pieces if piece.group != "rng"]
    here = (mesh.tp.index, mesh.pp.index)
    states = ranks.gather((here, [piece for piece in pieces if piece.group == "rng"]))
    return own + [piece for place, of_rank in states if place == here for piece in of_rank]


def write_document(
    path: Path, parts: Sequence[Part], plain: Mapping[str, Any], check: Callable[[], None] = lambda: None
) -> FileDigest:
    """Write `parts` and the `plain` values to a new file and make it durable. Raises OSError."""
    document: dict[str, Any] = {"checkpoint_version": VERSION, **plain}
    for part in parts:
        *folders, name = _place(part.entry)
        inner = document
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[name] = _alone(part.resolve().detach())
    path.parent.mkdir(exist_ok=True)
    with path.open("xb") as file:
        summed = SummedFile(file, check)
        try:
            torch.save(document, summed)  # type: ignore[arg-type]
        except RuntimeError as error:
            raise (summed.fault or error) from None
        return summed.finish()


def _alone(tensor: Tensor) -> Tensor:
    """On the host, and without the rest of the buffer of which it is a view: torch.save writes whole storages."""
    tensor = tensor.cpu()
    alone = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize and tensor.is_contiguous()
    return tensor if alone else tensor.clone(memory_format=torch.contiguous_format)


def _place(key: str) -> list[str]:
    """`optimizer.exp_avg.layers.0.…` stands under "optimizer", "exp_avg", "layers.0.…"."""
    group, _, rest = key.partition(".")
    if group_of(key) == "model":
        return [group, rest]
    kind, _, name = rest.partition(".")
    return ["rng_state" if group == "rng" else group, kind, name]


def open_file(form: str, path: Path, staging: Staging | None = None) -> TensorReader | DocumentReader:
    """A file of a checkpoint in the format `form`, open for reading. OSError or ValueError if it is no such file."""
    return DocumentReader(path) if form == "torch" else TensorReader(path, staging)


class DocumentReader:
    """Such a file, open: its tensors are mapped, not read."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file cannot be opened, ValueError if it is no file of tensors."""
        self.name = path.name
        with open(open_regular(path), "rb") as file:
            zipped = file.read(4) == b"PK\x03\x04"  # else torch would take it for its format of 2019
        if not zipped:
            raise ValueError(f"{self.name} is not a file of torch.save")
        try:
            self._document = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            first = str(error).strip().splitlines()[0]
            raise ValueError(f"{self.name} is refused: it holds more than tensors and plain values ({first})") from None
        except Exception as error:  # of any kind: the reader of a damaged file stumbles where it will
            raise ValueError(f"{self.name} cannot be read by torch ({str(error).strip()[:200]})") from None

    def close(self) -> None:
        self._document = {}

    def read(self, entry: str, offsets: tuple[int, ...], target: Tensor) -> None:
        """Fill `target` with the box of its shape at `offsets` of a tensor. ValueError if the file has no such box."""
        found = self._document
        for step in _place(entry):
            found = found.get(step) if isinstance(found, dict) else None
        if not isinstance(found, Tensor) or found.dim() != target.dim():
            raise ValueError(f"{self.name} has no {entry} of {target.dim()} dimensions")
        for dim, (start, length) in enumerate(zip(offsets, target.shape, strict=True)):
            if start + length > found.shape[dim]:
                raise ValueError(f"{self.name}: {entry} has shape {list(found.shape)}")
            found = found.narrow(dim, start, length)
        target.copy_(found)
