"""The mean is over the tokens of a step in every mode of data parallelism: overlapped, sharded optimizer state, both.

The cases of `test_scaling.py` again, where what is reduced, when and by what differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from megackpt.optim.norm import gradient_statistics
from megackpt.train.loop import loader
from megackpt.train.step import Stepper
from tests.layouts import (
    GPT,
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
)
from tests.pool import run_distributed
from tests.train.test_scaling import EXACT, FP64, FULL, LONG, _against_file, _masked_step, _plain_model, _repeated

SHARDED: Flags = {"use-distributed-optimizer": True, "ddp-bucket-size": 30_000}
EARLY: Flags = {"overlap-grad-reduce": True, "ddp-bucket-size": 30_000}
MODES: dict[str, Flags] = {
    "overlap": EARLY,
    "sharded": SHARDED,
    "sharded-overlap": SHARDED | EARLY | {"overlap-param-gather": True},
}
in_every_mode = pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[] if mode == "sharded-overlap" else [pytest.mark.full]) for mode in MODES]
)
DP2 = Layout(dp=2)


@in_every_mode
def test_micro_batch_size_changes_nothing(mode: str, tmp_path: Path) -> None:  # LS-04
    """Three steps: in the second and third gradients leave early."""
    run_distributed(_against_file, 1, FP64 | {"micro-batch-size": 8}, Layout(), tmp_path / "r0.pt", 3)
    for size in (1, 2, 4):
        flags = FP64 | MODES[mode] | {"micro-batch-size": size}
        for found in run_distributed(_against_file, 2, flags, DP2, tmp_path / "r0.pt", 3):
            found.check(**EXACT)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1"])
@pytest.mark.parametrize("mode", ["sharded-overlap"])
def test_stages_do_not_scale_gradients(mode: str, schedule: str, tmp_path: Path) -> None:  # LS-02, LS-12
    """Two stages of two replicas and four micro-batches against one process."""
    flags = FP64 | {"clip-grad": 0.0, "micro-batch-size": 1}
    run_distributed(_against_file, 1, flags, Layout(), tmp_path / "r0.pt", 2)
    layout = Layout(pp=2, dp=2, vp=2 if schedule == "interleaved" else 1)
    more = {"pipeline-schedule": schedule} if schedule == "zb-h1" else {}
    for recompute in ({}, FULL):
        every = flags | MODES[mode] | more | recompute
        for found in run_distributed(_against_file, 4, every, layout, tmp_path / "r0.pt", 2, timeout=100):
            found.check(**EXACT)


def _two_schedule_calls(rank: int, world_size: int, flags: Flags, layout: Layout, path: Path) -> Distance:
    """A step of four micro-batches as usual, and one in two calls of two, into one gradient."""
    trainer = built(flags, layout)
    stepper = Stepper(trainer)
    first = steps(trainer, 1, gradients_of=1, stepper=stepper)
    with loader(trainer, trainer.datasets.train, 8) as batches:
        trainer.reduction.start(4)
        total = sum(stepper._run(batches, 2, forward_only=False)[0] for _ in range(2))
    trainer.reduction.finish()
    norm = gradient_statistics(trainer.buffer, trainer.mesh).norm
    losses, norms = [*first.losses, total / stepper.nominal_tokens], [*first.norms, norm]
    return distance(Trace(losses, norms, [], [*first.grads, whole_gradients(trainer)]), Trace.read(path))


@in_every_mode
def test_two_schedule_calls_in_one_step(mode: str, tmp_path: Path) -> None:  # LS-01
    run_distributed(_against_file, 1, FP64, Layout(), tmp_path / "r0.pt", 2)
    flags = FP64 | MODES[mode] | {"micro-batch-size": 1}
    for layout, more in ((DP2, {}), (Layout(pp=2, dp=2), {}), (Layout(pp=2, dp=2), {"pipeline-schedule": "zb-h1"})):
        found = run_distributed(_two_schedule_calls, layout.world_size, flags | more, layout, tmp_path / "r0.pt")
        for of_rank in found:
            of_rank.check(**EXACT)


@in_every_mode
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_rate_zero_repeats_the_same_norm(dtype: str, mode: str) -> None:  # LS-06
    flags = GPT | MODES[mode] | {"params-dtype": dtype, "lr": 0.0, "min-lr": 0.0, "initial-loss-scale": 4096}
    found = run_distributed(_repeated, 2, flags, DP2)
    assert found[0][0] == found[0][1] == found[0][2] > 1.0
    assert all(norms == found[0] for norms in found)


@in_every_mode
@pytest.mark.parametrize("counts", [(11, 101), (104, 0), (0, 0)], ids=str)
def test_every_token_weighs_the_same(counts: Sequence[int], mode: str, tmp_path: Path) -> None:
    """LS-07, LS-09, and TP-08 under sequence parallelism."""
    flags = LONG | MODES[mode] | {"micro-batch-size": 1}
    found = run_distributed(_masked_step, 2, flags, DP2, counts)
    found += run_distributed(_masked_step, 4, flags, Layout(tp=2, dp=2, sp=True), counts)
    assert all(trace.tokens == [sum(counts)] for trace in found)
    if not sum(counts):
        assert all((trace.losses, trace.norms) == ([0.0], [0.0]) for trace in found)
        return
    run_distributed(_plain_model, 1, LONG | {"micro-batch-size": 2}, counts, tmp_path / "plain.pt")
    for trace in found:
        distance(trace, Trace.read(tmp_path / "plain.pt")).check(**EXACT)


@in_every_mode
def test_logged_loss_does_not_depend_on_the_micro_batch_size(mode: str, tmp_path: Path) -> None:  # LS-11
    losses = []
    for size in (1, 4):
        path = tmp_path / f"{size}.jsonl"
        flags = GPT | MODES[mode] | {"micro-batch-size": size, "metrics-file": str(path), "lr": 3e-4}
        run_distributed(train_all, 2, flags, DP2)
        losses.append([loss for (loss,) in logged(path, "lm_loss")])
    assert len(losses[0]) == 5
    assert max(map(relative, *losses)) <= 1e-6
