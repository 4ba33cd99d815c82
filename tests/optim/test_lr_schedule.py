"""The learning rate against numbers worked out by hand from Megatron's rules."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from megackpt.config.batch import BatchConfig
from megackpt.config.errors import UsageError
from megackpt.config.optimizer import OptimizerConfig
from megackpt.config.schedule import TrainConfig
from megackpt.optim import LearningRate, Rates

BATCH = BatchConfig(micro_batch_size=2, global_batch_size=8)
LAST = {"lr_wsd_decay_iters": 20}


def schedule(
    train_iters: int | None = 100, train_samples: int | None = None, **optimizer: Any
) -> LearningRate:
    fields = {"lr": 1.0, "min_lr": 0.1, **optimizer}
    train = TrainConfig(train_iters=train_iters, train_samples=train_samples)
    return LearningRate.from_config(OptimizerConfig(**fields), train, BATCH)


@pytest.mark.parametrize(
    ("style", "more", "by_iteration"),
    [
        # warm-up of 10 iterations, decay until iteration 50: halfway down at 30, a quarter (linear) at 20
        ("linear", {}, {0: 0.0, 1: 0.1, 5: 0.5, 10: 1.0, 20: 0.775, 30: 0.55, 50: 0.1, 51: 0.1, 99: 0.1}),
        ("cosine", {}, {0: 0.0, 1: 0.1, 10: 1.0, 20: 0.55 + 0.45 * 2**-0.5, 30: 0.55, 50: 0.1, 99: 0.1}),
        ("constant", {}, {0: 0.0, 1: 0.1, 10: 1.0, 20: 1.0, 50: 1.0, 99: 1.0}),
        # sqrt(10 / 40) = 1/2, and min_lr after the decay's end whatever the curve has reached
        ("inverse-square-root", {}, {0: 0.0, 5: 0.5, 10: 1.0, 40: 0.5, 50: 0.2**0.5, 51: 0.1}),
        # stable until iteration 50 - 20 = 30; at 35 a quarter, at 40 half of the last phase is over
        ("WSD", LAST | {"lr_wsd_decay_style": "linear"}, {5: 0.5, 10: 1.0, 30: 1.0, 35: 0.775, 40: 0.55, 50: 0.1}),
        ("WSD", LAST | {"lr_wsd_decay_style": "cosine"}, {30: 1.0, 35: 0.55 + 0.45 * 2**-0.5, 40: 0.55, 99: 0.1}),
        ("WSD", LAST | {"lr_wsd_decay_style": "minus_sqrt"}, {30: 1.0, 35: 0.55, 50: 0.1, 51: 0.1}),
        ("WSD", LAST, {30: 1.0, 40: 0.1 + 0.9 * (2 * 2**-0.5 - 1), 50: 0.1, 99: 0.1}),
        ("WSD", {"lr_wsd_decay_iters": 0}, {10: 1.0, 50: 1.0, 51: 0.1}),
    ],
)
def test_rate_of_each_iteration(style: str, more: dict[str, Any], by_iteration: dict[int, float]) -> None:
    rate = schedule(lr_decay_style=style, lr_decay_iters=50, lr_warmup_iters=10, **more)
    for iteration, expected in by_iteration.items():
        assert rate(8 * iteration).rate == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_decay_lasts_as_long_as_training_unless_said_otherwise() -> None:
    assert schedule(lr_decay_style="linear")(8 * 50).rate == pytest.approx(0.55)
    assert schedule(None, 800, lr_decay_style="linear")(400).rate == pytest.approx(0.55)


def test_without_warm_up_the_first_step_has_the_full_rate() -> None:
    assert schedule()(0) == Rates(1.0)


def test_warm_up_starts_from_its_own_rate() -> None:
    rate = schedule(lr_warmup_iters=4, lr_warmup_init=0.2)
    assert [rate(8 * i).rate for i in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_warm_up_fraction_is_of_the_decay() -> None:
    rate = schedule(lr_warmup_fraction=0.05, lr_decay_iters=50)  # 20 samples: 2.5 iterations
    assert rate.warmup_samples == pytest.approx(20.0)
    assert rate(8).rate == pytest.approx(8 / 20) and rate(16).rate == pytest.approx(16 / 20)


def test_samples_as_unit_reproduce_a_published_log() -> None:
    """Bigscience's 176B run: lr 6e-5, warm-up of 216,320 samples; its log has 4.438E-09 after 16 samples."""
    rate = schedule(
        None, 300_000_000, lr=6e-5, min_lr=6e-6, lr_decay_samples=126_953_125, lr_warmup_samples=216_320
    )
    assert f"{rate(16).rate:.3E}" == "4.438E-09"
    assert rate(216_320).rate == 6e-5 and rate(126_953_126).rate == 6e-6


def test_resuming_needs_the_consumed_samples_only() -> None:  # CK-06
    whole, again = schedule(lr_warmup_iters=3), schedule(lr_warmup_iters=3)
    assert [again(8 * i) for i in range(5, 10)] == [whole(8 * i) for i in range(10)][5:]


def test_which_schedule_wins_at_a_resume() -> None:  # CK-05
    saved = asdict(schedule(lr=1.0))
    new = schedule(lr=0.5)
    assert new.resumed(saved, use_saved=False, override=True)(0).rate == 0.5
    assert new.resumed(saved, use_saved=True, override=False)(0).rate == 1.0
    assert schedule(lr=1.0).resumed(saved, use_saved=False, override=False) == schedule(lr=1.0)
    with pytest.raises(UsageError, match=r"peak 1.0 -> 0.5\. Choose --override-opt_param-scheduler"):
        new.resumed(saved, use_saved=False, override=False)


@pytest.mark.parametrize("warmup", [50, 60])
def test_warm_up_must_be_shorter_than_the_decay(warmup: int) -> None:
    message = rf"warm-up \({8 * warmup} samples\) must end before its decay \(400 samples\)"
    with pytest.raises(UsageError, match=message):
        schedule(lr_warmup_iters=warmup, lr_decay_iters=50)


def test_the_ends_may_have_a_rate_of_their_own_on_the_same_schedule() -> None:
    ends = {"decoupled_lr": 3.0, "decoupled_min_lr": 1.0}
    rate = schedule(lr_decay_style="linear", lr_decay_iters=50, lr_warmup_iters=10, **ends)
    assert rate(8 * 5) == Rates(0.5, 1.5)
    assert rate(8 * 30) == Rates(pytest.approx(0.55), pytest.approx(2.0))
    assert rate(8 * 60) == Rates(0.1, 1.0)
    assert schedule(decoupled_lr=3.0)(800).decoupled == 0.0  # Megatron's default of --decoupled-min-lr


def test_a_resume_compares_what_the_style_uses() -> None:
    saved = asdict(schedule(lr_decay_style="WSD", lr_wsd_decay_iters=20, decoupled_lr=2.0))
    other = schedule(lr_decay_style="WSD", lr_wsd_decay_iters=30, decoupled_lr=3.0)
    with pytest.raises(UsageError, match=r"last_samples 160 -> 240, decoupled_peak 2\.0 -> 3\.0"):
        other.resumed(saved, use_saved=False, override=False)
    assert other.resumed(saved, use_saved=True, override=False).last_samples == 160
    constant, shorter = (schedule(lr_decay_style="constant", lr_decay_iters=length) for length in (9, 7))
    assert constant.resumed(asdict(shorter), use_saved=False, override=False) == constant
