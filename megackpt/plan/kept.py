"""What our engine keeps of a layer, what it rebuilds, and what is alive on top while it does: from bytes alone.

The rules are those of ``recompute``: a tensor saved for backward is a dropped output of an earlier step (a handle to
whoever can rebuild it), an input of its step, or an internal of it.  A step that somebody may ask to replay holds
those of its inputs that are not dropped themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megackpt.plan.decision import KEEP, REPLAY, SHARD, TIERS, SaveSet
from megackpt.plan.profile import LayerProfile, StepCost

INPUT = "input"


@dataclass(frozen=True)
class Replay:
    """What one backward of a layer runs again."""

    steps: tuple[str, ...]
    flops: int
    bytes_moved: int
    collectives: tuple[tuple[str, int], ...]  # (kind, bytes of the whole tensor), in the order of the forward


@dataclass(frozen=True)
class KeptLayer:
    """The outcome for one layer and one micro-batch: bytes by what they are, and who is asked in backward."""

    storages: Mapping[str, int]  # kept bytes: "input", a step's name (its output), "<step> internals|masks|arguments"
    dropped: frozenset[str]  # outputs (and "input") that are not on the device in full
    waiting: Mapping[str, int]  # outputs in a tier that somebody wants back -> bytes that stay on the device
    replayed: frozenset[str]  # steps that some handle can ask to run again

    @property
    def total(self) -> int:
        return sum(self.storages.values()) + sum(self.waiting.values())


def keep_layer(layer: LayerProfile, save_set: SaveSet, *, input_choice: str = KEEP, t: int = 1) -> KeptLayer:
    """Apply the decisions to one layer.  ``input_choice``: what its producer decided about the layer's input; ``t``
    ranks share a tensor that is kept in shards.  Raises ValueError for an input that nobody can give back."""
    if input_choice == REPLAY:
        raise ValueError("the input of a layer must stay: without any boundary the first demand rebuilds the chain")
    return _Layer(layer, save_set, input_choice, t).result()


class _Layer:
    """The forward of one layer as the tape sees it."""

    def __init__(self, layer: LayerProfile, save_set: SaveSet, input_choice: str, t: int) -> None:
        self.layer, self.save_set, self.t = layer, save_set, t
        self.storages: dict[str, int] = {}
        self.dropped: dict[str, str] = {INPUT: input_choice} if input_choice in TIERS else {}
        self.viewed: set[str] = set()  # dropped outputs that somebody's backward asks for
        self.slotted: set[str] = set()  # steps with internals to be rebuilt
        for step in layer.steps:
            self._run(step)
        self._hold_inputs()

    def _run(self, step: StepCost) -> None:
        decision = self.save_set[step.name]
        if step.held_bytes:
            self.storages[f"{step.name} arguments"] = step.held_bytes
        if step.saves_input:
            self._save(step.reads[0])
        held = self._internals(step, decision.internals, decision.masks == KEEP)
        if decision.output != KEEP and not held:
            self.dropped[step.name] = decision.output

    def _internals(self, step: StepCost, choice: str, masks: bool) -> bool:
        """Save what is saved inside; whether the output's own storage stays for it."""
        others = step.internal_bytes - (step.output_bytes if step.output_is_internal else 0)
        if masks and step.mask_bytes:
            self.storages[f"{step.name} masks"] = step.mask_bytes
        if not step.internal_bytes:
            return False
        if choice == REPLAY:
            self.slotted.add(step.name)
            return False
        if choice != KEEP:
            return False
        self.storages |= {f"{step.name} internals": others} if others else {}
        if step.output_is_internal:
            self._keep(step.name)
        return step.output_is_internal

    def _save(self, name: str) -> None:
        if name in self.dropped:
            self.viewed.add(name)
        else:
            self._keep(name)

    def _keep(self, name: str) -> None:
        self.storages[name] = self.layer.bytes_of(name)

    def _hold_inputs(self) -> None:
        """Steps that can be asked hold their inputs; a dropped input can be asked for in turn."""
        self.replayed = set(self.slotted)
        for step in reversed(self.layer.steps):
            if self.dropped.get(step.name) == REPLAY and step.name in self.viewed:
                self.replayed.add(step.name)
            if step.name in self.replayed:
                for name in step.reads:
                    self._save(name)

    def result(self) -> KeptLayer:
        tiers = {n: c for n, c in self.dropped.items() if c in TIERS and n in self.viewed}
        share = {n: -(-self.layer.bytes_of(n) // self.t) if c == SHARD else 0 for n, c in tiers.items()}
        return KeptLayer(self.storages, frozenset(self.dropped), share, frozenset(self.replayed))


def kept_bytes(layer: LayerProfile, save_set: SaveSet, *, input_choice: str = KEEP, t: int = 1) -> int:
    """Bytes that our engine keeps of one layer and micro-batch, its input included: what ``Tape.saved_bytes`` counts.

    The layer's output is not included: it belongs to whoever reads it.
    """
    return keep_layer(layer, save_set, input_choice=input_choice, t=t).total


def records(layer: LayerProfile, save_set: SaveSet) -> int:
    """How many replays the engine makes of what one backward of the layer runs again: neighbours of a branch that are
    dropped whole go together."""
    names, count, before = set(replay(layer, save_set).steps), 0, ""
    for step in layer.steps:
        decision = save_set[step.name]
        whole = step.name.partition(".")[0] if decision.output == decision.internals == REPLAY else ""
        if step.name in names:
            count += not (whole and whole == before)
        before = whole if step.name in names else ""
    return count


def replay(layer: LayerProfile, save_set: SaveSet) -> Replay:
    """What one backward of the layer runs again under a save-set."""
    kept = keep_layer(layer, save_set)
    steps = [step for step in layer.steps if step.name in kept.replayed]
    return Replay(
        tuple(step.name for step in steps),
        sum(step.flops for step in steps),
        sum(step.bytes_moved for step in steps),
        tuple((step.collective, step.collective_bytes) for step in steps if step.collective),
    )
