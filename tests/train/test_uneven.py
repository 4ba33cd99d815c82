"""Layers dealt unevenly to stages and chunks: the model of one process, evaluation included."""

from __future__ import annotations

import pytest
import torch

from megackpt.train.loop import loader
from megackpt.train.step import Stepper
from tests.layouts import COMMON, GPT, TOLERANCES, Flags, Layout, Trace, built, distance, relative, steps
from tests.plan.live_run import run_cases
from tests.pool import run_distributed

SIZE: Flags = GPT | {"params-dtype": "fp64", "micro-batch-size": 1, "global-batch-size": 3, "eval-iters": 2}


def _first(number: int, last: int | None = None) -> Flags:
    flags: Flags = {"decoder-first-pipeline-num-layers": number}
    return flags if last is None else flags | {"decoder-last-pipeline-num-layers": last}


ENDS: Flags = {"account-for-embedding-in-pipeline-split": True, "account-for-loss-in-pipeline-split": True}
SPLITS: list[tuple[Layout, Flags, list[list[int]]]] = [
    (Layout(pp=2), _first(3), [[3], [1]]),
    (Layout(pp=2, vp=2), ENDS, [[0, 2], [2, 0]]),
    (Layout(pp=3), {"pipeline-model-parallel-layout": "E|t*4|L"}, [[0], [4], [0]]),
    (Layout(pp=2), {"pipeline-model-parallel-layout": "Et||(tt|)t,L"}, [[1, 2], [0, 1]]),
    (Layout(tp=2, sp=True, pp=2), ENDS | {"num-virtual-stages-per-pipeline-rank": 2}, [[0, 2], [2, 0]]),
]


def _both(rank: int, world_size: int, flags: Flags, layout: Layout) -> tuple[Trace, float, list[int]]:
    trainer = built(flags, layout)
    stepper = Stepper(trainer)
    trace = steps(trainer, 2, gradients_of=2, stepper=stepper)
    assert trainer.datasets.valid is not None
    before = stepper.trainer.buffer.flat.clone()
    with loader(trainer, trainer.datasets.valid, 0) as batches:
        loss = stepper.evaluate(batches, 2)
    assert torch.equal(before, trainer.buffer.flat)
    return trace, loss, [len(piece.layers) for piece in trainer.pieces]


@pytest.mark.parametrize(
    ("layout", "split", "expected"), SPLITS, ids=["first", "ends", "alone", "empty", "ends-tp"]
)
def test_uneven_splits_train_and_evaluate_as_one_process(
    layout: Layout, split: Flags, expected: list[list[int]]
) -> None:
    """fp64, gradients within 1e-12; tied embeddings; an end of the model alone, a chunk with nothing at all."""
    ((alone, loss, _),) = run_distributed(_both, 1, SIZE, Layout())
    for trace, evaluated, layers in (found := run_distributed(_both, layout.world_size, SIZE | split, layout)):
        distance(trace, alone).check(**TOLERANCES["fp64"])
        assert relative(evaluated, loss) <= 1e-12
        assert layers in expected
    assert {name for trace, _, _ in found for name in trace.grads[0]} == set(alone.grads[0])


def test_bytes_of_uneven_splits_are_the_predicted_ones() -> None:
    """Kept bytes exactly, the live peak within 1 %, of a stage with an end of the model alone and of empty chunks."""
    wide = COMMON | {"num-layers": 4, "hidden-size": 256, "ffn-hidden-size": 896, "seq-length": 64}
    wide |= {"max-position-embeddings": 64}
    cases = [wide | {"pipeline-model-parallel-layout": text} for text in ("E|ttttL", "Et||ttt|L", "Et|tt||||tL")]
    cases.append(cases[0] | {"hidden-dropout": 0.1, "recompute-granularity": "full"})  # a gradient held to the end
    for of_rank in run_distributed(run_cases, 2, cases, Layout(pp=2), timeout=60):
        for seen, predicted in of_rank:
            assert seen.numel == predicted.parameters
            assert seen.kept == predicted.kept_peak_bytes
            assert abs(seen.peak - predicted.activation_bytes) <= 0.01 * seen.peak
