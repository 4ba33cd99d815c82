"""A plan from a file: ``--recompute-plan`` of a run and of ``megackpt plan``.

A plan that was edited by hand, or that belongs to another model or another layout, would be run as far as it goes, with
other bytes than anybody predicted; so everything in it must be about this run.  Needs no torch and no other rank.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from megackpt.config.errors import UsageError
from megackpt.plan.decision import OFFLOAD_DISK, SHARD, ChunkPlan, Group, Plan
from megackpt.plan.split import Split
from megackpt.plan.steps import BLOCK, EMBED, HEAD, HEAD_CHUNK, whole_outputs

FLAG = "--recompute-plan"


def read_plan(path: str, split: Split) -> Plan:
    """A stored plan; UsageError unless it is one for the model as it is split."""
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{FLAG} {path} cannot be read: {error.strerror or error}") from error
    try:
        plan = Plan.from_json(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{FLAG} {path}: not a plan of this version ({error})") from error
    if len(plan.stages) != len(split):
        raise UsageError(f"{FLAG} {path} is for {len(plan.stages)} stages, this run has {len(split)}")
    for stage, row in enumerate(split):
        if len(plan.stages[stage]) != len(row):
            raise UsageError(
                f"{FLAG} {path}: stage {stage} has {len(plan.stages[stage])} chunks there and {len(row)} here"
            )
        _check_layers(path, plan, stage, row)
        for chunk, layers in enumerate(row):
            for slot in plan.slots(stage, chunk):
                _check_names(path, slot)
                _check_groups(f"{FLAG} {path}: stage {stage}, chunk {chunk}", slot.groups, layers)
    return plan


def own_plans(plan: Plan, stage: int) -> list[ChunkPlan]:
    """Those of a stage, of all its chunks and slots."""
    return [sets for chunk in range(len(plan.stages[stage])) for sets in plan.slots(stage, chunk)]


def check_shards(path: str, plan: Plan, sequence_parallel: bool) -> None:
    """UsageError where a plan spreads over the ranks what is not equal on them: a gather would give another tensor."""
    whole, how = whole_outputs(sequence_parallel), "with" if sequence_parallel else "without"
    for chunk in (chunk for stage in range(len(plan.stages)) for chunk in own_plans(plan, stage)):
        shards = [(a, name) for a, s in chunk.save_sets.items() for name, d in s.decisions.items() if d.output == SHARD]
        shards += [(a, "any step") for a, s in chunk.save_sets.items() if s.default.output == SHARD]
        if sequence_parallel:
            shards += [(f"layers {g.first} to {g.last}", "the group") for g in chunk.groups if g.output == SHARD]
        for address, name in shards:
            if name not in whole:
                raise UsageError(
                    f"{FLAG} {path}: {address} shards the output of {name}, of which every tensor-parallel"
                    f" rank holds a part of its own {how} --sequence-parallel; whole there: {', '.join(sorted(whole))}"
                )


def _check_layers(path: str, plan: Plan, stage: int, row: Sequence[range]) -> None:
    """Every slot has a save-set for each layer that the chunk has here, and for no other."""
    slots = max(len(plan.slots(stage, chunk)) for chunk in range(len(row)))
    here = [[f"layers.{layer}" for layer in layers] for layers in row]
    for slot in range(slots):
        sets = [plan.chunk(stage, chunk, slot).save_sets for chunk in range(len(row))]
        there = [[address for address in of_chunk if address.startswith("layers.")] for of_chunk in sets]
        if [sorted(names) for names in there] != [sorted(names) for names in here]:
            raise UsageError(
                f"{FLAG} {path}: stage {stage} has layers {_by_chunk(there)} there and {_by_chunk(here)} here"
            )


def _by_chunk(addresses: Sequence[Sequence[str]]) -> str:
    """Numbers in their order, then what is no number: ``[0, 1] | [4, x]``."""
    names = [[address.removeprefix("layers.") for address in of_chunk] for of_chunk in addresses]
    ordered = [sorted(of_chunk, key=lambda name: (not name.isdecimal(), name.zfill(9))) for of_chunk in names]
    return " | ".join(f"[{', '.join(of_chunk)}]" for of_chunk in ordered)


def _check_names(path: str, plan: ChunkPlan) -> None:
    """A decision about a step that no model has would do nothing, and nobody would know."""
    known = {step.name for step in (*EMBED, *BLOCK, *HEAD, HEAD_CHUNK)}
    for address, save_set in plan.save_sets.items():
        if address not in ("embedding", "head") and not address.startswith("layers."):
            raise UsageError(f"{FLAG} {path}: no model has a part named {address!r}")
        if strange := sorted(set(save_set.decisions) - known):
            raise UsageError(f"{FLAG} {path}: {address} has no step named {', '.join(strange)}")
    if OFFLOAD_DISK in plan.choices():
        raise UsageError(f"{FLAG} {path}: {OFFLOAD_DISK} is not a place that training can use")


def _check_groups(place: str, groups: Sequence[Group], layers: range) -> None:
    """Groups stand beside each other in the order of the layers, within the chunk; and so do those inside them."""
    waiting = [(groups, layers.start, layers.stop - 1, f"the chunk's layers {layers.start} to {layers.stop - 1}")]
    while waiting:
        siblings, start, last, outer = waiting.pop()
        for group in siblings:
            name = f"{group.first} to {group.last}"
            if not start <= group.first <= group.last <= last:
                raise UsageError(f"{place}: the group of layers {name} overlaps another, or leaves {outer}")
            if (group.first, group.last) in {(inner.first, inner.last) for inner in group.inner or ()}:
                raise UsageError(f"{place}: the group of layers {name} stands in one of the same layers")
            start = group.last + 1
            waiting.append((group.inner or (), group.first, group.last, f"the group of {name}"))
