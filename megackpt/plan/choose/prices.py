"""What one layer's save-sets cost, from a table of seconds and bytes per step.

A planner asks three things of a save-set: the bytes it keeps from forward to backward, the bytes it rebuilds and
holds at once while the layer's backward runs, and the seconds its replay adds.  Anything that answers
(`LayerPricing`) can be planned; `StepPrices` answers from one row per step of `plan.steps`.

Replay is priced from the nearest kept ancestor (`plan.demand`): consumers are never replayed, since nothing that
is saved depends on them.  Gathers are special.  The gathered input of a product is needed by its weight gradient
anyway, so a layer's own backward gathers again and that time is in ``backward_seconds``.  With ``shared_gathers``
(our engine) the replay of the product uses that same tensor; without (Megatron) it gathers once more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from megackpt.plan.decision import KEEP, SaveSet
from megackpt.plan.demand import present_steps, replayed_steps
from megackpt.plan.steps import BLOCK, GATHERS, Step

PICO = 10**12


def picoseconds(seconds: float) -> int:
    """Whole picoseconds: sums of them do not depend on their order."""
    return round(seconds * PICO)


def replay_seconds(
    steps: Iterable[Step], seconds: Mapping[str, float], names: Collection[str], shared_gathers: bool
) -> float:
    """Seconds that replaying the steps ``names`` adds to a layer's backward, which gathers again by itself."""
    total = sum(seconds[name] for name in names if name not in GATHERS)
    for step in steps:
        for gather in sorted(set(step.reads) & set(GATHERS)):
            if gather not in names:
                total -= seconds[gather]  # kept: not even the weight gradient gathers
            elif step.name in names and not shared_gathers:
                total += seconds[gather]
    return total


class LayerPricing(Protocol):
    """Prices of one transformer layer and micro-batch on one rank."""

    @property
    def forward_seconds(self) -> float: ...

    @property
    def backward_seconds(self) -> float:
        """Of a layer that keeps everything but the gathered tensors."""

    @property
    def weight_seconds(self) -> float:
        """The part of ``backward_seconds`` that makes weight gradients (what a split backward puts off)."""

    @property
    def absent(self) -> tuple[str, ...]:
        """Names of the block's steps that this layer does not have."""

    def kept_bytes(self, save_set: SaveSet) -> int: ...

    def transient_bytes(self, save_set: SaveSet) -> int:
        """Most bytes the layer's backward holds above what was kept."""

    def forward_transient_bytes(self) -> int:
        """Most bytes the layer's forward holds above what it keeps in the end."""

    def replay_seconds(self, save_set: SaveSet) -> float: ...

    def group(self, layers: int) -> tuple[int, int, float]:
        """(bytes kept, bytes rebuilt at once, seconds) of ``layers`` layers replayed as one from their input."""


@dataclass(frozen=True)
class StepPrice:
    """One step's forward on one rank."""

    seconds: float
    output_bytes: int = 0
    internal_bytes: int = 0


@dataclass(frozen=True)
class StepPrices:
    """A layer's prices from those of its steps; steps that are not in the table do not exist."""

    steps: Mapping[str, StepPrice]
    input_bytes: int
    backward_seconds: float
    weight_seconds: float = 0.0
    mask_bytes: int = 0  # kept by every save-set that keeps more than the layer input
    shared_gathers: bool = True
    held: frozenset[str] = frozenset()  # steps whose output is one of their internals, and counted among those
    absent: tuple[str, ...] = field(init=False)
    _present: tuple[Step, ...] = field(init=False, repr=False, compare=False, default=())
    _cache: dict[SaveSet, tuple[str, ...]] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "absent", tuple(s.name for s in BLOCK if s.name not in self.steps))
        object.__setattr__(self, "_present", present_steps(BLOCK, self.absent))

    @property
    def forward_seconds(self) -> float:
        return sum(price.seconds for price in self.steps.values())

    def replayed(self, save_set: SaveSet) -> tuple[str, ...]:
        if save_set not in self._cache:
            self._cache[save_set] = replayed_steps(save_set, self.absent, self.held)
        return self._cache[save_set]

    def kept_bytes(self, save_set: SaveSet) -> int:
        """The layer input, and of every step what its decision keeps.  An output counts only where somebody wants
        it: a reader that saves what it reads, or one that is replayed."""
        names = self.replayed(save_set)
        kept = 0
        for step in self._present:
            price, decision = self.steps[step.name], save_set[step.name]
            wanted = any(
                step.name in reader.reads and (reader.saves_input or reader.name in names) for reader in self._present
            )
            inside = step.name in self.held and decision.internals == KEEP
            if decision.output == KEEP and wanted and not inside:
                kept += price.output_bytes
            if decision.internals == KEEP and step.has_internals:
                kept += price.internal_bytes
        return self.input_bytes + kept + (self.mask_bytes if kept else 0)

    def transient_bytes(self, save_set: SaveSet) -> int:
        """All that is rebuilt, as if nothing of it were freed before the layer's backward ends.  Gathered tensors
        are left out: every backward rebuilds them, whatever is kept."""
        rebuilt = self._without_gathers(self.replayed(save_set))
        return sum(self._rebuilt(name, save_set) for name in rebuilt)

    def _rebuilt(self, name: str, save_set: SaveSet) -> int:
        price, decision = self.steps[name], save_set[name]
        if name in self.held and decision.internals != KEEP:
            return price.internal_bytes
        return price.output_bytes * (decision.output != KEEP) + price.internal_bytes * (decision.internals != KEEP)

    def forward_transient_bytes(self) -> int:
        return 0

    def replay_seconds(self, save_set: SaveSet) -> float:
        seconds = {name: price.seconds for name, price in self.steps.items()}
        return replay_seconds(self._present, seconds, self.replayed(save_set), self.shared_gathers)

    def group(self, layers: int) -> tuple[int, int, float]:
        """Everything of the group is rebuilt at once; the replay ends before the last layer's last product."""
        everything = sum(self._saved(step.name) for step in self._present) + self.mask_bytes
        last = ("mlp.down", "mlp.reduce", "mlp.residual")
        spared = sum(self.steps[name].seconds for name in last if name in self.steps)
        seconds = layers * self.forward_seconds - spared
        if self.shared_gathers:
            seconds -= layers * sum(self.steps[name].seconds for name in GATHERS if name in self.steps)
        return self.input_bytes, layers * (everything + self.input_bytes) - self.input_bytes, seconds

    def _saved(self, name: str) -> int:
        saved = any(name in step.reads and step.saves_input for step in self._present) or name.endswith(".norm")
        price = self.steps[name]
        return price.output_bytes * (saved and name not in GATHERS) + price.internal_bytes

    def _without_gathers(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name not in GATHERS]
