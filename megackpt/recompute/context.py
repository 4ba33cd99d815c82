"""The replay context: the one permitted ambient state, thread-local as PyTorch's own grad mode is.

It answers three questions for code that runs inside a step: is this a replay, is the product about to be computed
still wanted, and is a dropout mask stored or drawn again.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, Protocol

from megackpt.plan import KEEP

if TYPE_CHECKING:
    from torch import Tensor

    from megackpt.recompute.tape import Tape

# How steps inside the running step behave.
LIVE = 0  # they decide for themselves
COUNTED = 1  # the running step is dropped and this is its forward: what they save is only numbered
MERGED = 2  # they are part of the running step, in its forward and in its replay


class Frame(Protocol):
    """What the innermost running step shows to code inside it."""

    @property
    def replaying(self) -> bool: ...

    def still_wanted(self, packs: int) -> bool: ...


class _State(threading.local):
    def __init__(self) -> None:
        self.tape: Tape | None = None
        self.frame: Any = None  # the innermost step that is running
        self.masks: str = KEEP  # its decision for dropout masks
        self.inner: int = LIVE
        self.clear_task = -1  # the backward that `to_clear` belongs to
        self.to_clear: list[weakref.ref[Any]] = []

    def read(self) -> tuple[Any, Any, str, int]:
        return self.tape, self.frame, self.masks, self.inner

    def write(self, values: tuple[Any, Any, str, int]) -> None:
        self.tape, self.frame, self.masks, self.inner = values


state = _State()


def pack(tensor: Tensor) -> Any:
    """Autograd's pack hook while a step runs: the innermost one takes the tensor.

    A plain function, because autograd holds the pack hook as long as what was packed: a frame's own method would
    keep the frame alive, with all that it knows of its step.
    """
    return state.frame.pack(tensor)


def is_replaying() -> bool:
    """True while a step is being re-run in backward: guard side effects with it (counters, metrics)."""
    return state.frame is not None and state.frame.replaying


def product_wanted(packs: int) -> bool:
    """Whether anything after the next ``packs`` saved tensors is wanted.

    A custom autograd function packs what it saves after its kernel has run, an ATen operation before.  A function
    that saves exactly ``packs`` tensors, none of them its product, asks this before its kernel and may return an
    uninitialised product of the right shape when the answer is False: the replay ends before anyone reads it.
    """
    frame = state.frame
    return frame is None or frame.still_wanted(packs)


def masks_kept() -> bool:
    """Whether a dropout inside the running step stores its mask (else it is drawn again in backward)."""
    return state.masks == KEEP
