"""Clipping that is active, over many steps: copies stay equal, and layouts stay as near as the order of sums allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import megackpt.tensor.parameters
from megackpt.train.checkpoint import load_run
from tests.layouts import (
    SMALL_GPT,
    SMALL_LLAMA,
    Flags,
    Layout,
    built,
    relative,
    steps,
    train_all,
    whole_weights,
)
from tests.pool import run_distributed

FIFTY: Flags = {"train-iters": 50, "lr": 3e-4, "global-batch-size": 2, "micro-batch-size": 1}
SHARDED: Flags = {"use-distributed-optimizer": True}


def _replicated(rank: int, world_size: int, flags: Flags, layout: Layout) -> tuple[list[float], dict[str, Tensor]]:
    """Norms of 50 steps, and what this rank holds whole at their end."""
    trainer = built(flags, layout)
    norms = steps(trainer, 50).norms
    trainer.optimizer.settle()
    return norms, {r.name: p.detach().clone() for p, r in trainer.parameters if r.shard_dim is None}


@pytest.mark.parametrize(
    ("flags", "layout", "more"),
    [
        pytest.param(SMALL_GPT, Layout(tp=2, sp=True), {}, id="gpt-tp2sp"),
        pytest.param(SMALL_LLAMA, Layout(tp=2), {}, id="llama-tp2"),
        pytest.param(SMALL_GPT, Layout(tp=2, dp=2), SHARDED, id="gpt-tp2-dp2-sharded", marks=pytest.mark.full),
        pytest.param(SMALL_LLAMA, Layout(tp=2, dp=2, sp=True), SHARDED, id="llama-sharded", marks=pytest.mark.full),
    ],
)
def test_clipping_keeps_replicated_weights_equal(flags: Flags, layout: Layout, more: Flags) -> None:  # TE-06
    flags = flags | FIFTY | more | {"bf16": True, "clip-grad": 0.01}
    (norms, first), *others = run_distributed(_replicated, layout.world_size, flags, layout, timeout=100)
    assert min(norms) > 0.01, "clipping was active in every step"
    kinds = {name.split(".", 2)[-1] for name in first}
    assert kinds >= {"attn.norm.weight", "mlp.norm.weight"}
    for other_norms, other in others:
        assert other_norms == norms
        assert all(torch.equal(first[name], other[name]) for name in first)


def _trained(rank: int, world_size: int, flags: Flags, layout: Layout) -> tuple[list[float], dict[str, Tensor]]:
    trainer = built(flags, layout)
    return steps(trainer, 50).losses, whole_weights(trainer)


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        (Layout(), {}),
        pytest.param(Layout(dp=2), SHARDED, marks=pytest.mark.full),
        pytest.param(Layout(dp=2), SHARDED | {"pipeline-schedule": "zb-h1"}, marks=pytest.mark.full),
    ],
    ids=["plain", "sharded", "sharded-zero-bubble"],
)
@pytest.mark.parametrize("clip", [0.0, 1e9, 0.05], ids=["off", "inactive", "active"])
def test_stages_change_no_bit_unless_clipping_is_active(clip: float, layout: Layout, more: Flags) -> None:  # TE-08
    """Without tied weights a stage does what it does on one rank, sum for sum; only the norm is summed in another
    order, and it counts only where it clips."""
    flags = SMALL_LLAMA | FIFTY | {"clip-grad": clip}
    one_stage = {name: value for name, value in more.items() if name != "pipeline-schedule"}
    losses, weights = run_distributed(_trained, layout.dp, flags | one_stage, layout)[0]
    found = run_distributed(_trained, 2 * layout.dp, flags | more, replace(layout, pp=2))
    names = {name for _, stage in found for name in stage}
    assert names == set(weights)
    for other, stage in found:
        if clip != 0.05:
            assert other == losses and all(torch.equal(stage[name], weights[name]) for name in stage)
        assert max(map(relative, other, losses)) <= 1e-6
        for name, weight in stage.items():
            torch.testing.assert_close(weight, weights[name], rtol=1e-5, atol=1e-6)


# -- weights from elsewhere --------------------------------------------------------------------------------------------


def _loaded_without_drawing(rank: int, world_size: int, flags: Flags, layout: Layout) -> float:
    """Norm of a step from loaded weights, in a model whose initialisation is switched off."""
    real: Callable[..., None] = megackpt.tensor.parameters.initialise
    megackpt.tensor.parameters.initialise = lambda parameter, *args: torch.nn.init.constant_(parameter, 77.0)  # type: ignore[assignment]
    try:
        trainer = built(flags, layout)
    finally:
        megackpt.tensor.parameters.initialise = real
    load_run(trainer)
    return steps(trainer, 1).norms[0]


def _drawn(rank: int, world_size: int, flags: Flags, layout: Layout) -> float:
    return steps(built(flags, layout), 1).norms[0]


@pytest.mark.parametrize("more", [{}, SHARDED | {"bf16": True}], ids=["plain", "sharded-bf16"])
def test_the_norm_does_not_depend_on_where_weights_came_from(more: Flags, tmp_path: Path) -> None:  # IN-06
    flags = SMALL_GPT | {"lr": 0.0, "min-lr": 0.0, "train-iters": 1} | more
    layout = Layout(tp=2, sp=True, dp=2 if more else 1)
    run_distributed(train_all, layout.world_size, flags | {"save": str(tmp_path)}, layout)
    expected = run_distributed(_drawn, layout.world_size, flags, layout)
    loading = flags | {"load": str(tmp_path), "finetune": True}
    assert run_distributed(_loaded_without_drawing, layout.world_size, loading, layout) == expected


def _one_step_of_rate_zero(rank: int, world_size: int, flags: Flags, layout: Layout) -> bool:
    """Whether weights that were loaded without the optimizer's state outlive a step."""
    trainer = built(flags, layout)
    load_run(trainer)
    before = {name: tensor.clone() for name, tensor in whole_weights(trainer).items()}
    outcome = steps(trainer, 1)
    trainer.optimizer.settle()
    after = whole_weights(trainer)
    assert outcome.norms[0] > 0
    return all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("more", [{}, SHARDED], ids=["plain", "sharded"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_weights_loaded_alone_outlive_a_step_of_rate_zero(dtype: str, more: Flags, tmp_path: Path) -> None:  # MP-01
    flags = SMALL_GPT | more | {"params-dtype": dtype, "initial-loss-scale": 1024, "seed": 5}
    run_distributed(train_all, 2, flags | {"save": str(tmp_path), "train-iters": 2}, Layout(dp=2))
    again = flags | {"load": str(tmp_path), "no-load-optim": True, "seed": 6, "lr": 0.0, "min-lr": 0.0}
    again |= {"override-opt_param-scheduler": True}
    assert run_distributed(_one_step_of_rate_zero, 2, again, Layout(dp=2)) == [True, True]
    saved = run_distributed(_saved_equal, 2, again, Layout(dp=2))
    assert saved == [False, False], "the weights of seed 6 are others"


def _saved_equal(rank: int, world_size: int, flags: Flags, layout: Layout) -> bool:
    """Whether loading changes nothing."""
    trainer = built(flags, layout)
    drawn = {name: tensor.clone() for name, tensor in whole_weights(trainer).items()}
    load_run(trainer)
    return all(torch.equal(drawn[name], tensor) for name, tensor in whole_weights(trainer).items())
