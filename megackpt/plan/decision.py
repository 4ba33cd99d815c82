"""What is kept and what is rebuilt: decisions, save-sets, plans.  Frozen values, JSON in and out.

A plan is read from the outside in: stages hold chunks, a chunk holds one plan per slot of its micro-batches in flight
(usually one for all), a chunk plan one save-set per address (``embedding``, ``layers.0`` ..., ``head``) and groups of
layers that are replayed as one step; a save-set holds one decision per named step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

VERSION = 2  # of a plan in JSON

KEEP = "keep"
REPLAY = "replay"
OFFLOAD_HOST = "offload_host"
OFFLOAD_DISK = "offload_disk"
SHARD = "shard"

# Where a kept tensor may wait other than whole and on its device; the trainer hands the tape a tier of that name.
TIERS = (OFFLOAD_HOST, OFFLOAD_DISK, SHARD)
_CHOICES = {
    "output": (KEEP, REPLAY, *TIERS),
    "internals": (KEEP, REPLAY, OFFLOAD_HOST, OFFLOAD_DISK),
    "masks": (KEEP, REPLAY),
}


@dataclass(frozen=True)
class Decision:
    """What happens to one step's output, to what autograd saves inside it, and to its dropout masks.

    ``masks`` stands apart from ``internals`` because a mask can be drawn again from the random stream alone,
    without replaying its step: ``keep`` stores one byte per element, ``replay`` stores nothing.  ``shard`` keeps of
    an output that all tensor-parallel ranks hold whole only this rank's part, and gathers it when it is asked for.
    """

    output: str = KEEP
    internals: str = KEEP
    masks: str = KEEP

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(choices)}")

    @property
    def keeps_all(self) -> bool:
        return self.output == KEEP and self.internals == KEEP

    def to_json(self) -> dict[str, str]:
        return {"output": self.output, "internals": self.internals, "masks": self.masks}


def group_at(groups: Sequence[Group], layer: int) -> Group | None:
    """The group that starts at global layer ``layer``, if one does."""
    return next((g for g in groups if g.first == layer), None)


KEEP_ALL = Decision()
REPLAY_ALL = Decision(REPLAY, REPLAY, REPLAY)


@dataclass(frozen=True)
class SaveSet:
    """The decisions of one layer: explicit ones by step name, ``default`` for the rest."""

    decisions: Mapping[str, Decision] = field(default_factory=dict)
    default: Decision = KEEP_ALL

    def __getitem__(self, step: str) -> Decision:
        return self.decisions.get(step, self.default)

    def __hash__(self) -> int:
        return hash((tuple(sorted(self.decisions.items(), key=lambda kv: kv[0])), self.default))

    @property
    def keeps_all(self) -> bool:
        return self.default.keeps_all and all(d.keeps_all for d in self.decisions.values())

    def to_json(self) -> dict[str, object]:
        return {
            "default": self.default.to_json(),
            "decisions": {k: d.to_json() for k, d in sorted(self.decisions.items())},
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> SaveSet:
        return SaveSet({k: Decision(**d) for k, d in data["decisions"].items()}, Decision(**data["default"]))


@dataclass(frozen=True)
class Group:
    """Layers ``first`` to ``last`` (global indices, inclusive) replayed as one step from the group's input.

    ``inner`` None: the replay keeps everything of the group at once.  Otherwise the replay follows the plan again:
    the groups of ``inner`` (possibly none), and the layers' own save-sets.  Groups in groups are trees: binomial
    schedules, and whatever else a chain planner gives.  ``output``: the decision for what the group passes on.
    """

    first: int
    last: int
    inner: tuple[Group, ...] | None = None
    output: str = KEEP

    def __post_init__(self) -> None:
        if self.output not in _CHOICES["output"]:
            raise ValueError(f"output={self.output!r} of a group is not one of {', '.join(_CHOICES['output'])}")
        if not 0 <= self.first <= self.last:
            raise ValueError(f"a group runs from a first to a last layer, got {self.first} to {self.last}")
        for group in self.inner or ():
            if not self.first <= group.first <= group.last <= self.last:
                raise ValueError(f"group {group.first} to {group.last} is not inside {self.first} to {self.last}")


def groups_to_rows(groups: Sequence[Group]) -> list[list[object]]:
    """A forest of groups as rows of first, last, depth, merged (it has no inside) and output, each group before what is
    inside it: flat, whatever the depth."""
    rows: list[list[object]] = []
    waiting = [(group, 0) for group in reversed(groups)]
    while waiting:
        group, depth = waiting.pop()
        rows.append([group.first, group.last, depth, group.inner is None, group.output])
        waiting += [(inner, depth + 1) for inner in reversed(group.inner or ())]
    return rows


def groups_from_rows(rows: Sequence[Sequence[Any]]) -> tuple[Group, ...]:
    """The forest again.  Raises ValueError for a row that stands inside of none, or of a merged one, or is no row."""
    levels: list[list[Group]] = [[]]
    for row in reversed(rows):  # what is inside stands after, so it is made before
        first, last, depth, merged, output = row
        if [type(value) for value in row[:4]] != [int, int, int, bool] or not 0 <= depth <= len(rows):
            raise ValueError(f"{row!r} is not first, last, depth, merged and output of a group")
        while len(levels) <= depth + 1:
            levels.append([])
        inside = tuple(reversed(levels[depth + 1]))
        if merged and inside:
            raise ValueError(f"group {first} to {last} is merged and yet has groups inside")
        levels[depth + 1].clear()
        levels[depth].append(Group(first, last, None if merged else inside, output))
    if any(levels[1:]):
        raise ValueError("a group stands inside of none")
    return tuple(reversed(levels[0]))


@dataclass(frozen=True)
class ChunkPlan:
    """The save-sets of one chunk by address, and its groups of layers.

    ``ahead``: so many of its last layers are rebuilt while the gradient of the chunk's output is still on its way.  A
    group counts as one, and what comes before it is not rebuilt ahead.  ``ahead_within``: only by a backward at which
    at most so many forwards are in flight on the stage, its own included; 0: by every one.
    """

    save_sets: Mapping[str, SaveSet] = field(default_factory=dict)
    groups: tuple[Group, ...] = ()
    ahead: int = 0
    ahead_within: int = 0

    def __post_init__(self) -> None:
        for name, what in (("ahead", "layers"), ("ahead_within", "forwards in flight")):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ValueError(f"{name}={value!r} is not a number of {what}")

    def goes_ahead(self, in_flight: int) -> bool:
        """Whether a backward rebuilds anything ahead while so many forwards are in flight."""
        return self.ahead > 0 and (not self.ahead_within or in_flight <= self.ahead_within)

    def units_ahead(self, layers: range) -> list[range]:
        """Layers and groups that are rebuilt ahead, the last one first."""
        units: list[range] = []
        stop = layers.stop
        while len(units) < self.ahead and stop > layers.start:
            group = next((g for g in self.groups if g.first <= stop - 1 <= g.last), None)
            units.append(range(stop - 1, stop) if group is None else range(group.first, stop))
            stop = units[-1].start
            if group is not None:
                break
        return units

    def save_set(self, address: str) -> SaveSet:
        return self.save_sets.get(address, KEEP_EVERYTHING)

    def choices(self) -> set[str]:
        """Every choice that occurs, so that a run knows which tiers it needs."""
        decisions = [d for s in self.save_sets.values() for d in (s.default, *s.decisions.values())]
        found = {c for d in decisions for c in (d.output, d.internals)}
        return found | {str(output) for *_, output in groups_to_rows(self.groups)}

    def on_device(self) -> ChunkPlan:
        """The same with nothing in host memory."""

        def home(decision: Decision) -> Decision:
            output, internals = (KEEP if p == OFFLOAD_HOST else p for p in (decision.output, decision.internals))
            return Decision(output, internals, decision.masks)

        sets = {
            address: SaveSet({name: home(d) for name, d in sets.decisions.items()}, home(sets.default))
            for address, sets in self.save_sets.items()
        }
        return replace(self, save_sets=sets)

    @cached_property
    def keeps_all(self) -> bool:
        return not self.groups and all(s.keeps_all for s in self.save_sets.values())


KEEP_EVERYTHING = SaveSet()


Slots = tuple[ChunkPlan, ...]
"""Chunk plans of the slots of one chunk, see `plan.slots`; a slot beyond the last has the last one's."""


@dataclass(frozen=True)
class Plan:
    """Chunk plans by [stage][chunk].  ``name`` says in words where it came from.

    ``further``: where micro-batches in flight are treated differently, the chunk plans of slots 1, 2 ... by
    [stage][chunk]; slot 0 has the one in ``stages``.  Empty: all slots are alike.
    """

    stages: tuple[tuple[ChunkPlan, ...], ...]
    name: str = ""
    further: tuple[tuple[Slots, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.further and [len(stage) for stage in self.further] != [len(stage) for stage in self.stages]:
            raise ValueError("the plans of further slots belong to other stages and chunks")
        if not any(any(stage) for stage in self.further):
            object.__setattr__(self, "further", ())

    @staticmethod
    def of_slots(stages: Sequence[Sequence[Slots]], name: str = "") -> Plan:
        """From the chunk plans of all slots by [stage][chunk], at least one each."""
        first = tuple(tuple(slots[0] for slots in stage) for stage in stages)
        return Plan(first, name, tuple(tuple(slots[1:] for slots in stage) for stage in stages))

    def slots(self, stage: int, chunk: int = 0) -> Slots:
        """The chunk plans of all slots that differ, slot 0 first."""
        first = self.stages[stage][chunk]
        return (first, *self.further[stage][chunk]) if self.further else (first,)

    def chunk(self, stage: int, chunk: int = 0, slot: int = 0) -> ChunkPlan:
        slots = self.slots(stage, chunk)
        return slots[min(slot, len(slots) - 1)]

    def to_json(self) -> dict[str, object]:
        sets: list[SaveSet] = []
        places: dict[SaveSet, int] = {}

        def entry(chunk: ChunkPlan) -> dict[str, object]:
            named = {}
            for address, save_set in chunk.save_sets.items():
                if save_set not in places:
                    places[save_set] = len(sets)
                    sets.append(save_set)
                named[address] = places[save_set]
            made: dict[str, object] = {"save_sets": named, "groups": groups_to_rows(chunk.groups)}
            made |= {"ahead": chunk.ahead} if chunk.ahead else {}
            return made | ({"ahead_within": chunk.ahead_within} if chunk.ahead_within else {})

        stages = [
            [[entry(plan) for plan in self.slots(stage, chunk)] for chunk in range(len(chunks))]
            for stage, chunks in enumerate(self.stages)
        ]
        return {"version": VERSION, "name": self.name, "sets": [s.to_json() for s in sets], "stages": stages}

    @staticmethod
    def from_json(data: Any) -> Plan:
        """What `to_json` made.  Raises ValueError for anything else."""
        if not isinstance(data, Mapping):
            raise ValueError(f"a plan is an object, this is a {type(data).__name__}")
        if data.get("version") != VERSION:
            raise ValueError(f"plan version {data.get('version')!r}; this code reads version {VERSION}")
        try:
            return Plan._of(data)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error

    @staticmethod
    def _of(data: Mapping[str, Any]) -> Plan:
        sets = [SaveSet.from_json(s) for s in data["sets"]]
        numbered = dict(enumerate(sets))

        def chunk(entry: Mapping[str, Any]) -> ChunkPlan:
            places = {address: numbered[i] for address, i in entry["save_sets"].items()}
            ahead = entry.get("ahead", 0), entry.get("ahead_within", 0)
            return ChunkPlan(places, groups_from_rows(entry["groups"]), *ahead)

        stages = [[tuple(chunk(slot) for slot in slots) for slots in stage] for stage in data["stages"]]
        if not all(stages) or not all(slots for stage in stages for slots in stage):
            raise ValueError("a stage without a chunk, or a chunk without a slot")
        return Plan.of_slots(stages, str(data["name"]))

    def dumps(self) -> str:
        return json.dumps(self.to_json(), indent=1, sort_keys=True)

    def digest(self) -> str:
        """Equal on all ranks or the run must not start: ranks of one tensor-parallel group with different plans
        would call different collectives and wait for each other for ever."""
        return hashlib.sha256(self.dumps().encode()).hexdigest()
