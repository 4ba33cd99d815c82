"""Schedules and optimizers through the whole trainer: what moves, what is logged, what a resume goes on with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megackpt.train.checkpoint import load_run
from megackpt.train.loop import train
from tests.layouts import SMALL_GPT, SMALL_LLAMA, Flags, Layout, built, logged, train_all, whole_weights
from tests.pool import run_distributed

SHARDED: Flags = {"use-distributed-optimizer": True, "overlap-grad-reduce": True, "overlap-param-gather": True}
ENDS = {"embedding.word.weight", "head.weight"}


def _moved(rank: int, world_size: int, flags: Flags, layout: Layout) -> tuple[set[str], set[str]]:
    """Names of the parameters of this rank that a run changes, and of those that it does not."""
    trainer = built(flags, layout)
    before = {name: tensor.clone() for name, tensor in whole_weights(trainer).items()}
    train(trainer)
    trainer.optimizer.settle()
    after = whole_weights(trainer)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    return moved, set(before) - moved


@pytest.mark.parametrize(
    ("flags", "layout", "more"),
    [(SMALL_GPT, Layout(pp=2), {}), (SMALL_LLAMA, Layout(tp=2), {}), (SMALL_GPT, Layout(dp=2), SHARDED)],
    ids=["gpt-pp2", "llama-tp2", "gpt-dp2-sharded"],
)
def test_a_decoupled_rate_is_that_of_the_ends_alone(flags: Flags, layout: Layout, more: Flags, tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    flags = flags | more | {"lr": 0.0, "decoupled-lr": 1e-3, "decoupled-min-lr": 5e-4, "lr-decay-style": "linear"}
    found = run_distributed(_moved, 2, flags | {"metrics-file": str(path), "min-lr": 0.0}, layout)
    moved, rest = (set().union(*sets) for sets in zip(*found, strict=True))
    assert moved == ENDS & (moved | rest) and len(rest) > 10
    rates = [rate for (rate,) in logged(path, "decoupled_learning_rate")]
    assert rates == pytest.approx([1e-3 - 1e-4 * i for i in range(5)], rel=1e-12)


def _end(rank: int, world_size: int, flags: Flags, layout: Layout) -> dict[str, Tensor]:
    trainer = built(flags, layout)
    train(trainer)
    trainer.optimizer.settle()
    return whole_weights(trainer)


@pytest.mark.parametrize("kind", [{"optimizer": "sgd"}, {"no-decoupled-weight-decay": True}], ids=["sgd", "adam"])
def test_every_optimizer_is_the_same_on_shards(kind: Flags, tmp_path: Path) -> None:
    runs, numbers = [], []
    for name, more in (("plain", {}), ("sharded", SHARDED)):
        path = tmp_path / f"{name}.jsonl"
        flags = SMALL_LLAMA | kind | more | {"metrics-file": str(path), "weight-decay": 0.1}
        flags |= {"log-num-zeros-in-grad": True, "log-params-norm": True}
        runs.append(run_distributed(_end, 2, flags, Layout(dp=2)))
        numbers.append(logged(path, "lm_loss", "grad_norm", "num_zeros", "params_norm"))
    assert [row[:3] for row in numbers[0]] == [row[:3] for row in numbers[1]]
    assert all(zeros > 0 for _, _, zeros, _ in numbers[0]), "rows of words that no sample has"
    assert [norm for *_, norm in numbers[0]] == pytest.approx([norm for *_, norm in numbers[1]], rel=1e-12)
    for weights, others in zip(*runs, strict=True):
        assert all(torch.equal(weights[name], others[name]) for name in weights)


def _settings(path: Path, name: str) -> Flags:
    return SMALL_GPT | {
        "save": str(path / "saved"), "load": str(path / "saved"), "metrics-file": str(path / f"{name}.jsonl"),
        "lr-decay-style": "WSD", "lr-wsd-decay-iters": 4, "lr-wsd-decay-style": "linear", "lr-warmup-iters": 2,
        "train-iters": 10,
    }  # fmt: skip


def _first_rate(path: Path) -> float:
    return logged(path, "learning_rate")[0][0]


def test_a_resume_goes_on_in_the_schedule_or_takes_the_new_one(tmp_path: Path) -> None:  # CK-05, CK-06
    """Half of the peak at iteration 2, peak until 6, then down to 0 at 10."""
    whole = SMALL_GPT | _settings(tmp_path, "whole")
    run_distributed(train_all, 1, {k: v for k, v in whole.items() if k not in ("save", "load")}, Layout())
    rates = [rate for (rate,) in logged(tmp_path / "whole.jsonl", "learning_rate")]
    assert rates == pytest.approx([0, 5e-4, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 7.5e-4, 5e-4, 2.5e-4])
    run_distributed(train_all, 1, _settings(tmp_path, "first") | {"exit-interval": 7}, Layout())
    cases = {
        "same": ({}, 7.5e-4),
        "alone": ({"no-load-optim": True}, 7.5e-4),
        "override": ({"lr": 4e-3, "override-opt_param-scheduler": True}, 3e-3),
        "saved": ({"lr": 4e-3, "use-checkpoint-opt_param-scheduler": True}, 7.5e-4),
    }
    for name, (more, expected) in cases.items():
        flags = {k: v for k, v in _settings(tmp_path, name).items() if k != "save"} | more
        run_distributed(train_all, 1, flags, Layout())
        assert _first_rate(tmp_path / f"{name}.jsonl") == pytest.approx(expected, rel=1e-12), name


def _refused(rank: int, world_size: int, flags: Flags, layout: Layout) -> str:
    try:
        load_run(built(flags, layout))
    except ValueError as error:
        return str(error)
    return ""


def test_a_schedule_that_differs_is_refused(tmp_path: Path) -> None:
    run_distributed(train_all, 1, _settings(tmp_path, "first") | {"exit-interval": 7}, Layout())
    flags = {k: v for k, v in _settings(tmp_path, "other").items() if k != "save"} | {"lr-wsd-decay-iters": 5}
    (message,) = run_distributed(_refused, 1, flags, Layout())
    assert "last_samples 16 -> 20. Choose --override-opt_param-scheduler" in message
