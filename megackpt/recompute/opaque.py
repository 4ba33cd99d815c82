"""Steps are opaque to torch.compile: the order in which tensors are saved is what a replay relies on, and a compiler
that looks through a step changes it.  The function of a step may be compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

F = TypeVar("F", bound=Callable[..., object])


def opaque(fn: F) -> F:
    """``fn`` as a call that the compiler breaks its graph at.  To be asked for only while compiling
    (``torch.compiler.is_compiling()``): it loads the compiler."""
    return torch._disable_dynamo(fn)  # type: ignore[return-value]
