"""An abstract machine for schedules: it knows messages, order and nothing of how a schedule was made.

It runs one list of actions per stage with the executor's rules of exchange:

* a stage posts ONE receive ahead per channel: the next one, as soon as the last one was taken (the executor waits until
  the message can exist, see `needed_before`: before that nobody could make use of it);
* a message leaves its sender when the receiver has posted for it (rendezvous, as gloo does it);
* a stage starts to compute only when its messages have left; with `overlap` the one of the action just before may
  still be leaving.

A channel is one direction (F or B) between two stages and delivers in order. What passes here cannot deadlock
there.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megackpt.plan.schedule import Action, destination, source

Lists = Sequence[Sequence[Action]]


class ScheduleError(ValueError):
    """The lists are no schedule: an action is missing, doubled, out of order, or the stages wait for each
    other.
    """


@dataclass
class _Channel:
    sent: list[Action] = field(default_factory=list)  # named as the receiver will call them
    ready: list[int] = field(default_factory=list)  # slot in which each one exists
    taken: int = 0
    sent_at: int = -1  # place of the sender's action that made the last message

    def clogged(self, last_may_wait: bool) -> bool:
        """A message that must have left by now still lacks a posted receive."""
        return len(self.sent) - 1 - last_may_wait > self.taken


@dataclass
class _Stage:
    actions: Sequence[Action]
    position: int = 0
    received: bool = False
    clock: int = 0
    held: int = 0
    peak: int = 0
    slots: dict[int, Action] = field(default_factory=dict)


def check_schedule(lists: Lists, overlap: bool = False) -> list[int]:
    """Run the lists (one per stage); return for each stage the most (micro-batch, chunk) pairs held at once.

    A pair is held from its forward to the end of its backward, or of its W where there is one. Lists without
    any backward are forward-only: nothing is held. Raises ScheduleError on missing or doubled actions, on a
    backward before its forward, on messages taken in another order than sent, and on deadlock (naming who
    waits for what).
    """
    return [stage.peak for stage in _run(lists, overlap)]


def needed_before(lists: Lists, stage: int) -> dict[Action, int]:
    """For each action of `stage` that takes a message: how many actions of `stage` must be over before that message can
    be made, by the order of all lists. A message that no list makes needs none.
    """
    return needs_of(lists, [stage])[0]


def needs_of(lists: Lists, stages: Sequence[int] | None = None) -> list[dict[Action, int]]:
    """`needed_before` for several stages at once (None: for all), in one walk through the lists."""
    wanted = range(len(lists)) if stages is None else stages
    chunks = 1 + max(action.chunk for actions in lists for action in actions)
    column = {stage: place for place, stage in enumerate(wanted)}
    needs: list[dict[Action, int]] = [dict[Action, int]() for _ in wanted]
    over = [np.zeros(len(column), dtype=np.int64) for _ in lists]  # of the wanted stages, before a stage's last action
    clocks: list[dict[Action, np.ndarray]] = [{} for _ in lists]
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(lists):
            for action in itertools.islice(actions, len(clocks[stage]), None):
                origin = source(action, stage, len(lists), chunks)
                if origin is not None:
                    made = clocks[origin[0]].get(origin[1])
                    if made is None:
                        break
                    if stage in column:
                        needs[column[stage]][action] = int(made[column[stage]])
                    over[stage] = np.maximum(over[stage], made)
                if stage in column:
                    over[stage] = over[stage].copy()
                    over[stage][column[stage]] += 1
                clocks[stage][action] = over[stage]
                moved = True
    for stage, place in column.items():  # what no list makes
        for action in lists[stage]:
            if source(action, stage, len(lists), chunks) is not None:
                needs[place].setdefault(action, 0)
    return needs


def clock_table(lists: Lists) -> str:
    """The schedule as an ASCII clock table, every action one column wide; chunk numbers appear only if there
    are two.
    """
    stages = _run(lists, False)
    chunked = any(action.chunk for actions in lists for action in actions)
    texts = [{t: str(a) if chunked else str(a).split(".")[0] for t, a in stage.slots.items()} for stage in stages]
    width = 1 + max(len(text) for row in texts for text in row.values())
    lines = []
    for index, row in enumerate(texts):
        cells = "".join(row.get(t, ".").rjust(width) for t in range(max(row) + 1))
        lines.append(f"stage {index} |{cells}")
    return "\n".join(lines)


def _run(lists: Lists, overlap: bool) -> list[_Stage]:
    _check_complete(lists)
    machine = _Machine(lists, overlap)
    machine.run()
    return machine.stages


class _Machine:
    def __init__(self, lists: Lists, overlap: bool) -> None:
        self.chunks = 1 + max(action.chunk for actions in lists for action in actions)
        self.stages = [_Stage(actions) for actions in lists]
        self.channels: dict[tuple[str, int, int], _Channel] = defaultdict(_Channel)
        self.overlap = overlap

    def run(self) -> None:
        """Let every stage go on as far as it can, in turn, until none can."""
        while any(self._advance(index) for index in range(len(self.stages))):
            pass
        if any(stage.position < len(stage.actions) for stage in self.stages):
            raise ScheduleError("deadlock: " + "; ".join(map(self._waiting, range(len(self.stages)))))

    def _advance(self, index: int) -> bool:
        """Half-steps of one stage, a message taken or an action computed; False if it could do none."""
        stage, moved = self.stages[index], False
        while stage.position < len(stage.actions):
            action = stage.actions[stage.position]
            if not (self._compute(index, action) if stage.received else self._receive(index, action)):
                break
            moved = True
        return moved

    def _receive(self, index: int, action: Action) -> bool:
        stage, origin = self.stages[index], source(action, index, len(self.stages), self.chunks)
        if origin is not None:
            channel = self.channels[action.kind, origin[0], index]
            if channel.taken == len(channel.sent):
                return False
            message = channel.sent[channel.taken]
            if message != action:
                raise ScheduleError(f"stage {index} at {action}: the next message on its channel is for {message}")
            stage.clock = max(stage.clock, channel.ready[channel.taken])
            channel.taken += 1
        stage.received = True
        return True

    def _compute(self, index: int, action: Action) -> bool:
        stage, target = self.stages[index], destination(action, index, len(self.stages), self.chunks)
        outgoing = [channel for (_, a, b), channel in self.channels.items() if a == index != b]
        if any(c.clogged(self.overlap and c.sent_at == stage.position - 1) for c in outgoing):
            return False
        stage.slots[stage.clock] = action
        stage.clock += 1
        stage.position += 1
        stage.received = False
        _hold(stage, action)
        if target is not None:
            channel = self.channels[action.kind, index, target[0]]
            channel.sent_at = stage.position - 1
            channel.sent.append(target[1])
            channel.ready.append(stage.clock)
        return True

    def _waiting(self, index: int) -> str:
        stage = self.stages[index]
        if stage.position == len(stage.actions):
            return f"stage {index} is done"
        action = stage.actions[stage.position]
        origin = source(action, index, len(self.stages), self.chunks)
        if not stage.received and origin is not None:
            return f"stage {index} at {action} waits for a message of stage {origin[0]}"
        return f"stage {index} at {action} waits until its last message is taken"


def _hold(stage: _Stage, action: Action) -> None:
    """Count what is held; forward-only lists hold nothing, and a split backward releases at its W."""
    kinds = {a.kind for a in stage.actions}
    if action.kind == "F" and "B" in kinds:
        stage.held += 1
        stage.peak = max(stage.peak, stage.held)
    elif action.kind == ("W" if "W" in kinds else "B"):
        stage.held -= 1


def _check_complete(lists: Lists) -> None:
    """Every stage has the same actions, each once, and in an order of its own that is possible."""
    wanted = {action for actions in lists for action in actions}
    if not wanted:
        raise ScheduleError("the schedule is empty")
    micro_batches = range(1 + max(action.micro_batch for action in wanted))
    chunks = range(1 + max(action.chunk for action in wanted))
    kinds = {action.kind for action in wanted} | {"F"}
    if "W" in kinds:
        kinds.add("B")
    wanted = {Action(kind, m, c) for kind in kinds for m in micro_batches for c in chunks}
    for index, actions in enumerate(lists):
        doubled = [action for action, count in Counter(actions).items() if count > 1]
        if doubled:
            raise ScheduleError(f"stage {index} has {doubled[0]} more than once")
        missing = sorted(wanted - set(actions))
        if missing:
            raise ScheduleError(f"stage {index} lacks {missing[0]} ({len(missing)} missing)")
        place = {action: k for k, action in enumerate(actions)}
        for action, k in place.items():
            before = {"B": "F", "W": "B"}.get(action.kind)
            if before and place[Action(before, action.micro_batch, action.chunk)] > k:
                raise ScheduleError(f"stage {index} has {action} before its {before}")
