"""Looking at a run does not change it."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from megackpt.train.loop import loader
from megackpt.train.step import Stepper
from tests import reference
from tests.layouts import (
    SHAPES,
    SMALL_GPT,
    SMALL_LLAMA,
    Flags,
    Layout,
    batches_of,
    built,
    logged,
    relative,
    train_all,
    whole_weights,
)
from tests.pool import run_distributed

DROPOUT = {"hidden-dropout": 0.1, "attention-dropout": 0.1, "eval-iters": 1, "train-iters": 11}
FULL: Flags = {"recompute-granularity": "full", "attention-backend": "unfused"}
RUNS = {
    "one process": (SMALL_GPT, Layout()),
    "one process, full": (SMALL_GPT | FULL, Layout()),
    "tp2sp-pp2": (SMALL_LLAMA, Layout(tp=2, pp=2, sp=True)),
    "tp2sp-pp2, full": (SMALL_LLAMA | FULL, Layout(tp=2, pp=2, sp=True)),
}


@pytest.mark.parametrize(("flags", "layout"), RUNS.values(), ids=RUNS)
def test_evaluating_often_does_not_change_training(flags: Flags, layout: Layout, tmp_path: Path) -> None:  # RN-08
    flags = flags | DROPOUT
    seen = []
    for interval in (5, 1000):
        path = tmp_path / f"{interval}.jsonl"
        more = {"eval-interval": interval, "metrics-file": str(path)}
        run_distributed(train_all, layout.world_size, flags | more, layout)
        assert path.read_text().count("valid_loss") == (3 if interval == 5 else 1)  # after 5, 10 and at the end
        seen.append(logged(path, "iteration", "lm_loss", "grad_norm"))
    assert len(seen[0]) == 11
    assert seen[0] == seen[1]


def _plain_losses(rank: int, world_size: int, flags: Flags) -> float:
    """Mean loss of two validation batches by the plain model."""
    trainer = built(flags)
    shape = replace(SHAPES["llama"], layers=3, heads=4, groups=2)
    batches = islice(batches_of(trainer, trainer.datasets.valid), 2)
    with torch.no_grad():
        losses = [reference.mean_loss(whole_weights(trainer), batch, shape).item() for batch in batches]
    return sum(losses) / 2


def _evaluated(rank: int, world_size: int, flags: Flags, layout: Layout) -> list[float]:
    """The same by the trainer, twice."""
    trainer = built(flags, layout)
    stepper, valid = Stepper(trainer), trainer.datasets.valid
    assert valid is not None
    losses = []
    for _ in range(2):
        with loader(trainer, valid, 0) as batches:
            losses.append(stepper.evaluate(batches, 2))
    return losses


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, pp=2, sp=True), Layout(pp=2, dp=2)], ids=str)
def test_evaluation_draws_no_dropout_and_is_the_same_everywhere(layout: Layout) -> None:
    flags = SMALL_LLAMA | DROPOUT | {"params-dtype": "fp64", "eval-iters": 2}
    (expected,) = run_distributed(_plain_losses, 1, flags)
    for losses in run_distributed(_evaluated, layout.world_size, flags, layout):
        assert losses[0] == losses[1]
        assert relative(losses[0], expected) <= 1e-12
