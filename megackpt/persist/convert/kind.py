"""What a folder holds, told by its files."""

from __future__ import annotations

from pathlib import Path

from megackpt.config.checkpoint_folder import MANIFEST, saved_directories
from megackpt.config.errors import UsageError
from megackpt.persist.convert.megatron import rank_folders

FORMATS = ("megackpt", "hf", "megatron")


def format_of(folder: str | Path) -> str:
    """One of FORMATS.  Raises UsageError when the folder is none of them."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder")
    if (folder / "config.json").is_file():
        return "hf"
    if any((checkpoint / MANIFEST).is_file() for checkpoint in saved_directories(folder).values()):
        return "megackpt"
    if rank_folders(folder):
        return "megatron"
    raise UsageError(
        f"{folder} is none of: a Hugging Face folder (config.json), a checkpoint of megackpt (iter_*/manifest.json), a"
        " torch checkpoint of Megatron-LM (mp_rank_*/model_optim_rng.pt, or iter_* and release folders of these)"
    )
