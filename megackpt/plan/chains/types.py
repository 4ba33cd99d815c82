"""Chains of stages, and plans for their backward as trees of two moves.

A chain runs stages 0 ... l-1; state i is the input of stage i, state l the chain's output.  Its backward needs, stage
by stage from the last to the first, what keeping everything inside the stage would have kept: the stage's *tape*.
A plan says how to come by the tapes, with two moves that cover the stages from left to right:

* **Keep** one stage: run it and keep its tape.
* **Drop** a segment: hold its input, run it without keeping anything, and when the backward comes to it run it again,
  following an inner plan.

A tree of these is a memory-persistent schedule in the sense of Beaumont et al. 2019: what is held stays held until its
backward.  Uniform groups, binomial schedules and the heterogeneous optimum are all such trees.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megackpt.plan.decision import Group

RAM = "ram"
DISK = "disk"
_TIERS = (RAM, DISK)


class InfeasibleBudget(ValueError):
    """No plan fits; ``least`` is the smallest budget that one fits, in the same unit."""

    def __init__(self, budget: float, least: float, unit: str = "bytes") -> None:
        super().__init__(f"no plan fits {budget:,} {unit}; the least feasible budget is {least:,} {unit}")
        self.budget = budget
        self.least = least


@dataclass(frozen=True)
class Stage:
    """Numbers of one stage.  Costs in any one unit, bytes in any one unit."""

    output_bytes: int
    tape_bytes: int  # what keeping everything inside it costs; includes the output
    forward_cost: float = 1.0
    backward_cost: float = 2.0
    spared_cost: float = 0.0  # part of the forward that a replay spares which ends at this stage's last saved tensor
    gradient_bytes: int = 0  # gradient of the output
    reads_output: bool = True  # its own backward reads the output; if not, that dies with the next stage's backward
    forward_transient: int = 0  # beyond input and output, while it runs without keeping anything
    tape_transient: int = 0  # beyond input and tape, while it runs and keeps its tape
    backward_transient: int = 0  # beyond tape and both gradients; negative where parts of the tape die early

    def __post_init__(self) -> None:
        if not 0 <= self.output_bytes <= self.tape_bytes:
            raise ValueError(f"a tape ({self.tape_bytes}) includes the output ({self.output_bytes})")
        if not 0 <= self.spared_cost <= self.forward_cost:
            raise ValueError(f"spared_cost {self.spared_cost} is not part of forward_cost {self.forward_cost}")

    @property
    def tail_bytes(self) -> int:
        """The tape when nobody but the stage's own backward needs the output."""
        return self.tape_bytes if self.reads_output else self.tape_bytes - self.output_bytes


@dataclass(frozen=True)
class Chain:
    """Stages in order, and the bytes of what the caller feeds the first one and holds throughout."""

    stages: tuple[Stage, ...]
    input_bytes: int = 0
    input_gradient_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("a chain has at least one stage")

    def __len__(self) -> int:
        return len(self.stages)

    @staticmethod
    def uniform(length: int, tape_bytes: int = 1, output_bytes: int = 1) -> Chain:
        """``length`` equal stages of unit cost; the input is as large as every output."""
        return Chain((Stage(output_bytes, tape_bytes),) * length, output_bytes)

    def state_bytes(self, state: int) -> int:
        return self.stages[state - 1].output_bytes if state else self.input_bytes

    def gradient_bytes(self, state: int) -> int:
        return self.stages[state - 1].gradient_bytes if state else self.input_gradient_bytes


@dataclass(frozen=True)
class Keep:
    """Run one stage and keep its tape."""


@dataclass(frozen=True)
class Drop:
    """Run ``length`` stages and keep none of them; ``inner`` says how their replay goes, ``tier`` where the segment's
    input waits for it."""

    length: int
    inner: tuple[Move, ...]
    tier: str = RAM

    def __post_init__(self) -> None:
        covered = sum(map(length_of, self.inner))
        if self.length < 1 or covered != self.length:
            raise ValueError(f"the inner plan of a dropped segment of {self.length} stages covers {covered}")
        if self.tier not in _TIERS:
            raise ValueError(f"tier {self.tier!r} is not one of {', '.join(_TIERS)}")


Move = Keep | Drop


def length_of(move: Move) -> int:
    return move.length if isinstance(move, Drop) else 1


class Row(NamedTuple):
    """One line of a plan written out from the outside in: ``drop`` lines are followed by their inner plan, one deeper;
    a ``keep`` line stands for a run of kept stages."""

    depth: int
    kind: str
    first: int
    last: int
    tier: str = RAM


@dataclass(frozen=True)
class ChainPlan:
    """A plan: moves that cover a chain from left to right.  Trees may be as deep as the chain is long, so everything
    here walks them with a stack of its own."""

    moves: tuple[Move, ...]

    def __len__(self) -> int:
        return sum(map(length_of, self.moves))

    @staticmethod
    def keep_all(length: int) -> ChainPlan:
        return ChainPlan((Keep(),) * length)

    def rows(self) -> Iterator[Row]:
        """The plan's lines; ``from_rows`` reads them back."""
        stack: list[tuple[Sequence[Move], int, int, int]] = [(self.moves, 0, 0, 0)]  # moves, next, stage, depth
        while stack:
            moves, place, stage, depth = stack.pop()
            if place == len(moves):
                continue
            move = moves[place]
            if isinstance(move, Drop):
                yield Row(depth, "drop", stage, stage + move.length - 1, move.tier)
                stack.append((moves, place + 1, stage + move.length, depth))
                stack.append((move.inner, 0, stage, depth + 1))
                continue
            end = place
            while end < len(moves) and isinstance(moves[end], Keep):
                end += 1
            yield Row(depth, "keep", stage, stage + end - place - 1)
            stack.append((moves, end, stage + end - place, depth))

    @staticmethod
    def from_rows(rows: Sequence[Row]) -> ChainPlan:
        """Raises ValueError if the lines are not a plan."""
        levels: list[list[Move]] = [[]]
        opened: list[Row] = []

        def close(depth: int) -> None:
            while len(opened) > depth:
                row, inner = opened.pop(), tuple(levels.pop())
                levels[-1].append(Drop(row.last - row.first + 1, inner, row.tier))

        stage = 0
        for row in rows:
            if row.depth > len(opened):
                raise ValueError(f"{row} is deeper than the segment it stands in")
            close(row.depth)
            if row.first != stage or row.last < row.first:
                raise ValueError(f"{row} does not go on where the line before it ended")
            if row.kind == "drop":
                opened.append(row)
                levels.append([])
            elif row.kind == "keep":
                levels[-1] += [Keep()] * (row.last - row.first + 1)
            else:
                raise ValueError(f"{row.kind!r} is neither 'keep' nor 'drop'")
            stage = row.first if row.kind == "drop" else row.last + 1
        close(0)
        return ChainPlan(tuple(levels[0]))

    def __str__(self) -> str:
        return "\n".join(map(_line, self.rows()))

    def to_groups(self, first_layer: int = 0, *, merged: bool = True) -> tuple[Group, ...]:
        """The engine's form, stage i being layer ``first_layer`` + i: a dropped segment becomes a group, kept stages
        stand outside groups.  ``merged``: a segment whose replay keeps everything is replayed as one step, which is
        cheapest; False lets the save-sets of its layers act in that replay."""
        levels: list[list[Group]] = [[]]
        opened: list[Row] = []

        def close(depth: int) -> None:
            while len(opened) > depth:
                row, inner = opened.pop(), tuple(levels.pop())
                group = Group(first_layer + row.first, first_layer + row.last, inner or (None if merged else ()))
                levels[-1].append(group)

        for row in self.rows():
            close(row.depth)
            if row.kind == "drop":
                if row.tier != RAM:
                    raise ValueError(f"stages {row.first} to {row.last}: groups hold their inputs in {RAM} only")
                opened.append(row)
                levels.append([])
        close(0)
        return tuple(levels[0])

    def to_json(self) -> dict[str, object]:
        """Flat, whatever the depth."""
        return {"version": 1, "rows": [list(row) for row in self.rows()]}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> ChainPlan:
        if data.get("version") != 1:
            raise ValueError(f"chain plan version {data.get('version')!r}; this code reads version 1")
        return ChainPlan.from_rows([Row(*row) for row in data["rows"]])

    def dumps(self) -> str:
        return json.dumps(self.to_json())


def _line(row: Row) -> str:
    place = f"{row.first}" if row.first == row.last else f"{row.first} to {row.last}"
    if row.kind == "keep":
        return f"{'  ' * row.depth}keep {place}"
    held = "" if row.tier == RAM else f" (input on {row.tier})"
    return f"{'  ' * row.depth}drop {place}{held}, in its replay:"
