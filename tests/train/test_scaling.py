"""The mean is over the tokens of a step, whatever they are split into.

All cases compare gradients before clipping as well as losses: Adam hides a constant factor, and a loss that looks
right says nothing about what was sent backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from megackpt.data.dataset import Batch, collate, training_sample
from megackpt.optim.norm import gradient_statistics
from megackpt.train.loop import loader
from megackpt.train.step import Stepper
from tests import reference
from tests.layouts import (
    GPT,
    SHAPES,
    Distance,
    Flags,
    Layout,
    Trace,
    built,
    distance,
    logged,
    relative,
    steps,
    train_all,
    whole_gradients,
    whole_weights,
)
from tests.pool import run_distributed

FP64 = GPT | {"params-dtype": "fp64"}
EXACT = {"loss": 1e-12, "norm": 1e-12, "gradient": 1e-12}
FULL = {"recompute-granularity": "full"}


def _against_file(rank: int, world_size: int, flags: Flags, layout: Layout, path: Path, count: int) -> Distance | None:
    """Writes the trace at `path` on one rank without one there; else compares."""
    trace = steps(built(flags, layout), count, gradients_of=count)
    if not path.exists():
        trace.save(path)
        return None
    return distance(trace, Trace.read(path))


# -- micro-batches ---------------------------------------------------------------------------------------------------


def test_micro_batch_size_changes_nothing(tmp_path: Path) -> None:  # LS-04
    run_distributed(_against_file, 1, FP64 | {"micro-batch-size": 1}, Layout(), tmp_path / "r0.pt", 2)
    for size in (2, 4, 8):
        flags = FP64 | {"micro-batch-size": size}
        (found,) = run_distributed(_against_file, 1, flags, Layout(), tmp_path / "r0.pt", 2)
        found.check(**EXACT)


def test_logged_loss_does_not_depend_on_the_micro_batch_size(tmp_path: Path) -> None:  # LS-11
    losses = []
    for size in (1, 4):
        path = tmp_path / f"{size}.jsonl"
        flags = GPT | {"micro-batch-size": size, "metrics-file": str(path), "lr": 3e-4}
        run_distributed(train_all, 2, flags, Layout(dp=2))
        losses.append([loss for (loss,) in logged(path, "lm_loss")])
    assert len(losses[0]) == 5
    assert max(map(relative, *losses)) <= 1e-6


def _two_schedule_calls(rank: int, world_size: int, path: Path) -> Distance:
    """The step's four micro-batches in two calls of two, into one gradient."""
    trainer = built(FP64, Layout(pp=2))
    stepper = Stepper(trainer)
    trainer.chunks[0].train()
    trainer.buffer.zero_()
    with loader(trainer, trainer.datasets.train, 0) as batches:
        total = sum(stepper._run(batches, 2, forward_only=False)[0] for _ in range(2))
    trainer.reduction.finish()
    norm = gradient_statistics(trainer.buffer, trainer.mesh).norm
    trace = Trace([total / stepper.nominal_tokens], [norm], [], [whole_gradients(trainer)])
    return distance(trace, Trace.read(path))


def test_two_schedule_calls_in_one_step(tmp_path: Path) -> None:  # LS-01
    run_distributed(_against_file, 1, FP64, Layout(), tmp_path / "r0.pt", 1)
    for found in run_distributed(_two_schedule_calls, 2, tmp_path / "r0.pt"):
        found.check(**EXACT)


@pytest.mark.parametrize("recompute", [{}, FULL], ids=["none", "full"])
def test_stages_do_not_scale_gradients(recompute: Flags, tmp_path: Path) -> None:  # LS-02
    flags = FP64 | {"clip-grad": 0.0}
    run_distributed(_against_file, 1, flags, Layout(), tmp_path / "r0.pt", 2)
    for found in run_distributed(_against_file, 2, flags | recompute, Layout(pp=2), tmp_path / "r0.pt", 2):
        found.check(**EXACT)


# -- rate zero -------------------------------------------------------------------------------------------------------


def _repeated(rank: int, world_size: int, flags: Flags, layout: Layout) -> list[float]:
    """Norms of three steps over the same batch."""
    trainer = built(flags, layout)
    with loader(trainer, trainer.datasets.train, 0) as batches:
        batch = [next(batches) for _ in range(trainer.config.micro_batches)]
    stepper = Stepper(trainer)
    return [stepper.train(iter(batch), 0).grad_norm for _ in range(3)]


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, pp=2, sp=True), Layout(dp=2)], ids=str)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_rate_zero_repeats_the_same_norm(dtype: str, layout: Layout) -> None:  # LS-06
    flags = GPT | {"params-dtype": dtype, "lr": 0.0, "min-lr": 0.0, "initial-loss-scale": 4096}
    found = run_distributed(_repeated, layout.world_size, flags, layout)
    assert found[0][0] == found[0][1] == found[0][2] > 1.0
    assert all(norms == found[0] for norms in found)


# -- masks -----------------------------------------------------------------------------------------------------------

LONG = FP64 | {"seq-length": 104, "max-position-embeddings": 104, "global-batch-size": 2}


def masked_samples(counts: Sequence[int], length: int) -> list[Batch]:
    """One sample per count, of which so many tokens are unmasked, at scattered places."""
    samples = []
    for number, count in enumerate(counts):
        draw = np.random.default_rng(number)
        sample = training_sample(draw.integers(0, 509, length + 1))
        mask = np.zeros(length, np.float32)
        mask[draw.permutation(length)[:count]] = 1.0
        samples.append(sample | {"loss_mask": mask})
    return samples


def _plain_model(rank: int, world_size: int, flags: Flags, counts: Sequence[int], path: Path) -> None:
    """One step of the plain model over masked samples, whole."""
    weights = whole_weights(built(flags))
    samples = collate(masked_samples(counts, 104))
    batch = {name: torch.from_numpy(array) for name, array in samples.items()}
    loss, grads = reference.gradients(weights, batch, SHAPES["gpt"])
    norm = math.sqrt(sum(float(grad.norm()) ** 2 for grad in grads.values()))
    Trace([loss], [norm], [sum(counts)], [grads]).save(path)


def _masked_step(rank: int, world_size: int, flags: Flags, layout: Layout, counts: Sequence[int]) -> Trace:
    """The same step by the trainer."""
    trainer = built(flags, layout)
    samples = masked_samples(counts, trainer.config.model.seq_length)
    size, dp = trainer.config.batch.micro_batch_size, trainer.mesh.dp
    mine = [collate(samples[i : i + size]) for i in range(dp.index * size, len(samples), size * dp.size)]
    stepper = Stepper(trainer)
    totals = stepper.accumulate(iter(mine))
    grads = whole_gradients(trainer)
    outcome = stepper.update(totals, 0)
    assert not outcome.skipped
    return Trace([outcome.loss], [outcome.grad_norm], [outcome.tokens], [grads])


def _masked_beside_plain(
    rank: int, world_size: int, flags: Flags, layout: Layout, counts: Sequence[int], path: Path
) -> tuple[Distance, int]:
    trace = _masked_step(rank, world_size, flags, layout, counts)
    return distance(trace, Trace.read(path)), trace.tokens[0]


MASKED = [  # micro-batch size, layout
    (2, Layout()),
    (1, Layout()),
    (1, Layout(dp=2)),
    (1, Layout(tp=2, pp=2, sp=True)),
]


@pytest.mark.parametrize(("size", "layout"), MASKED, ids=[f"mbs{size}-{layout}" for size, layout in MASKED])
@pytest.mark.parametrize("counts", [(11, 101), (104, 0), (0, 7)], ids=str)
def test_every_token_weighs_the_same(counts: tuple[int, ...], size: int, layout: Layout, tmp_path: Path) -> None:
    """LS-07, and TP-08 under sequence parallelism: samples of 11 and 101 tokens.
    LS-09: a sample, and with micro-batches of one a micro-batch, of none."""
    flags = LONG | {"micro-batch-size": size}
    run_distributed(_plain_model, 1, LONG | {"micro-batch-size": 2}, counts, tmp_path / "plain.pt")
    for found, tokens in run_distributed(
        _masked_beside_plain, layout.world_size, flags, layout, counts, tmp_path / "plain.pt"
    ):
        found.check(**EXACT)
        assert tokens == sum(counts)


def test_a_step_without_any_token_is_a_step_of_zero() -> None:  # LS-09
    flags = LONG | {"micro-batch-size": 1}
    for trace in run_distributed(_masked_step, 2, flags, Layout(dp=2), (0, 0)):
        assert (trace.losses, trace.norms, trace.tokens) == ([0.0], [0.0], [0])
        assert not any(grad.any() for grad in trace.grads[0].values())
