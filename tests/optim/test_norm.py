"""Norm, zeros and clipping on one rank."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from megackpt.mesh.parameter import ParameterRecord
from megackpt.optim import clip_, clip_coefficient, gradient_statistics, params_norm
from megackpt.optim.norm import without_padding
from tests.optim.helpers import adamw, buffer_of, draw, one_rank


def test_norm_of_two_million_equal_elements_is_exact() -> None:
    """A plain fp32 sum of squares is off by 5e-4 here; layouts are compared to 3e-6."""
    buffer = buffer_of({"w": torch.zeros(2048, 1024), "b": torch.zeros(3)})
    buffer.flat.fill_(1e-4)
    exact = math.sqrt(2048 * 1024 + 3) * torch.tensor(1e-4).double().item()
    assert gradient_statistics(buffer, one_rank()).norm == pytest.approx(exact, rel=1e-12)


def test_zeros_do_not_count_padding() -> None:
    buffer = buffer_of({"w": torch.zeros(6, 2), "b": torch.zeros(3)}, w={"valid": 4})
    buffer.gradients()["w"][:4, 0] = 3.0
    buffer.gradients()["b"][1] = 8.0
    statistics = gradient_statistics(buffer, one_rank(), count_zeros=True)
    assert statistics.num_zeros == 4 + 2
    assert statistics.norm == 10.0  # sqrt(4 * 9 + 64)
    assert gradient_statistics(buffer, one_rank()).num_zeros is None


def test_zeros_do_not_count_padded_columns() -> None:
    """Where a shard of the buffer begins inside of a row, too."""
    record = ParameterRecord((3, 5), shard_dim=1, valid=4)
    local = torch.arange(15)
    expected = [0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13]
    assert without_padding(local, record, one_rank(), 0).tolist() == expected
    assert without_padding(local[3:11], record, one_rank(), 3).tolist() == expected[3:9]


def test_copies_that_do_not_count() -> None:
    buffer = buffer_of({"copy": torch.zeros(3), "w": torch.zeros(2)}, copy={"counted": False})
    buffer.flat.fill_(2.0)
    assert gradient_statistics(buffer, one_rank()).norm == pytest.approx(math.sqrt(8), rel=1e-15)


def test_a_copy_that_does_not_count_may_still_not_be_finite() -> None:
    for value in (math.inf, math.nan):
        buffer = buffer_of({"copy": torch.zeros(3), "w": torch.zeros(2)}, copy={"counted": False})
        assert gradient_statistics(buffer, one_rank()).finite
        buffer.gradients()["copy"][1] = value
        statistics = gradient_statistics(buffer, one_rank())
        assert not statistics.finite and statistics.norm == 0.0


def test_params_norm_is_that_of_the_masters() -> None:
    buffer = buffer_of({"w": torch.ones(4, dtype=torch.bfloat16)})
    optimizer = adamw(buffer, weight_decay=0.0)
    buffer.flat.fill_(1.0)
    optimizer.step(1e-4)  # too small a step for bf16
    assert params_norm(optimizer.masters(), one_rank()) == pytest.approx(2 * (1 - 1e-4), rel=1e-7)
    assert params_norm([], one_rank()) == 0.0


@pytest.mark.parametrize(
    ("norm", "limit", "expected"),
    [
        (2.0, 1.0, 1 / 2.000001),
        (0.5, 1.0, 1.0),
        (0.0, 1.0, 1.0),
        (5.0, 0.0, 1.0),  # 0 switches clipping off
        (math.inf, 1.0, 1.0),
        (math.nan, 1.0, 1.0),
    ],
)
def test_clip_coefficient(norm: float, limit: float, expected: float) -> None:
    assert clip_coefficient(norm, limit) == pytest.approx(expected, rel=1e-15)


def test_clipping_scales_to_the_limit_and_leaves_smaller_gradients_alone() -> None:
    buffer = buffer_of({"w": torch.zeros(1000, dtype=torch.float64)})
    buffer.gradients()["w"].copy_(draw(1000, seed=0))
    before = buffer.flat.clone()
    norm = gradient_statistics(buffer, one_rank()).norm
    clip_(buffer, norm, norm * 2)
    assert torch.equal(buffer.flat, before)
    coefficient = clip_(buffer, norm, norm / 2)
    assert gradient_statistics(buffer, one_rank()).norm == pytest.approx(coefficient * norm, rel=1e-14)
    assert coefficient == pytest.approx(0.5, rel=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rate_zero_repeats_the_same_norm(dtype: torch.dtype) -> None:  # LS-06
    buffer = buffer_of(
        {"w": draw(8, 5, seed=0, dtype=dtype), "b": draw(8, seed=1, dtype=dtype)}, b={"decay": False}
    )
    optimizer = adamw(buffer)
    bias, weight = (entry.parameter for entry in buffer.entries)  # the order of a backward
    x = draw(16, 5, seed=2, dtype=dtype)
    norms = []
    for _ in range(3):
        buffer.zero_()
        for part in x.split(4):
            F.linear(part, weight, bias).square().sum().backward()
        buffer.scale_(1 / 16)
        norms.append(gradient_statistics(buffer, one_rank()).norm)
        clip_(buffer, norms[-1], 0.01)
        optimizer.step(0.0)
    assert norms[0] == norms[1] == norms[2] > 0.01
