"""``megackpt convert``: weights from and to Hugging Face folders, and from Megatron-LM's checkpoints."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megackpt.config.checks import at_least
from megackpt.config.errors import UsageError
from megackpt.config.model import padding_words
from megackpt.config.parse import refuse

if TYPE_CHECKING:
    from megackpt.persist.convert import Weights

DTYPES = ("fp32", "bf16", "fp16")


def main(argv: Sequence[str]) -> int:
    """Converts; 0, or 2 for what cannot be converted (with SystemExit) or is not whole."""
    own = _parser().parse_args(list(argv))

    from safetensors import SafetensorError  # imports torch

    from megackpt.persist.agree import CheckpointError

    try:
        _convert(own)
    except UsageError as error:
        refuse(error, 0)
    except CheckpointError as error:
        print(f"megackpt: error: {error}", file=sys.stderr)
        return 2
    except (OSError, SafetensorError) as error:
        print(f"megackpt: error: {own.save} cannot be written: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megackpt convert",
        description="Convert weights. What --load holds is recognised: a Hugging Face folder (gpt2, llama) or a torch"
        " checkpoint of Megatron-LM becomes a checkpoint of megackpt, which a run loads with --load DIR --finetune;"
        " a checkpoint of megackpt becomes a Hugging Face folder. Memory: one tensor at a time, or one output file"
        " when writing for Hugging Face.",
        allow_abbrev=False,
    )
    parser.add_argument("--load", required=True, metavar="DIR", help="what to convert")
    parser.add_argument("--save", required=True, metavar="DIR", help="a new folder for the result")
    parser.add_argument("--iteration", type=int, metavar="N", help="of a checkpoint of megackpt (default: the newest)")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="rows of the vocabulary that are no padding")
    parser.add_argument("--dtype", choices=DTYPES, help="type of the written weights (default: as they are)")
    parser.add_argument("--max-file-gib", type=float, default=4.0, metavar="GIB", help="size of a file (default: 4)")
    parser.add_argument(
        "--target-tensor-parallel-size",
        type=int,
        metavar="N",
        help="the checkpoint is for runs of this --tensor-model-parallel-size: if it does not divide the heads, whole"
        " groups of heads that are zero are added, with which the model computes the same",
    )
    return parser


def _convert(own: argparse.Namespace) -> None:
    import torch

    from megackpt.persist.convert import format_of, write_checkpoint, write_folder

    if Path(own.load).resolve() == Path(own.save).resolve():
        raise UsageError(f"--save {own.save} is what --load reads: give a new folder.")
    kind = format_of(own.load)
    weights = _read(own, kind)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}[own.dtype]
    if own.max_file_gib <= 0:
        raise UsageError(f"--max-file-gib must be above 0; got {own.max_file_gib:g}.")
    model, size = weights.model, int(own.max_file_gib * 2**30)
    for note in weights.notes:
        print(f"megackpt: {note}")
    if kind == "megackpt":
        path = write_folder(own.save, weights, dtype=dtype, file_bytes=size)
    else:
        parallel = own.target_tensor_parallel_size or 1
        path = write_checkpoint(own.save, weights, dtype=dtype, file_bytes=size, tensor_parallel=parallel)
        if model.num_query_groups % parallel:
            padded = model.with_query_groups(-(-model.num_query_groups // parallel) * parallel)
            print(f"megackpt: {padding_words(padded)}")
    print(
        f"megackpt: wrote {path} ({model.num_layers} layers, hidden {model.hidden_size}, vocabulary {weights.vocab},"
        f" {str(dtype or weights.dtype).removeprefix('torch.')})"
    )


def _read(own: argparse.Namespace, kind: str) -> Weights:
    from megackpt.persist.convert import read_checkpoint, read_folder, read_megatron
    from megackpt.persist.convert.weights import with_vocabulary

    if own.target_tensor_parallel_size is not None:
        at_least("--target-tensor-parallel-size", own.target_tensor_parallel_size, 1)
        if kind == "megackpt":
            raise UsageError(
                f"--target-tensor-parallel-size {own.target_tensor_parallel_size} is for checkpoints of megackpt; what"
                f" becomes of {own.load} is a Hugging Face folder. A run loads {own.load} with any padding."
            )
    if own.iteration is not None and kind != "megackpt":
        raise UsageError(f"--iteration {own.iteration}: {own.load} is no checkpoint of megackpt.")
    if kind == "megatron":
        return read_megatron(own.load, own.vocab_size)
    weights = read_folder(own.load) if kind == "hf" else read_checkpoint(own.load, own.iteration)
    return with_vocabulary(weights, own.vocab_size) if own.vocab_size is not None else weights
