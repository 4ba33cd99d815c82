"""A branch of named steps, ``x -> step -> step ... -> y``, and how a plan cuts it.

Neighbours that are dropped whole replay together whenever one of them is asked for: each reads what the one before
made, and a backward walks them from the end.  So they become one step of the engine, a :class:`Span`: one record, one
pair of hooks and one look at the random state for all.  What is kept, what is replayed and in which order stay the
same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from megackpt.plan import REPLAY, Decision, SaveSet
from megackpt.recompute.call import TwoPhase
from megackpt.recompute.context import state

Named = tuple[str, Callable[..., Tensor]]


@dataclass(frozen=True)
class Cut:
    """Steps ``start`` to before ``stop`` of a branch, which share a decision; ``joined``: what joins it is among
    them."""

    start: int
    stop: int
    decision: Decision
    wheres: tuple[str, ...]  # address and name of each, and of the join if it is among them
    merged: bool
    joined: bool
    plain: bool  # the whole branch, joint included, is kept
    communicates: bool


def cuts_of(steps: Sequence[Named], join: str, save_set: SaveSet, address: str) -> tuple[Cut, ...]:
    """The fewest pieces whose steps share a decision: dropped whole, or kept whole.  Others stay alone, and so does a
    dropped step of two phases that begins or ends a piece, as it can be asked ahead only by itself."""
    cuts: list[Cut] = []
    start = 0
    while start < len(steps):
        decision = save_set[steps[start][0]]
        dropped = decision.output == decision.internals == REPLAY and not isinstance(steps[start][1], TwoPhase)
        stop = start + 1
        if decision.keeps_all or dropped:
            while stop < len(steps) and save_set[steps[stop][0]] == decision:
                stop += 1
            if dropped and stop - start > 1 and isinstance(steps[stop - 1][1], TwoPhase):
                stop -= 1
        joined = dropped and stop - start == len(steps) and save_set[join] == decision
        names = [name for name, _ in steps[start:stop]] + ([join] if joined else [])
        wheres = tuple(f"{address} {name}" if address else name for name in names)
        plain = decision.keeps_all and stop - start == len(steps) and save_set[join] == decision
        talks = any(isinstance(fn, TwoPhase) for _, fn in steps[start:stop])
        cuts.append(Cut(start, stop, decision, wheres, dropped and len(wheres) > 1, joined, plain, talks))
        start = stop
    return tuple(cuts)


class Span:
    """The function of a merged cut."""

    __slots__ = ("steps", "wheres", "join", "pure", "communicates")

    def __init__(self, steps: Sequence[Named], cut: Cut, join: Callable[..., Tensor] | None, pure: bool) -> None:
        self.steps, self.wheres, self.join = steps, cut.wheres, join
        self.pure = pure  # no running statistics inside
        # A collective moves the version of what it fills, but not under a dispatch mode: see refill.py.
        self.communicates = cut.communicates

    def functions(self) -> list[Callable[..., Tensor]]:
        return [fn for _, fn in self.steps] + ([] if self.join is None else [self.join])

    def __call__(self, x: Tensor) -> Tensor:
        frame, y = state.now.frame, x
        for where, (_, fn) in zip(self.wheres, self.steps, strict=False):
            frame.enter(where, y)  # what is saved, and what fails, is this step's
            y = fn(y)
        if self.join is None:
            return y
        frame.enter(self.wheres[-1], None)
        return self.join(x, y)

    def before(self, stop: str, x: Tensor) -> Tensor:
        """Run the steps before ``stop``: what it is given."""
        frame, y = state.now.frame, x
        for where, (_, fn) in zip(self.wheres, self.steps, strict=False):
            if where == stop:
                break
            frame.enter(where, y)
            y = fn(y)
        return y


class Tail(NamedTuple):
    """The last step of a span that saves an internal, where all that it saves so is what it is given: a product.  Its
    replay needs no call of it."""

    where: str
    start: int  # tensors saved before it
    numbers: list[int]  # of the internals it saves
