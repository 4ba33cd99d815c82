"""Gradients that are not finite: every rank leaves the step out, the loss scale follows, a hopeless run ends.

What is injected comes in where gradients really come from: a hook on one parameter of one rank, in backward, before
anything is reduced.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megackpt.config.run import RunConfig
from megackpt.mesh.launch import LaunchEnvironment
from megackpt.train.build import Trainer
from megackpt.train.health import TrainingStopped
from megackpt.train.loop import loader, run, train
from megackpt.train.step import Stepper
from tests.layouts import COMMON, SMALL_GPT, Flags, Layout, built, logged, train_all
from tests.pool import run_distributed
from tests.precision.test_scaler import expected_scales

TINY = COMMON | {
    "num-layers": 2,
    "hidden-size": 16,
    "num-attention-heads": 2,
    "ffn-hidden-size": 24,
    "seq-length": 6,
    "max-position-embeddings": 6,
    "vocab-size": 37,
    "global-batch-size": 2,
    "micro-batch-size": 1,
    "train-iters": 200,
    "fp16": True,
    "initial-loss-scale": 1024,
    "loss-scale-window": 17,
    "hysteresis": 2,
}
REPLICATED, SHARDED = "layers.1.attn.norm.weight", "layers.1.mlp.up.bias"  # on the last of two stages
FIRST = "layers.0.mlp.norm.bias"  # on the first

Faults = Mapping[int, tuple[int, str, float]]
"""By step: rank, parameter, what its gradient becomes."""


class Injector:
    """Spoils gradients of this rank in the steps that `faults` names."""

    def __init__(self, trainer: Trainer, rank: int, faults: Faults) -> None:
        self.step = 0
        for parameter, record in trainer.parameters:
            mine = {step: value for step, (at, name, value) in faults.items() if (at, name) == (rank, record.name)}
            if mine:
                parameter.register_hook(lambda grad, mine=mine: self.spoil(grad, mine))

    def spoil(self, grad: Tensor, mine: dict[int, float]) -> Tensor:
        if self.step not in mine:
            return grad
        grad = grad.clone()
        grad.view(-1)[-1] = mine[self.step]
        return grad


def spoilt_steps(
    rank: int, world_size: int, flags: Flags, layout: Layout, faults: Faults, count: int
) -> tuple[list[bool], list[float], int]:
    """Skipped steps, the scale before the first step and after each, and the updates done.  A skipped step changes no
    weight."""
    trainer = built(flags, layout)
    injector, stepper = Injector(trainer, rank, faults), Stepper(trainer)
    skipped, scales = [], [trainer.scaler.scale]
    with loader(trainer, trainer.datasets.train, 0) as batches:
        for step in range(count):
            injector.step = step
            trainer.optimizer.settle()
            before = [parameter.detach().clone() for parameter, _ in trainer.parameters]
            outcome = stepper.train(batches, trainer.config.batch.global_batch_size * step)
            skipped.append(outcome.skipped)
            scales.append(outcome.loss_scale)
            trainer.optimizer.settle()
            same = all(torch.equal(old, p.detach()) for old, (p, _) in zip(before, trainer.parameters, strict=True))
            assert same == outcome.skipped, step
            assert math.isfinite(outcome.loss)
    assert all(bool(torch.isfinite(p).all()) for p, _ in trainer.parameters)
    return skipped, scales, trainer.optimizer.step_count


INF, NAN = math.inf, math.nan
BY_TENSOR: Faults = {
    5: (0, FIRST, NAN), 6: (1, FIRST, NAN), 40: (1, SHARDED, INF), 41: (1, SHARDED, -INF), 42: (0, REPLICATED, NAN),
    43: (1, REPLICATED, INF), 90: (1, FIRST, NAN), 120: (0, SHARDED, INF), 121: (1, REPLICATED, NAN),
}  # fmt: skip
BY_STAGE: Faults = {
    5: (0, FIRST, NAN), 40: (1, SHARDED, INF), 41: (0, FIRST, -INF), 42: (1, REPLICATED, NAN), 70: (0, FIRST, INF),
    120: (1, SHARDED, NAN), 121: (0, FIRST, NAN), 122: (1, REPLICATED, INF),
}  # fmt: skip
BY_BOTH: Faults = {  # ranks 0 and 1 are the first stage
    3: (0, FIRST, INF), 4: (1, FIRST, NAN), 30: (2, REPLICATED, NAN), 31: (3, REPLICATED, NAN), 32: (3, SHARDED, -INF),
    80: (2, SHARDED, NAN), 81: (1, FIRST, INF), 82: (3, REPLICATED, INF), 83: (0, FIRST, NAN), 84: (3, SHARDED, INF),
    150: (3, REPLICATED, NAN), 160: (1, FIRST, NAN), 170: (2, REPLICATED, INF), 199: (3, SHARDED, NAN),
}  # fmt: skip
SHARDED_STATE: Flags = {"use-distributed-optimizer": True}
OVERLAP: Flags = SHARDED_STATE | {
    "overlap-grad-reduce": True,
    "overlap-param-gather": True,
    "ddp-bucket-size": 900,  # several buckets
    "global-batch-size": 4,
}
CASES = [
    pytest.param(Layout(tp=2), BY_TENSOR, {}, id="tp2"),
    pytest.param(Layout(dp=2), BY_TENSOR, {}, id="dp2"),
    pytest.param(Layout(pp=2), BY_STAGE, {}, id="pp2"),
    pytest.param(Layout(dp=2), BY_TENSOR, SHARDED_STATE, id="dp2-distributed"),
    pytest.param(Layout(dp=2), BY_TENSOR, OVERLAP, id="dp2-overlap"),
    pytest.param(Layout(tp=2, pp=2), BY_BOTH, {}, id="tp2-pp2", marks=pytest.mark.full),
    pytest.param(Layout(pp=2, dp=2), BY_BOTH, OVERLAP, id="pp2-dp2-overlap", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("layout", "faults", "more"), CASES)
def test_scales_and_skipped_steps_over_200_steps(layout: Layout, faults: Faults, more: Flags) -> None:  # MP-08
    """NaN and inf, on every kind of rank, in replicated parameters (without sequence parallel each rank computes its
    own, and only tp rank 0's count in the norm) and in sharded ones."""
    found = run_distributed(spoilt_steps, layout.world_size, TINY | more, layout, faults, 200, timeout=100)
    skipped = [step in faults for step in range(200)]
    expected = expected_scales(skipped, 1024.0, window=17, hysteresis=2)
    assert len(set(expected)) > 4
    for rank in found:
        assert rank == (skipped, expected, 200 - len(faults))


def test_a_scale_that_is_too_large_falls_until_it_fits_and_the_run_learns() -> None:
    flags = TINY | {"initial-loss-scale": 2.0**32, "hysteresis": 1, "lr": 3e-3}
    (skipped, scales, updates), *others = run_distributed(spoilt_steps, 2, flags, Layout(pp=2), {}, 60)
    assert all(other == (skipped, scales, updates) for other in others)
    assert skipped[:2] == [True, True] and not skipped[-1] and updates == skipped.count(False) > 20
    assert scales == expected_scales(skipped, 2.0**32, window=17, hysteresis=1)


WATCHED = ("iteration", "lm_loss", "grad_norm", "loss_scale", "skipped_iterations")


@pytest.mark.parametrize(
    ("layout", "more", "cut"), [(Layout(tp=2), {}, 11), (Layout(dp=2), OVERLAP, 10)], ids=["tp", "overlap"]
)
def test_resume_in_mid_window_continues_the_series(  # MP-02
    layout: Layout, more: Flags, cut: int, tmp_path: Path
) -> None:
    """24 steps in two parts: the first halvings, and doublings after windows of 3, which overflow again."""
    flags = TINY | more | {"initial-loss-scale": 2.0**24, "loss-scale-window": 3, "train-iters": 24}
    run_distributed(train_all, 2, flags | {"metrics-file": str(tmp_path / "whole.jsonl")}, layout)
    saved = str(tmp_path / "saved")
    parts = flags | {"metrics-file": str(tmp_path / "parts.jsonl"), "save": saved, "load": saved}
    run_distributed(train_all, 2, parts | {"exit-interval": cut}, layout)
    run_distributed(train_all, 2, parts, layout)
    whole = logged(tmp_path / "whole.jsonl", *WATCHED)
    assert len(whole) == 24 and logged(tmp_path / "parts.jsonl", *WATCHED) == whole
    scales = [scale for *_, scale, _ in whole]
    before = scales[cut - 3 : cut]
    assert len(set(before)) == 1 and before[0] < scales[cut], "two good steps of three lie before the cut"
    assert before[0] < scales[1] < scales[0] and any(a > b for a, b in itertools.pairwise(scales[cut:]))


# -- the end ---------------------------------------------------------------------------------------------------------


def trained(rank: int, world_size: int, flags: Flags, layout: Layout, faults: Faults) -> tuple[str, int]:
    """How a run ends whose gradients are spoilt, and the updates it did."""
    trainer = built(flags, layout)
    injector = Injector(trainer, rank, faults)
    stepper_accumulate = Stepper.accumulate

    def accumulate(self: Stepper, *args: object) -> tuple[float, int]:
        injector.step += 1
        return stepper_accumulate(self, *args)  # type: ignore[arg-type]

    Stepper.accumulate = accumulate  # type: ignore[method-assign,assignment]
    try:
        train(trainer)
    except TrainingStopped as error:
        return str(error), trainer.optimizer.step_count
    finally:
        Stepper.accumulate = stepper_accumulate  # type: ignore[method-assign]
    return "", trainer.optimizer.step_count


@pytest.mark.parametrize(
    ("layout", "more", "place"),
    [(Layout(tp=2, pp=2), {}, "tp 1, dp 0, pp 1"), (Layout(pp=2, dp=2), OVERLAP, "tp 0, dp 1, pp 1")],
    ids=["plain", "overlap"],
)
def test_a_permanent_overflow_ends_the_run_and_is_named(layout: Layout, more: Flags, place: str) -> None:  # MP-04
    """One rank of the last stage, from step 5 on: the scale falls from 8 to 2 in three steps, then three more."""
    faults = {step: (3, SHARDED, INF) for step in range(5, 41)}
    flags = TINY | {"initial-loss-scale": 8, "min-loss-scale": 2, "max-skipped-iterations": 3, "train-iters": 40}
    found = run_distributed(trained, 4, flags | more, layout, faults)
    for message, updates in found:
        assert message.startswith(
            "iteration 10: 3 step(s) in a row had to be left out at loss scale 2, which cannot fall further; in the"
            f" last one the gradient of layers.1.mlp.up.bias (layer 1) is not finite on rank 3 ({place})."
        )
        assert updates == 4


@pytest.mark.parametrize("more", [{}, OVERLAP], ids=["plain", "overlap"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_other_formats_end_too_unless_told_not_to(dtype: str, more: Flags) -> None:
    """What is sent early has been reduced when the run ends: the last step of a row waits, to see whose fault it is."""
    faults: Faults = {step: (1, FIRST, NAN) for step in (2, 4, 5, 6, 7, 8)}
    flags = TINY | more | {"fp16": False, "params-dtype": dtype, "max-skipped-iterations": 4, "train-iters": 9}
    layout = Layout(dp=2)
    for message, updates in run_distributed(trained, 2, flags, layout, faults):
        assert message.startswith("iteration 7: 4 step(s) in a row")
        assert f"{FIRST} (layer 0) is not finite on rank 1 (tp 0, dp 1, pp 0)." in message
        assert updates == 2
    endless = flags | {"no-check-for-nan-in-loss-and-grad": True}
    assert run_distributed(trained, 2, endless, layout, faults) == [("", 3)] * 2


@pytest.mark.parametrize("more", [{}, OVERLAP], ids=["plain", "overlap"])
def test_a_run_may_end_at_its_first_bad_step(more: Flags) -> None:
    """Gradients are looked at after they were reduced: both data-parallel ranks are named."""
    flags = TINY | more | {"fp16": False, "bf16": True, "max-skipped-iterations": 1, "train-iters": 9}
    for message, updates in run_distributed(trained, 2, flags, Layout(dp=2), {4: (1, FIRST, NAN)}):
        assert message.startswith("iteration 4: 1 step(s) in a row") and updates == 3
        assert f"{FIRST} (layer 0) is not finite on " in message


def test_the_process_ends_with_code_1_and_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """A static scale that no fp16 gradient survives."""
    flags = TINY | {"loss-scale": 2.0**60, "max-skipped-iterations": 2, "log-interval": 1, "device": "cpu"}
    assert run(RunConfig.from_flags(flags), LaunchEnvironment.detect({})) == 1
    out, err = capsys.readouterr()
    assert out.count("number of skipped iterations:   1") == 2
    assert "megackpt: error: iteration 2: 2 step(s) in a row had to be left out at loss scale 1.15292e+18" in err
    assert "Traceback" not in err


def test_steps_left_out_before_a_resume_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = TINY | {"loss-scale": 2.0**60, "max-skipped-iterations": 3, "device": "cpu", "exit-interval": 2}
    flags |= {"save": str(tmp_path), "load": str(tmp_path)}
    assert [run(RunConfig.from_flags(flags), LaunchEnvironment.detect({})) for _ in range(2)] == [0, 1]
    assert "megackpt: error: iteration 3: 3 step(s) in a row had to be left out" in capsys.readouterr().err


def nan_in_the_forward(rank: int, world_size: int, flags: Flags, layout: Layout) -> str:
    trainer = built(flags, layout)
    by_name = {record.name: parameter for parameter, record in trainer.parameters}
    with torch.no_grad():
        if FIRST in by_name:
            by_name[FIRST][0] = NAN
    trainer.optimizer.refresh_masters()
    try:
        train(trainer)
    except TrainingStopped as error:
        return str(error)
    return ""


def loss_beyond_numbers(rank: int, world_size: int) -> tuple[bool, bool, float]:
    trainer = built(SMALL_GPT | {"fp16": True, "initial-loss-scale": 64, "hysteresis": 1})
    before = [parameter.detach().clone() for parameter, _ in trainer.parameters]
    trainer.buffer.flat.fill_(1e-3)
    outcome = Stepper(trainer).update((INF, 80), 0)
    same = all(torch.equal(old, p.detach()) for old, (p, _) in zip(before, trainer.parameters, strict=True))
    return outcome.skipped, same, outcome.loss_scale


def test_a_loss_that_is_not_finite_leaves_a_step_out_whose_gradients_are() -> None:
    assert run_distributed(loss_beyond_numbers, 1) == [(True, True, 32.0)]


def test_a_loss_that_is_nan_is_reported_as_one(tmp_path: Path) -> None:
    flags = SMALL_GPT | {"max-skipped-iterations": 2, "metrics-file": str(tmp_path / "m.jsonl")}
    for message in run_distributed(nan_in_the_forward, 2, flags, Layout(pp=2)):
        assert message.startswith("iteration 2: 2 step(s) in a row had to be left out at loss scale 1, ")
        assert "is not finite on rank" in message and "parameters have such gradients" in message
    rows = logged(tmp_path / "m.jsonl", "lm_loss", "skipped_iterations", "nan_iterations")
    assert rows == [(None, 1, 1)] * 2
