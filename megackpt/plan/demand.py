"""Which steps a backward replays under a plan, from the step table alone.

A step is replayed when something asks for what it dropped: its own backward for internals, the backward of a reader
that saved it, or a reader that is itself replayed.  Consumers (``mlp.down``, reductions, residuals) are therefore
never replayed while their outputs are kept: nobody saved anything that depends on them.
"""

from __future__ import annotations

from collections.abc import Collection

from megackpt.plan.decision import REPLAY, ChunkPlan, SaveSet, group_at
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


def replayed_steps(save_set: SaveSet, absent: Collection[str] = ()) -> tuple[str, ...]:
    """Names of the block's steps that one backward of one layer replays, in forward order."""
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
        if own or (decision.output == REPLAY and asked):
            replayed.add(step.name)
    return tuple(step.name for step in steps if step.name in replayed)


def replayed_by_layer(plan: ChunkPlan, layers: range, absent: Collection[str] = ()) -> list[tuple[str, ...]]:
    """The replayed steps of each of the chunk's ``layers``.  A group re-runs its layers whole, up to the last
    tensor that anybody saved: the input of its last ``mlp.down``."""
    every = tuple(step.name for step in present_steps(BLOCK, absent))
    result = []
    group = None
    for layer in layers:
        group = group_at(plan.groups, layer) or group
        if group is not None and layer <= group.last:
            result.append(every if layer < group.last else every[: every.index("mlp.down")])
        else:
            result.append(replayed_steps(plan.save_set(f"layers.{layer}"), absent))
    return result
