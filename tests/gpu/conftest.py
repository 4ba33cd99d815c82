"""Kernels on a GPU are compared to the bit, so they must be the deterministic ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def deterministic_kernels() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
