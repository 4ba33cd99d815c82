"""For tests of lifetimes: the garbage collector off, so that only reference counts free."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from tests.recompute.probes import Census


@pytest.fixture(scope="module")
def quick_collector() -> Iterator[None]:
    """Set aside what exists before these tests: collections and listings then see their objects only."""
    with Census():  # torch imports what dispatch modes need at their first use, and that leaves cycles of frames
        torch.ones(1).detach() + 1.0
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def no_collector(quick_collector: None) -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()
