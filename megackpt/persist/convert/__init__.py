"""Weights from and to the formats of others: Hugging Face folders, Megatron-LM's `torch` checkpoints.

Every format is read into one description, `Weights`: the model's configuration, and for each parameter by its global
name a function that makes the whole tensor.  Writers take the tensors one by one (ours) or one output file at a time
(Hugging Face), so a conversion needs the memory of a tensor or of a file, never of the model.
"""

from megackpt.persist.convert.huggingface import read_folder, write_folder
from megackpt.persist.convert.kind import FORMATS, format_of
from megackpt.persist.convert.megatron import read_megatron
from megackpt.persist.convert.ours import read_checkpoint, write_checkpoint
from megackpt.persist.convert.weights import Weights

__all__ = [
    "FORMATS",
    "Weights",
    "format_of",
    "read_checkpoint",
    "read_folder",
    "read_megatron",
    "write_checkpoint",
    "write_folder",
]
