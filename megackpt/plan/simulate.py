"""Runs action lists of all stages on paper: when everything happens, and how many bytes each stage holds.

One stage is one row: tensor-parallel ranks of a stage do the same at the same time, and data-parallel replicas
do not meet before the end of the step, so each is simulated once and stands for all.

An action starts when its stage has finished the one before and the message it needs has arrived; it ends its
``seconds`` later.  Sends cost their receiver ``transfer_seconds`` of delay and their sender nothing.  Bytes follow
from the order of a stage's list alone, never from the clock: while an action runs, a stage holds what it held plus
``extra_bytes``; afterwards what it held plus ``kept_bytes`` (negative for what frees activations).

The order of computation is found once per set of lists (`Order`), so that a planner that tries many costs on one
schedule pays only for the clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megackpt.plan.events import Event
from megackpt.plan.machine import ScheduleError
from megackpt.plan.schedule import Action, destination, source


@dataclass(frozen=True, slots=True)
class Cost:
    """What one action costs its stage."""

    seconds: float
    kept_bytes: int = 0  # change of what the stage holds, once the action is over
    extra_bytes: int = 0  # most bytes during the action above what the stage held before it
    ahead_seconds: float = 0.0  # of ``seconds``, what needs no message and may pass before it is there


Costs = Callable[[int, Action], Cost]
"""(stage, action) -> its cost."""

Speed = Callable[[int], float]
"""Of each stage while so many compute, relative to one alone."""


@dataclass(frozen=True)
class StageTimeline:
    """One stage's actions in their order, with the clock and the bytes of each."""

    actions: tuple[Action, ...]
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    peaks: tuple[int, ...]  # most bytes held during each action
    levels: tuple[int, ...]  # bytes held after each action
    before: int  # bytes held before the first one

    @property
    def busy_seconds(self) -> float:
        return sum(end - start for start, end in zip(self.starts, self.ends, strict=True))

    @property
    def peak_bytes(self) -> int:
        return max(self.before, *self.peaks)

    @property
    def peak_action(self) -> Action:
        """The first action during which the stage holds its peak."""
        return self.actions[self.peaks.index(max(self.peaks))]

    def curve(self) -> list[tuple[float, int]]:
        """(seconds, bytes) corners of the bytes held over time: the peak while an action runs, the level after."""
        points = [(0.0, self.before)]
        for start, end, peak, level in zip(self.starts, self.ends, self.peaks, self.levels, strict=True):
            points += [(start, peak), (end, level)]
        return points


@dataclass(frozen=True)
class Timeline:
    """All stages of one step, without data-parallel reduction and optimizer."""

    stages: tuple[StageTimeline, ...]
    chunks: int = 1
    received_bytes: int = field(default=0, compare=False)  # of one message between stages

    @property
    def step_seconds(self) -> float:
        return max(stage.ends[-1] for stage in self.stages)

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """By stage."""
        return tuple(stage.peak_bytes for stage in self.stages)

    @property
    def idle_seconds(self) -> tuple[float, ...]:
        """By stage: the part of the step in which it computes nothing."""
        return tuple(self.step_seconds - stage.busy_seconds for stage in self.stages)

    @property
    def bubble_share(self) -> float:
        """Idle time of all stages over their busy time: (p-1)/n for 1F1B on equal stages."""
        return sum(self.idle_seconds) / sum(stage.busy_seconds for stage in self.stages)

    def events(self) -> list[Event]:
        """What a real run would have written, sorted by time; the rank of an event is its stage."""
        p = len(self.stages)
        events = []
        for index, stage in enumerate(self.stages):
            free = 0.0  # when the stage had nothing left to do but wait
            for action, start, end, level in zip(stage.actions, stage.starts, stage.ends, stage.levels, strict=True):
                takes = source(action, index, p, self.chunks) is not None
                gives = destination(action, index, p, self.chunks) is not None
                events.append(
                    Event(
                        index, index, action.kind, action.micro_batch, action.chunk, free, end, start - free,
                        self.received_bytes * takes, self.received_bytes * gives, level,
                    )
                )  # fmt: skip
                free = end
        return sorted(events, key=lambda event: (event.end_s, event.rank))


class Order:
    """The lists of one step, sorted so that every action stands behind what it waits for.

    Raises ScheduleError when the stages wait for each other for ever.  (`plan.machine.check_schedule` also
    knows posted receives and unfinished sends, and refuses what only unlimited sending would let pass.)
    """

    def __init__(self, lists: Sequence[Sequence[Action]]) -> None:
        self.lists = tuple(tuple(actions) for actions in lists)
        self.stages = len(self.lists)
        self.chunks = 1 + max(action.chunk for actions in lists for action in actions)
        self._first = [0]
        for actions in self.lists:
            self._first.append(self._first[-1] + len(actions))
        self._needs = self._needed()
        self._sorted = self._sort()

    def __len__(self) -> int:
        return self._first[-1]

    def _needed(self) -> list[int]:
        """For every action, by its place in the concatenated lists, the place of the one whose message it takes;
        -1 if it takes none."""
        p = self.stages
        place = {
            (a.kind, a.micro_batch, a.chunk * p + stage): self._first[stage] + k
            for stage, actions in enumerate(self.lists)
            for k, a in enumerate(actions)
        }
        needs = []
        for stage, actions in enumerate(self.lists):
            for action in actions:
                piece = action.chunk * p + stage + {"F": -1, "B": 1, "W": p * self.chunks}[action.kind]
                if 0 <= piece < p * self.chunks:
                    needs.append(place.get((action.kind, action.micro_batch, piece), len(self)))
                else:
                    needs.append(-1)
        return needs

    def _sort(self) -> list[tuple[int, int]]:
        """(place, place it waits for) in an order in which they can be computed; every stage goes on as far as it
        can, and one that stopped goes on when what it waited for is done."""
        position = list(self._first[:-1])
        done = bytearray(len(self) + 1)  # the last one is an action that no list has
        waiting: dict[int, int] = {}
        result: list[tuple[int, int]] = []
        ready = list(range(self.stages))
        while ready:
            stage = ready.pop()
            while position[stage] < self._first[stage + 1]:
                place = position[stage]
                needed = self._needs[place]
                if needed >= 0 and not done[needed]:
                    waiting[needed] = stage
                    break
                result.append((place, needed))
                done[place] = 1
                position[stage] += 1
                if place in waiting:
                    ready.append(waiting.pop(place))
        if len(result) < len(self):
            stuck = [
                f"stage {stage} at {actions[position[stage] - self._first[stage]]}"
                for stage, actions in enumerate(self.lists)
                if position[stage] < self._first[stage + 1]
            ]
            raise ScheduleError("deadlock: " + ", ".join(stuck))
        return result

    def durations(self, seconds: Callable[[int, Action], float]) -> list[float]:
        """The durations of all actions in the form that `clock` takes."""
        return [seconds(stage, action) for stage, actions in enumerate(self.lists) for action in actions]

    def clock(
        self,
        durations: Sequence[float],
        transfer_seconds: float = 0.0,
        ahead: Sequence[float] | None = None,
        speed: Speed | None = None,
    ) -> list[float]:
        """When every action ends, by its place in the concatenated lists.  ``ahead``: the part of each duration that
        needs no message; ``speed``: see `shared`."""
        if speed is not None:
            return self.shared(durations, transfer_seconds, speed, ahead)[1]
        ends = [0.0] * len(self)
        before = frozenset(self._first[:-1])  # the first action of a stage has none before it
        if self.stages == 1:
            transfer_seconds = 0.0  # one chunk hands to the next on the same device
        for place, needed in self._sorted:
            start = 0.0 if place in before else ends[place - 1]
            early = ahead[place] if ahead is not None else 0.0
            if needed >= 0 and ends[needed] + transfer_seconds > start + early:
                start = ends[needed] + transfer_seconds - early
            ends[place] = start + durations[place]
        return ends

    def shared(
        self,
        durations: Sequence[float],
        transfer_seconds: float,
        speed: Speed,
        ahead: Sequence[float] | None = None,
    ) -> tuple[list[float], list[float]]:
        """When every action starts and ends where stages share processors: ``durations`` are those of a stage that
        runs alone, ``speed(k)`` what is left of that while k stages compute."""
        starts, ends = [math.nan] * len(self), [math.inf] * (len(self) + 1)
        position, left = list(self._first[:-1]), [0.0] * self.stages
        busy: dict[int, bool] = {}  # by stage: whether it does the whole of its action, or only what may go ahead
        arrives: dict[int, float] = {}  # by stage: when the message of its next action is there
        delay, now = transfer_seconds if self.stages > 1 else 0.0, 0.0
        while True:
            for stage in range(self.stages):
                place = position[stage]
                if stage in busy or place == self._first[stage + 1]:
                    continue
                needed, early = self._needs[place], 0.0 if ahead is None else ahead[place]
                arrives[stage] = ends[needed] + delay if needed >= 0 else now
                begun = not math.isnan(starts[place])
                if arrives[stage] <= now:
                    busy[stage], left[stage] = True, durations[place] - (early if begun else 0.0)
                elif early and not begun:
                    busy[stage], left[stage] = False, early
                if stage in busy and not begun:
                    starts[place] = now
            if not busy and all(t == math.inf for t in arrives.values()):
                return starts, ends[:-1]
            pace = speed(len(busy)) if busy else 1.0
            events = [now + left[stage] / pace for stage in busy]
            events += [t for stage, t in arrives.items() if stage not in busy and now < t < math.inf]
            then = min(events)
            for stage in sorted(busy):
                left[stage] -= (then - now) * pace
                if left[stage] <= 1e-12 * max(1.0, durations[position[stage]]) and busy.pop(stage):
                    ends[position[stage]] = then
                    position[stage] += 1
                    arrives[stage] = math.inf
            now = then

    def step_seconds(
        self,
        durations: Sequence[float],
        transfer_seconds: float = 0.0,
        ahead: Sequence[float] | None = None,
        speed: Speed | None = None,
    ) -> float:
        """When the last action ends."""
        return max(self.clock(durations, transfer_seconds, ahead, speed))

    def run(
        self,
        costs: Costs,
        transfer_seconds: float = 0.0,
        held_bytes: Sequence[int] | None = None,
        received_bytes: int = 0,
        speed: Speed | None = None,
    ) -> Timeline:
        """The timeline under ``costs``; ``held_bytes`` is what each stage holds before the step."""
        table = [[costs(stage, action) for action in actions] for stage, actions in enumerate(self.lists)]
        durations = [cost.seconds for row in table for cost in row]
        ahead = [cost.ahead_seconds for row in table for cost in row]
        if speed is None:
            ends = self.clock(durations, transfer_seconds, ahead)
            begins = [end - seconds for end, seconds in zip(ends, durations, strict=True)]
        else:
            begins, ends = self.shared(durations, transfer_seconds, speed, ahead)
        stages = []
        for stage, (actions, row) in enumerate(zip(self.lists, table, strict=True)):
            own = ends[self._first[stage] : self._first[stage + 1]]
            level = before = held_bytes[stage] if held_bytes else 0
            peaks, levels = [], []
            for cost in row:
                peaks.append(level + max(0, cost.extra_bytes, cost.kept_bytes))
                level += cost.kept_bytes
                levels.append(level)
            starts = tuple(begins[self._first[stage] : self._first[stage + 1]])
            stages.append(StageTimeline(actions, starts, tuple(own), tuple(peaks), tuple(levels), before))
        return Timeline(tuple(stages), self.chunks, received_bytes)


def simulate(
    lists: Sequence[Sequence[Action]],
    costs: Costs,
    transfer_seconds: float = 0.0,
    held_bytes: Sequence[int] | None = None,
    received_bytes: int = 0,
) -> Timeline:
    """The timeline of one step: ``lists`` by stage, what each action costs, seconds between the end of an action
    and the arrival of its message on another stage, bytes that each stage holds before the step.

    Raises ScheduleError when the lists deadlock.
    """
    return Order(lists).run(costs, transfer_seconds, held_bytes, received_bytes)
