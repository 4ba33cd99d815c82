"""Low precision, replay, checkpoints and odd micro-batches with the sharded optimizer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megackpt.data.dataset import Batch
from megackpt.train.checkpoint import load_run
from megackpt.train.loop import loader
from megackpt.train.step import Stepper
from tests.layouts import SMALL_GPT, SMALL_LLAMA, Flags, Layout, built, logged, steps, train_all, whole_weights
from tests.pool import run_distributed

ALL_ON: Flags = {
    "use-distributed-optimizer": True,
    "overlap-grad-reduce": True,
    "overlap-param-gather": True,
    "ddp-bucket-size": 20000,
}
FP16: Flags = {"fp16": True, "initial-loss-scale": 4096.0}

# -- replay ----------------------------------------------------------------------------------------------------------

FULL: Flags = {"recompute-granularity": "full"}
REPLAYS: list[Flags] = [
    {},
    {"recompute-granularity": "free"},
    {"recompute-granularity": "selective"},
    FULL,
    FULL | {"recompute-keep": "layer-input"},
    FULL | {"recompute-method": "uniform", "recompute-num-layers": 2},
    FULL | {"recompute-method": "block", "recompute-num-layers": 1},
]


def _gradients(rank: int, world_size: int, runs: list[Flags], layout: Layout) -> list[tuple[list[float], list[Tensor]]]:
    """Losses of two steps, and this rank's shards of the gradients of the second (the first overlaps nothing)."""
    found = []
    for flags in runs:
        trainer = built(flags, layout)
        trace = steps(trainer, 2)
        assert len(trace.norms) == 2 and all(norm > 0 for norm in trace.norms)
        parts = trainer.buffer.parts[trainer.mesh.dp.index]
        found.append((trace.losses + trace.norms, [part.gradient.clone() for part in parts]))
    return found


@pytest.mark.parametrize("schedule", [{}, {"pipeline-schedule": "zb-h1"}], ids=["interleaved", "zero-bubble"])
@pytest.mark.parametrize("dtype", [{"bf16": True}, FP16], ids=["bf16", "fp16"])
def test_replay_changes_no_bit_of_sharded_low_precision_gradients(dtype: Flags, schedule: Flags) -> None:
    """pp 2, two chunks, 4 micro-batches, dropout on, every kind of replay."""
    layout = Layout(pp=2, dp=2, vp=1 if schedule else 2)
    flags = SMALL_GPT | ALL_ON | dtype | schedule
    flags |= {"num-layers": 5, "micro-batch-size": 1, "global-batch-size": 8, "hidden-dropout": 0.1,
              "attention-dropout": 0.1, "attention-backend": "unfused", "clip-grad": 0.0}  # fmt: skip
    runs = [flags | replay for replay in REPLAYS]
    for plain, *others in run_distributed(_gradients, layout.world_size, runs, layout, timeout=150):
        assert plain[1] and any(gradient.any() for gradient in plain[1])
        for numbers, gradients in others:
            assert numbers == plain[0]
            assert all(map(torch.equal, gradients, plain[1]))


# -- sums ------------------------------------------------------------------------------------------------------------


def _sum_of_equals(rank: int, world_size: int, flags: Flags) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of one micro-batch, and of 64 times the same, each a 64th of it: a power of two, so no rounding."""
    trainer = built(flags | {"micro-batch-size": 1, "global-batch-size": 64})
    stepper = Stepper(trainer)
    results = []
    for n in (1, 64):
        with loader(trainer, trainer.datasets.train, 0) as batches:
            one: Batch = next(iter(batches))
        repeated: Iterator[Batch] = itertools.repeat(one, n)
        stepper.accumulate(repeated, n)
        results.append({name: g.double().clone() for name, g in trainer.buffer.gradients().items()})
    return results[0], results[1]


def test_64_equal_tiny_gradients_in_bf16_sum_up_as_in_fp32() -> None:  # MP-06
    ((one, summed),) = run_distributed(_sum_of_equals, 1, SMALL_LLAMA | {"bf16": True})
    for name, gradient in one.items():
        torch.testing.assert_close(summed[name], gradient, rtol=1e-6, atol=1e-6 * float(gradient.abs().max()))
    ((one, summed),) = run_distributed(_sum_of_equals, 1, SMALL_LLAMA | {"bf16": True, "grad-reduce-in-bf16": True})
    errors = [float((summed[name] - g).norm() / g.norm()) for name, g in one.items() if g.any()]
    assert max(errors) > 1e-3, "the option for sums in bf16 is what that loses"


# -- checkpoints -----------------------------------------------------------------------------------------------------


def _one_step_at_rate_zero(rank: int, world_size: int, flags: Flags, layout: Layout) -> list[str]:
    """Weights that a step at rate 0 has changed since they were loaded, optimizer left out."""
    trainer = built(flags | {"lr": 0.0, "no-load-optim": True, "override-opt_param-scheduler": True}, layout)
    start = load_run(trainer)
    loaded = {record.name: p.detach().clone() for p, record in trainer.parameters}
    steps(trainer, 1, consumed=start.position.consumed_samples)
    trainer.optimizer.settle()
    assert start.position.iteration == 2
    return [record.name for p, record in trainer.parameters if not torch.equal(p, loaded[record.name])]


@pytest.mark.parametrize("sharded", [{}, ALL_ON], ids=["plain", "sharded"])
@pytest.mark.parametrize("dtype", [{"bf16": True}, FP16], ids=["bf16", "fp16"])
def test_weights_loaded_without_the_optimizer_stay(dtype: Flags, sharded: Flags, tmp_path: Path) -> None:  # MP-01
    flags = SMALL_GPT | dtype | sharded | {"train-iters": 2, "save": str(tmp_path), "load": str(tmp_path)}
    run_distributed(train_all, 2, flags, Layout(dp=2))
    for changed in run_distributed(_one_step_at_rate_zero, 2, flags | {"train-iters": 3}, Layout(dp=2)):
        assert changed == []


WATCHED = ("iteration", "lm_loss", "grad_norm", "learning_rate", "loss_scale")


@pytest.mark.parametrize(
    ("first", "second", "layout", "dtype"),
    [
        (ALL_ON, ALL_ON, Layout(dp=2), FP16),
        (ALL_ON, {"ddp-bucket-size": 20000}, Layout(dp=2), {"bf16": True}),
        ({"ddp-bucket-size": 20000}, ALL_ON, Layout(pp=2, dp=2), {}),
    ],
    ids=["sharded", "sharded-plain", "plain-sharded"],
)
def test_a_run_goes_on_with_the_optimizer_sharded_or_not(
    first: Flags, second: Flags, layout: Layout, dtype: Flags, tmp_path: Path
) -> None:
    """CK-06: losses, norms, rates and loss scales of 3 + 3 steps are those of 6, whichever way each half has its
    state."""
    schedule = {"train-iters": 6, "lr-decay-style": "cosine", "lr-warmup-iters": 2, "min-lr": 1e-5}
    flags = SMALL_GPT | dtype | schedule
    run_distributed(train_all, layout.world_size, flags | first | {"metrics-file": str(tmp_path / "whole")}, layout)
    halves = flags | {"metrics-file": str(tmp_path / "halves"), "save": str(tmp_path / "saves"),
                      "load": str(tmp_path / "saves"), "exit-interval": 3}  # fmt: skip
    run_distributed(train_all, layout.world_size, halves | first, layout)
    run_distributed(train_all, layout.world_size, halves | second, layout)
    whole, parts = (logged(tmp_path / name, *WATCHED) for name in ("whole", "halves"))
    assert [row[0] for row in whole] == list(range(1, 7))
    assert parts == whole


def _after_a_step_at_rate_zero(rank: int, world_size: int, flags: Flags) -> tuple[dict[str, Tensor], int]:
    trainer = built(flags, Layout(dp=world_size))
    start = load_run(trainer)
    steps(trainer, 1, consumed=start.position.consumed_samples)
    trainer.optimizer.settle()
    return whole_weights(trainer), trainer.optimizer.step_count


@pytest.mark.parametrize("sharded", [{}, ALL_ON], ids=["plain", "sharded"])
def test_state_that_is_allowed_to_be_missing_leaves_the_weights(sharded: Flags, tmp_path: Path) -> None:
    """MP-01, CK-12: a checkpoint without masters, or of another optimizer, under --dist-ckpt-strictness."""
    run = SMALL_GPT | sharded | {"load": str(tmp_path), "override-opt_param-scheduler": True}
    run_distributed(train_all, 2, run | {"train-iters": 2, "save": str(tmp_path)}, Layout(dp=2))
    run |= {"lr": 0.0, "weight-decay": 0.0}
    ((saved, count), *_) = run_distributed(_after_a_step_at_rate_zero, 2, run)
    assert count == 3
    for word, flags, updates in (
        ("log_all", {"bf16": True}, 3),
        ("ignore_all", FP16, 3),
        ("log_all", {"optimizer": "sgd"}, 1),  # none of its momentum is there: a fresh one
        ("ignore_all", {"optimizer": "sgd", "bf16": True}, 1),
    ):
        for weights, count in run_distributed(
            _after_a_step_at_rate_zero, 2, run | flags | {"dist-ckpt-strictness": word}
        ):
            assert count == updates
            for name, weight in weights.items():
                assert torch.equal(weight, saved[name].to(weight.dtype)), (flags, name)


Weights = dict[str, Tensor]


def _loaded(rank: int, world_size: int, flags: Flags, layout: Layout) -> tuple[Weights, Weights, float, int]:
    """Optimizer state and weights after a load, the loss scale of the first step and the updates behind it."""
    trainer = built(flags, layout)
    start = load_run(trainer)
    trainer.optimizer.settle()
    by_kind = trainer.optimizer.state_tensors()
    state = {f"{kind} {name}": t.clone() for kind, tensors in by_kind.items() for name, t in tensors.items()}
    masters = {record.name: master for master, record in trainer.optimizer.masters()}
    for parameter, record in trainer.parameters:
        first, stop = trainer.optimizer.flat_range(record.name) or (0, 0)
        rounded = masters[record.name].to(parameter.dtype) if record.name in masters else parameter.new_empty(0)
        assert torch.equal(parameter.detach().view(-1)[first:stop], rounded), record.name
    weights = {record.name: parameter.detach().clone() for parameter, record in trainer.parameters}
    scale = trainer.scaler.scale
    assert math.isfinite(steps(trainer, 1, consumed=start.position.consumed_samples).norms[0])
    return state, weights, scale, trainer.optimizer.step_count


@pytest.mark.parametrize(("first", "second", "scale"), [({"bf16": True}, FP16, 4096.0), (FP16, {"bf16": True}, 1.0)])
def test_a_run_changes_between_16_bit_formats(first: Flags, second: Flags, scale: float, tmp_path: Path) -> None:
    """Masters and moments are the same to the bit; parameters are the masters in the new format, on every rank: those
    in the file were rounded to the old one, and rounding them again is something else."""
    common = SMALL_GPT | ALL_ON | {"load": str(tmp_path)}
    run_distributed(train_all, 2, common | first | {"save": str(tmp_path), "train-iters": 2}, Layout(dp=2))
    same = run_distributed(_loaded, 2, common | first, Layout(dp=2))
    other = run_distributed(_loaded, 2, common | second, Layout(dp=2))
    (_, one, *_), (_, another, *_) = other
    assert all(torch.equal(one[name], another[name]) for name in one)
    for (a, *_), (b, _, found, updates) in zip(same, other, strict=True):
        assert (found, updates) == (scale, 3)
        assert a.keys() == b.keys() and {key.split()[0] for key in a} == {"master", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(tensor, b[key]) for key, tensor in a.items())


def test_a_new_rate_on_resume_is_the_first_one_used(tmp_path: Path) -> None:  # CK-05
    flags = SMALL_GPT | ALL_ON | {"train-iters": 2, "save": str(tmp_path / "s"), "load": str(tmp_path / "s"),
                                  "metrics-file": str(tmp_path / "m")}  # fmt: skip
    run_distributed(train_all, 2, flags, Layout(dp=2))
    other = {"train-iters": 3, "lr": 5e-5, "override-opt_param-scheduler": True}
    run_distributed(train_all, 2, flags | other, Layout(dp=2))
    assert logged(tmp_path / "m", "learning_rate") == [(1e-3,), (1e-3,), (5e-5,)]
