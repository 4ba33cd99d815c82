"""Pipeline schedules as data: for each stage a list of actions that one can read aloud and parse back.

An action is one entry of a stage's list: ``F3.1`` is the forward of micro-batch 3 on chunk 1, ``B3.1`` its
backward, ``W3.1`` the weight half of a backward that was split in two (then ``B`` is the input half only).
The lists say *what* and *in which order*; messages follow from them (`source`), time does not appear.

All generators have one signature, ``(stages, stage, micro_batches) -> list[Action]`` (`interleaved` also takes
the number of chunks), and run the micro-batches of every kind and chunk in ascending order, so that gradients
are summed in one order whatever the schedule.  `schedule_lists` makes the lists of all stages by name.

Letters in the tables: p stages, n micro-batches; one column is one unit of time, a forward and a backward
each take one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

KINDS = ("F", "B", "W")
_PATTERN = re.compile(r"([FBW])(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One entry of a schedule: `kind` (F forward, B backward, W weight gradients) of a micro-batch on a
    chunk.
    """

    kind: str
    micro_batch: int
    chunk: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"action kind {self.kind!r} is none of {', '.join(KINDS)}")
        if self.micro_batch < 0 or self.chunk < 0:
            raise ValueError(f"micro-batch {self.micro_batch} and chunk {self.chunk} must not be negative")

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}.{self.chunk}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """``"F3.1"`` -> ``Action("F", 3, 1)``. Raises ValueError on anything else."""
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is not an action; one looks like F3.1 (kind F, B or W, micro-batch, chunk)")
        return cls(match[1], int(match[2]), int(match[3]))


Generator = Callable[[int, int, int], list[Action]]


def format_actions(actions: list[Action]) -> str:
    """``F0.0 F1.0 B0.0 B1.0``; `parse_actions` reads it back."""
    return " ".join(str(action) for action in actions)


def parse_actions(text: str) -> list[Action]:
    """The list that `format_actions` wrote. Raises ValueError, naming the word that is no action."""
    return [Action.parse(word) for word in text.split()]


def gpipe(stages: int, stage: int, micro_batches: int) -> list[Action]:
    """All forwards, then all backwards: the reference. Every stage holds all n micro-batches (Huang et al.
    2019).

    p = 3, n = 4::

        stage 0 | F0 F1 F2 F3  .  .  .  . B0 B1 B2 B3
        stage 1 |  . F0 F1 F2 F3  .  . B0 B1 B2 B3
        stage 2 |  .  . F0 F1 F2 F3 B0 B1 B2 B3
    """
    _check(stages, stage, micro_batches)
    return [Action(kind, m) for kind in ("F", "B") for m in range(micro_batches)]


def one_f_one_b(stages: int, stage: int, micro_batches: int) -> list[Action]:
    """1F1B: stage i runs p-1-i forwards, then alternates, then drains. It holds at most min(p-i, n)
    micro-batches.

    p = 3, n = 4::

        stage 0 | F0 F1 F2  .  . B0 F3 B1  . B2  . B3
        stage 1 |  . F0 F1  . B0 F2 B1 F3 B2  . B3
        stage 2 |  .  . F0 B0 F1 B1 F2 B2 F3 B3

    With n < p the warm-up is cut at n, and the stage goes straight from warm-up to draining.
    Source: PipeDream-flush (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training", fig. 4).
    """
    _check(stages, stage, micro_batches)
    warm_up = min(stages - 1 - stage, micro_batches)
    actions = [Action("F", m) for m in range(warm_up)]
    for m in range(micro_batches - warm_up):
        actions += [Action("F", warm_up + m), Action("B", m)]
    return actions + [Action("B", m) for m in range(micro_batches - warm_up, micro_batches)]


def interleaved(stages: int, stage: int, micro_batches: int, chunks: int = 1) -> list[Action]:
    """Interleaved 1F1B: v chunks per stage shrink the bubble to (p-1)/(n v) for more activations in flight.

    p = 2, n = 4, v = 2 (chunk behind the point)::

        stage 0 | F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0    . B2.1    . B3.1 B2.0 B3.0
        stage 1 |    . F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 F3.1 B3.1 B2.0 B3.0

    Micro-batches go round the chunks in groups of p; stage r warms up 2(p-r-1) + (v-1)p forwards and holds one
    (micro-batch, chunk) pair more, at most n v. When p does not divide n the lists are those of the next multiple
    of p without the micro-batches that do not exist: that cannot deadlock where the full lists do not, and holds
    at most as much. (Alternating strictly with a last group of n mod p deadlocks, for instance p=4, v=3, n=5.)
    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training", fig. 4 below.
    """
    _check(stages, stage, micro_batches)
    if chunks < 1:
        raise ValueError(f"a stage needs at least 1 chunk, got {chunks}")
    if chunks == 1:
        return one_f_one_b(stages, stage, micro_batches)
    padded = -(-micro_batches // stages) * stages
    groups = [range(first, first + stages) for first in range(0, padded, stages)]
    order = [(m, c) for group in groups for c in range(chunks) for m in group]
    forwards = [Action("F", m, c) for m, c in order]
    backwards = [Action("B", m, chunks - 1 - c) for m, c in order]
    warm_up = min(2 * (stages - stage - 1) + (chunks - 1) * stages, len(order))
    actions = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        actions += [forward, backward]
    actions += backwards[len(order) - warm_up :]
    return [action for action in actions if action.micro_batch < micro_batches]


def zero_bubble(stages: int, stage: int, micro_batches: int) -> list[Action]:
    """ZB-H1: 1F1B whose backward is split; stage i puts its weight gradients off by i micro-batches, so that they
    fill the bubble at the end.

    p = 3, n = 4::

        stage 0 | F0 F1 F2  .  . B0 W0 F3 B1 W1 B2 W2 B3 W3
        stage 1 |  . F0 F1  . B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
        stage 2 |  .  . F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

    Every stage holds at most min(p, n) micro-batches, what 1F1B holds on its first one. With F = B = W the bubble
    is a third of 1F1B's, (p-1)(F + B - W). Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", 2.2.
    """
    _check(stages, stage, micro_batches)
    warm_up = min(stages - 1 - stage, micro_batches)
    actions = [Action("F", m) for m in range(warm_up)]
    for m in range(micro_batches):
        if warm_up + m < micro_batches:
            actions.append(Action("F", warm_up + m))
        actions.append(Action("B", m))
        if m >= stage:
            actions.append(Action("W", m - stage))
    return actions + [Action("W", m) for m in range(max(0, micro_batches - stage), micro_batches)]


SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1")


def schedule_lists(name: str, stages: int, micro_batches: int, chunks: int = 1) -> list[list[Action]]:
    """The lists of all stages. ``1f1b`` with more than one chunk is interleaved.

    Raises ValueError on a name that is none of `SCHEDULES`, and on chunks that the schedule does not have.
    """
    make = generator(name, chunks)
    return [make(stages, stage, micro_batches) for stage in range(stages)]


def generator(name: str, chunks: int = 1) -> Generator:
    """The generator of that name. Raises as `schedule_lists`."""
    if name not in SCHEDULES:
        raise ValueError(f"schedule {name!r} is none of {', '.join(SCHEDULES)}")
    if name in ("1f1b", "interleaved"):
        return partial(interleaved, chunks=chunks)
    if chunks != 1:
        raise ValueError(f"schedule {name} has one chunk per stage, got {chunks}; only interleaved 1f1b has more")
    return gpipe if name == "gpipe" else zero_bubble


def forward_part(actions: list[Action]) -> list[Action]:
    """The forwards of a list, in its order: what evaluation runs."""
    return [action for action in actions if action.kind == "F"]


def in_flight(stages: int, stage: int, micro_batches: int) -> int:
    """Most micro-batches whose activations a stage holds at once under 1F1B: min(p - i, n)."""
    _check(stages, stage, micro_batches)
    return min(stages - stage, micro_batches)


def most_in_flight(name: str, stages: int, stage: int, micro_batches: int, chunks: int = 1) -> int:
    """Most (micro-batch, chunk) pairs a stage holds at once, for the schedule of that name.

    Exact, but for interleaved lists with n no multiple of p, which hold at most this.
    """
    _check(stages, stage, micro_batches)
    if name == "gpipe":
        return micro_batches
    if name == "zb-h1":
        return min(stages, micro_batches)
    if chunks == 1:
        return in_flight(stages, stage, micro_batches)
    return min(2 * (stages - stage - 1) + (chunks - 1) * stages + 1, micro_batches * chunks)


def source(action: Action, stage: int, stages: int, chunks: int = 1) -> tuple[int, Action] | None:
    """Which stage's action must send its result before `action` can run on `stage`; None if none must.

    Chunk c of stage i is piece c*p + i of the model: a forward comes from the piece before, a backward from
    the piece after. The ends wrap around: chunk c of the last stage feeds chunk c+1 of stage 0.
    """
    return _beside(action, stage, stages, chunks, -1)


def destination(action: Action, stage: int, stages: int, chunks: int = 1) -> tuple[int, Action] | None:
    """Which stage's action waits for the result of `action` on `stage`: the inverse of `source`."""
    return _beside(action, stage, stages, chunks, 1)


def _beside(action: Action, stage: int, stages: int, chunks: int, step: int) -> tuple[int, Action] | None:
    if action.kind == "W":
        return None
    piece = action.chunk * stages + stage + (step if action.kind == "F" else -step)
    if not 0 <= piece < stages * chunks:
        return None
    return piece % stages, Action(action.kind, action.micro_batch, piece // stages)


def _check(stages: int, stage: int, micro_batches: int) -> None:
    if stages < 1 or not 0 <= stage < stages:
        raise ValueError(f"stage {stage} does not exist among {stages} pipeline stages")
    if micro_batches < 1:
        raise ValueError(f"a schedule needs at least 1 micro-batch, got {micro_batches}")
