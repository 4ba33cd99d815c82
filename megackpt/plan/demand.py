"""Which steps a backward replays under a plan, from the step table alone.

A step is replayed when something asks for what it dropped: its own backward for internals, the backward of a reader
that saved it, or a reader that is itself replayed.  Consumers (``mlp.down``, reductions, residuals) are therefore
never replayed while their outputs are kept: nobody saved anything that depends on them.
"""

from __future__ import annotations

from collections.abc import Collection

from megackpt.plan.decision import KEEP, REPLAY, ChunkPlan, SaveSet
from megackpt.plan.steps import BLOCK, Step


def present_steps(steps: tuple[Step, ...], absent: Collection[str]) -> tuple[Step, ...]:
    """The table without the ``absent`` steps; readers of one read what it read."""
    source: dict[str, tuple[str, ...]] = {}
    kept = []
    for step in steps:
        reads = tuple(r for name in step.reads for r in source.get(name, (name,)))
        if step.name in absent:
            source[step.name] = reads
        else:
            kept.append(Step(**{**step.__dict__, "reads": reads}))
    return tuple(kept)


def replayed_steps(
    save_set: SaveSet, absent: Collection[str] = (), held: Collection[str] = ()
) -> tuple[str, ...]:
    """Names of the block's steps that one backward of one layer replays, in forward order.

    ``held``: steps whose output is one of their internals (:attr:`~megackpt.plan.profile.LayerProfile.held`): while
    those stay, it stays too, whatever the decision for it says.
    """
    steps = present_steps(BLOCK, absent)
    readers: dict[str, list[Step]] = {step.name: [] for step in steps}
    for step in steps:
        for name in step.reads:
            if name in readers:
                readers[name].append(step)
    replayed: set[str] = set()
    for step in reversed(steps):
        decision = save_set[step.name]
        own = decision.internals == REPLAY and step.has_internals
        asked = any(reader.saves_input or reader.name in replayed for reader in readers[step.name])
        stays = step.name in held and decision.internals == KEEP
        if own or (decision.output == REPLAY and asked and not stays):
            replayed.add(step.name)
    return tuple(step.name for step in steps if step.name in replayed)


def replayed_by_layer(
    plan: ChunkPlan, layers: range, absent: Collection[str] = (), held: Collection[str] = ()
) -> list[tuple[str, ...]]:
    """The steps of each of the chunk's ``layers`` that one backward replays, a step as often as it runs again.

    Each group of a tree re-runs its layers whole, up to the last tensor that anybody saved: the input of its last
    ``mlp.down`` (or its end, where what it passes on is dropped). Layers that stand in no merged group (one without
    an inside) replay by their own save-sets besides.
    """
    every = tuple(step.name for step in present_steps(BLOCK, absent))
    short = every[: every.index("mlp.down")]
    replayed: dict[int, tuple[str, ...]] = {layer: () for layer in layers}
    merged: set[int] = set()
    waiting = list(plan.groups)
    while waiting:
        group = waiting.pop()
        for layer in range(group.first, group.last + 1):
            replayed[layer] += every if layer < group.last or group.output == REPLAY else short
        if group.inner is None:
            merged.update(range(group.first, group.last + 1))
        else:
            waiting += group.inner
    sets = {layer: plan.save_set(f"layers.{layer}") for layer in layers if layer not in merged}
    own = {save_set: replayed_steps(save_set, absent, held) for save_set in set(sets.values())}
    return [replayed[layer] + (own[sets[layer]] if layer in sets else ()) for layer in layers]
