"""The unfused core's mask: what is to come takes no part, whatever it holds."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megackpt.model.core import unfused_core

S, B, A, D = 11, 2, 3, 8


def plainly(packed: Tensor) -> Tensor:
    """softmax(masked_fill(q k' / sqrt d)) v, by position; values to come are left out of the sum as well."""
    q, k, v = packed.permute(1, 2, 0, 3, 4).unbind(3)  # [b, a, s, d]
    rows = []
    for i in range(S):
        scores = (q[:, :, i : i + 1] @ k[:, :, : i + 1].mT) / math.sqrt(D)
        rows.append((scores.softmax(-1) @ v[:, :, : i + 1]).squeeze(2))
    return torch.stack(rows).flatten(2)  # [s, b, a d]


@pytest.mark.parametrize("value", [1.0, math.inf, -math.inf, math.nan])
def test_a_key_to_come_takes_no_part(value: float) -> None:
    """Infinite and undefined scores of the last key leave every earlier position as it is; its own row sees them."""
    packed = torch.randn(S, B, A, 3, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    packed[-1, 0, 1, 1] = value
    found, wanted = unfused_core(packed, A, False, 0.0, None), plainly(packed)
    torch.testing.assert_close(found[:-1], wanted[:-1], rtol=1e-12, atol=1e-12)
    assert bool(found[-1, 0, D : 2 * D].isnan().all()) == (not math.isfinite(value))


def test_an_ordinary_row_is_the_same_to_the_bit_beside_an_infinite_one() -> None:
    packed = torch.randn(S, B, A, 3, D, generator=torch.Generator().manual_seed(1))
    before = unfused_core(packed, A, True, 0.0, None)
    packed[-1, 0, 1, 1] = math.inf
    assert torch.equal(unfused_core(packed, A, True, 0.0, None)[:-1], before[:-1])
