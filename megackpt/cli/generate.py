"""``megackpt generate --load DIR --prompt TEXT``: continue a text with the weights of a checkpoint."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megackpt.config.data import DataConfig
from megackpt.config.errors import UsageError
from megackpt.config.flag import key_of
from megackpt.config.parallel import ParallelConfig
from megackpt.config.parse import refuse
from megackpt.config.resolve import section_fields
from megackpt.config.sources import expand, read_words
from megackpt.mesh.launch import LaunchEnvironment

if TYPE_CHECKING:
    from megackpt.train.generate import Generator, Sampling

_TOKENIZER_FLAGS = ("--tokenizer-type", "--tokenizer-model", "--vocab-file", "--merge-file", "--vocab-size")


def main(argv: Sequence[str]) -> int:
    """Prints each prompt with its continuation; 0, 2 for what is refused, 1 for a checkpoint that is not whole."""
    own = _parser().parse_args(list(argv))
    try:
        launch = LaunchEnvironment.detect(os.environ)
    except UsageError as error:
        refuse(error, int(os.environ.get("RANK", "0") or 0))
    try:
        data = _tokenizer(own)
        tensor = launch.world_size if own.tensor_model_parallel_size is None else own.tensor_model_parallel_size
        if tensor != launch.world_size:
            raise UsageError(
                f"--tensor-model-parallel-size {tensor}, but {launch.world_size} processes were started: start it with"
                f" torchrun --nproc-per-node {tensor} -m megackpt.cli generate ..."
            )
        if own.num_tokens < 1:
            raise UsageError(f"--num-tokens must be at least 1; got {own.num_tokens}.")
        parallel = ParallelConfig(tensor=tensor, world_size=launch.world_size, device=own.device)

        from megackpt.train.generate import Sampling  # imports torch

        sampling = Sampling(temperature=own.temperature, top_k=own.top_k, top_p=own.top_p, seed=own.seed)
    except UsageError as error:
        refuse(error, launch.rank)
    return _run(own, launch, parallel, data, sampling)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megackpt generate",
        description="Continue texts with the weights of a checkpoint (of a run, or of megackpt convert), greedily or by"
        " sampling, with the keys and values of earlier tokens kept. Any tensor-parallel size: torchrun"
        " --nproc-per-node 2 -m megackpt.cli generate ...; the layout that saved the checkpoint does not matter. The"
        " checkpoint names its tokenizer; --tokenizer-type and what belongs to it name another one. Without one,"
        " prompts and answers are token ids.",
        allow_abbrev=False,
    )
    parser.add_argument("--load", required=True, metavar="DIR", help="folder of checkpoints")
    parser.add_argument("--iteration", type=int, metavar="N", help="which of them (default: the newest)")
    parser.add_argument("--prompt", required=True, action="append", metavar="TEXT", help="repeatable")
    parser.add_argument("--num-tokens", type=int, default=64, metavar="N", help="tokens to add (default: 64)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest tokens")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="draw from the likeliest that hold P")
    parser.add_argument("--seed", type=int, default=1234, metavar="N", help="of the draws (default: 1234)")
    parser.add_argument("--tensor-model-parallel-size", type=int, metavar="N", help="default: all processes")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if present")
    for flag in _TOKENIZER_FLAGS:
        parser.add_argument(flag, default=argparse.SUPPRESS, metavar="WORD", help="of another tokenizer")
    return parser


def _tokenizer(own: argparse.Namespace) -> DataConfig | None:
    """The tokenizer that the flags name, as training's flags would; None without them."""
    given = {flag: getattr(own, key_of(flag).replace("-", "_"), None) for flag in _TOKENIZER_FLAGS}
    words = [word for flag, value in given.items() if value is not None for word in (flag, value)]
    if not words:
        return None
    source = read_words(words)
    if problems := [*source.unknown, *source.refused, *source.errors]:
        raise UsageError("\n".join(problems))
    return DataConfig(mock_data=True, **section_fields(expand(source.values))["data"])  # type: ignore[arg-type]


def _answer(generator: Generator, prompt: str, count: int, sampling: Sampling, *, quiet: bool) -> None:
    """One prompt and its continuation, printed as it comes."""
    tokenizer = generator.tokenizer
    if tokenizer is not None:
        tokens = tokenizer.tokenize(prompt)
    elif all(word.isdigit() for word in prompt.split()):
        tokens = [int(word) for word in prompt.split()]
    else:
        raise UsageError(
            f"--prompt {prompt!r}: the checkpoint names no tokenizer, so a prompt is token ids; --tokenizer-type names"
            " one."
        )
    made: list[int] = []
    shown = ""

    def show(token: int) -> None:
        nonlocal shown
        made.append(token)
        if quiet:
            return
        text = tokenizer.detokenize([*tokens, *made]) if tokenizer is not None else " ".join(map(str, [*tokens, *made]))
        if text.startswith(shown) and not text.endswith("\ufffd"):  # else a character is not complete yet
            print(text[len(shown) :], end="", flush=True)
            shown = text

    generator.continue_(tokens, count, sampling, show)
    if not quiet:
        print()


def _run(
    own: argparse.Namespace,
    launch: LaunchEnvironment,
    parallel: ParallelConfig,
    data: DataConfig | None,
    sampling: Sampling,
) -> int:
    import torch

    from megackpt.mesh.device import DeviceSeam
    from megackpt.mesh.rendezvous import init_process_group, leave_broken, shutdown
    from megackpt.persist import CheckpointError
    from megackpt.train.generate import load_generator

    try:
        seam = DeviceSeam.create(own.device, launch.local_rank, None)
        if seam.kind == "cpu" and launch.world_size > 1:
            torch.set_num_threads(1)  # ranks share the cores
        init_process_group(parallel, launch, seam)
        try:
            generator = load_generator(own.load, parallel, seam, iteration=own.iteration, data=data)
            for note in generator.notes if launch.rank == 0 else ():
                print(f"megackpt: {note}", file=sys.stderr, flush=True)
            for prompt in own.prompt:
                _answer(generator, prompt, own.num_tokens, sampling, quiet=launch.rank != 0)
        except (UsageError, CheckpointError):  # of all ranks
            raise
        except Exception as error:
            leave_broken(error)
            raise
        finally:
            shutdown()
    except (UsageError, CheckpointError) as error:
        if launch.rank == 0:
            print(f"megackpt: error: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, UsageError) else 1
    return 0
