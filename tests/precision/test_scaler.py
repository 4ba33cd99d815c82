"""The loss scale against Megatron's rules, written down again here."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from megackpt.config.precision import PrecisionConfig
from megackpt.precision.scaler import LossScaler


def expected_scales(
    overflows: Iterable[bool], scale: float, *, minimum: float = 1.0, window: int = 1000, hysteresis: int = 2
) -> list[float]:
    """The scale of each step and of the one after the last, from the history alone: nothing is counted along the way.

    A doubling comes after a multiple of `window` steps since the last overflow.  A step halves if, since the last
    doubling, it is at least the `hysteresis`-th overflow.
    """
    scales, history = [scale], []
    for overflow in overflows:
        history.append("o" if overflow else ".")
        since_doubling = "".join(history).rpartition("D")[2]
        if overflow:
            scale = max(scale / 2, minimum) if since_doubling.count("o") >= hysteresis else scale
        elif len(since_doubling.rpartition("o")[2]) == window:
            scale = min(scale * 2, 2.0**120)
            history.append("D")
        scales.append(scale)
    return scales


@pytest.mark.parametrize(("window", "hysteresis", "minimum"), [(1, 1, 1.0), (5, 2, 0.25), (7, 3, 64.0), (4, 2, 1.0)])
@pytest.mark.parametrize("share", [0.05, 0.3, 0.9])
def test_random_overflows(window: int, hysteresis: int, minimum: float, share: float) -> None:
    draw = random.Random(f"{window} {hysteresis} {share}")
    overflows = [draw.random() < share for _ in range(400)]
    scaler = LossScaler(2.0**12, dynamic=True, minimum=minimum, window=window, hysteresis=hysteresis)
    scales = [scaler.scale]
    for overflow in overflows:
        scaler.update(overflow)
        scales.append(scaler.scale)
    expected = expected_scales(overflows, 2.0**12, minimum=minimum, window=window, hysteresis=hysteresis)
    assert scales == expected
    assert len(set(scales)) > 2


def test_by_hand() -> None:
    scaler = LossScaler(8.0, dynamic=True, minimum=2.0, window=3, hysteresis=2)
    seen = []
    for mark in "..o...o.oooo...":
        scaler.update(mark == "o")
        seen.append(scaler.scale)
    #   .  .  o  .  .  .   o   .   o  o  o  o  .  .  .
    assert seen == [8, 8, 8, 8, 8, 16, 16, 16, 8, 4, 2, 2, 2, 2, 4]


def test_state_continues_in_mid_window_and_static_scales_stay() -> None:
    overflows = [step % 11 in (3, 4) for step in range(60)]
    whole = LossScaler(2.0**9, dynamic=True, window=5, hysteresis=2)
    scales = []
    for overflow in overflows:
        scales.append(whole.scale)
        whole.update(overflow)
    for cut in range(1, 60):
        first = LossScaler(2.0**9, dynamic=True, window=5, hysteresis=2)
        for overflow in overflows[:cut]:
            first.update(overflow)
        second = LossScaler(1.0, dynamic=True, window=5, hysteresis=2)
        second.load_state_dict(first.state_dict())
        rest = []
        for overflow in overflows[cut:]:
            rest.append(second.scale)
            second.update(overflow)
        assert rest == scales[cut:]
    static = LossScaler(128.0)
    static.load_state_dict(whole.state_dict())
    static.update(True)
    assert static.scale == 128.0 and not static.can_fall
    fresh = LossScaler(2.0**9, dynamic=True)
    fresh.load_state_dict(static.state_dict())  # a run with a static scale has no state to go on from
    assert fresh.scale == 2.0**9


def test_which_runs_have_which_scale() -> None:
    assert LossScaler.from_config(PrecisionConfig(params_dtype="bf16")).scale == 1.0
    assert LossScaler.from_config(PrecisionConfig(params_dtype="bf16", loss_scale=8.0)).scale == 8.0
    fp16 = LossScaler.from_config(PrecisionConfig(params_dtype="fp16"))
    assert (fp16.scale, fp16.minimum, fp16.window, fp16.hysteresis, fp16.dynamic) == (2.0**32, 1.0, 1000, 2, True)
    assert not LossScaler.from_config(PrecisionConfig(params_dtype="fp16", loss_scale=8.0)).dynamic


def test_a_scale_that_nothing_bounds_stays_an_fp32_number() -> None:
    scaler = LossScaler(dynamic=True, window=1)
    for _ in range(200):
        scaler.update(False)
    assert scaler.scale == 2.0**120
