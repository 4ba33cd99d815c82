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


class Ambient:
    """What holds for the code that runs now, in one thread."""

    __slots__ = ("tape", "frame", "masks", "inner", "clear_task", "to_clear")

    def __init__(self) -> None:
        self.tape: Tape | None = None
        self.frame: Any = None  # the innermost step that is running
        self.masks: str = KEEP  # its decision for dropout masks
        self.inner: int = LIVE
        self.clear_task = -1  # the backward that `to_clear` belongs to
        self.to_clear: list[weakref.ref[Any]] = []


class _State(threading.local):
    """Thread-local names are dear to look up, so there is one: ``state.now``, read once and then asked."""

    def __init__(self) -> None:
        self.now = Ambient()


state = _State()


def is_replaying() -> bool:
    """True while a step is being re-run in backward: guard side effects with it (counters, metrics)."""
    frame = state.now.frame
    return frame is not None and frame.replaying


def product_wanted(packs: int) -> bool:
    """Whether anything after the next ``packs`` saved tensors is wanted.

    A custom autograd function packs what it saves after its kernel has run, an ATen operation before.  A function
    that saves exactly ``packs`` tensors, none of them its product, asks this before its kernel and may return an
    uninitialised product of the right shape when the answer is False: the replay ends before anyone reads it.
    """
    frame = state.now.frame
    return frame is None or frame.still_wanted(packs)


def masks_kept() -> bool:
    """Whether a dropout inside the running step stores its mask (else it is drawn again in backward)."""
    return state.now.masks == KEEP
