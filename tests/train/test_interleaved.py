"""The trainer with several chunks per stage: the model of one process, any depth, any number of micro-batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megackpt.config.errors import UsageError
from megackpt.config.run import RunConfig
from megackpt.train.checkpoint import Position, load_run
from megackpt.train.step import Stepper
from tests.layouts import (
    COMMON,
    FAMILIES,
    GPT,
    SMALL_GPT,
    TOLERANCES,
    Distance,
    Flags,
    Layout,
    Trace,
    built,
    distance,
    save_run,
    steps,
    whole_weights,
)
from tests.plan.live_run import run_cases
from tests.pool import run_distributed
from tests.train.conftest import ReferenceRun

FULL: Flags = {"recompute-granularity": "full"}


# -- equality to one process -------------------------------------------------------------------------------------------


def _beside(rank: int, world_size: int, flags: Flags, layout: Layout, path: Path) -> Distance:
    return distance(steps(built(flags, layout), 2, gradients_of=2), Trace.read(path))


@pytest.mark.parametrize(
    ("layout", "micro_batches", "family"),
    [
        (Layout(pp=2, vp=2), 5, "gpt"),
        (Layout(tp=2, sp=True, pp=2, vp=2), 3, "llama"),
        (Layout(pp=2, vp=2), 1, "llama"),
    ],
    ids=str,
)
def test_chunks_train_what_one_process_trains(
    layout: Layout, micro_batches: int, family: str, reference_run: ReferenceRun
) -> None:
    """fp64, gradients within 1e-12; GPT ties its embeddings across the stages, Llama's five layers do not divide."""
    size = {"micro-batch-size": 1, "global-batch-size": micro_batches}
    path = reference_run(family, "fp64", micro_batches)
    flags = FAMILIES[family] | size | {"params-dtype": "fp64"} | FULL
    found = run_distributed(_beside, layout.world_size, flags, layout, path, timeout=60)
    for of_rank in found:
        of_rank.check(**TOLERANCES["fp64"])
    names = {name for of_rank in found for name in of_rank.names}
    assert names == set(Trace.read(path).grads[0]), "a parameter of the whole model is on no rank"


# -- every layer once --------------------------------------------------------------------------------------------------

TINY = GPT | {
    "hidden-size": 8,
    "num-attention-heads": 2,
    "ffn-hidden-size": 12,
    "seq-length": 6,
    "vocab-size": 17,
    "make-vocab-size-divisible-by": 1,
}


def _names(rank: int, world_size: int, depths: list[int], chunks: int) -> dict[int, list[str]]:
    layout = Layout(pp=world_size, vp=chunks)
    trainers = {depth: built(TINY | {"num-layers": depth}, layout) for depth in depths}
    return {depth: [record.name for _, record in trainer.parameters] for depth, trainer in trainers.items()}


@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (2, 3), pytest.param(4, 3, marks=pytest.mark.full)])
def test_every_layer_is_in_one_chunk_or_the_run_is_refused(stages: int, chunks: int) -> None:  # PP-01
    for depth in range(stages, stages * chunks):
        with pytest.raises(UsageError, match=f"there are only --num-layers {depth}. Nearest valid"):
            RunConfig.from_flags(TINY | {"num-layers": depth} | Layout(pp=stages, vp=chunks).flags, stages)
    depths = list(range(stages * chunks, 13))
    found = run_distributed(_names, stages, depths, chunks)
    ((whole),) = run_distributed(_names, 1, depths, 1)
    for depth in depths:
        names = [name for by_depth in found for name in by_depth[depth]]
        assert sorted(names) == sorted([*whole[depth], "embedding.word.weight"]), depth


# -- checkpoints -------------------------------------------------------------------------------------------------------


def _weights_and_save(rank: int, world_size: int, flags: Flags, layout: Layout) -> dict[str, Tensor]:
    trainer = built(flags, layout)
    steps(trainer, 2)
    save_run(trainer, Position(2, 16))
    return whole_weights(trainer)


def _weights_and_load(rank: int, world_size: int, flags: Flags, layout: Layout) -> tuple[dict[str, Tensor], float]:
    trainer = built(flags, layout)
    load_run(trainer)
    weights = whole_weights(trainer)
    return weights, steps(trainer, 1, stepper=Stepper(trainer), consumed=16).losses[0]


def test_a_checkpoint_of_two_chunks_goes_on_with_three_and_with_one(tmp_path: Path) -> None:
    flags = SMALL_GPT | {"num-layers": 7, "params-dtype": "fp64", "global-batch-size": 8, "save": str(tmp_path)}
    saved = run_distributed(_weights_and_save, 2, flags, Layout(pp=2, vp=2))
    before = {name: weight for of_rank in saved for name, weight in of_rank.items()}
    losses = []
    for layout in (Layout(pp=2, vp=3), Layout(pp=2), Layout(pp=2, vp=2)):
        loaded = run_distributed(_weights_and_load, 2, flags | {"load": str(tmp_path)}, layout)
        after = {name: weight for weights, _ in loaded for name, weight in weights.items()}
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], weight) for name, weight in before.items())
        losses.append(loaded[0][1])
    assert max(losses) - min(losses) <= 1e-12


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [2, pytest.param(3, marks=pytest.mark.full)])
def test_kept_and_live_bytes_of_chunks_are_the_predicted_ones(chunks: int) -> None:
    """Kept bytes exactly, the live peak of none within 1 %, of full within 3 %, on a wide shape."""
    flags = COMMON | {
        "num-layers": 7,
        "max-position-embeddings": 64,
        "hidden-size": 256,
        "num-attention-heads": 8,
        "ffn-hidden-size": 896,
        "seq-length": 64,
        "global-batch-size": 10,
    }
    cases = [flags, flags | FULL]
    for of_rank in run_distributed(run_cases, 2, cases, Layout(pp=2, vp=chunks), timeout=60):
        for (seen, predicted), limit in zip(of_rank, (0.01, 0.03), strict=True):
            assert seen.numel == predicted.parameters
            assert seen.kept == predicted.kept_peak_bytes
            assert abs(seen.peak - predicted.activation_bytes) <= limit * seen.peak
