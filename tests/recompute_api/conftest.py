"""What the tests of `checkpoint` run."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn


@pytest.fixture
def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 8), nn.LayerNorm(8))


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(4)
    return torch.randn(4, 8, requires_grad=True)
