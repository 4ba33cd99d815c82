"""A plan in a few lines: which layers of which stage and chunk replay what."""

from __future__ import annotations

from collections.abc import Collection
from itertools import groupby

from megackpt.plan.decision import OFFLOAD_HOST, ChunkPlan, Plan
from megackpt.plan.demand import replayed_by_layer
from megackpt.plan.steps import GATHERS

MOST_LINES = 12


def plan_lines(plan: Plan, absent: Collection[str] = ()) -> list[str]:
    """One line per stage and chunk, equal neighbours together; a long list is cut in the middle.  ``absent``: steps
    that the model does not have."""
    rows = []
    for stage, chunks in enumerate(plan.stages):
        for chunk in range(len(chunks)):
            place = f"stage {stage}" + (f" chunk {chunk}" if len(chunks) > 1 else "")
            rows.append((place, _slots(plan, stage, chunk, absent)))
    lines = []
    for text, same in groupby(rows, key=lambda row: row[1]):
        places = [place for place, _ in same]
        lines.append(f"{places[0]}{f' to {places[-1]}' if len(places) > 1 else ''}: {text}")
    if len(lines) > MOST_LINES:
        half = MOST_LINES // 2
        lines = [*lines[:half], f"({len(lines) - 2 * half} lines like these)", *lines[-half:]]
    return lines


def _slots(plan: Plan, stage: int, chunk: int, absent: Collection[str]) -> str:
    texts = [_chunk(slot, absent) for slot in plan.slots(stage, chunk)]
    if len(set(texts)) == 1:
        return texts[0]
    parts = []
    place = 0
    for text, same in groupby(texts):
        count = len(list(same))
        to = "on" if place + count == len(texts) else f"to {place + count - 1}"
        parts.append(f"slot {place}: {text}" if count == 1 and to != "on" else f"slots {place} {to}: {text}")
        place += count
    return " | ".join(parts)


def _chunk(sets: ChunkPlan, absent: Collection[str]) -> str:
    """``3 layers replay attn.qkv mlp.up, 2 layers nothing``."""
    named = sorted(int(a.removeprefix("layers.")) for a in sets.save_sets if a.startswith("layers."))
    if not named:
        return "no layers"
    replayed = replayed_by_layer(sets, range(named[0], named[-1] + 1), absent)
    inside = {layer for group in sets.groups for layer in range(group.first, group.last + 1)}
    parts = []
    for what, same in groupby(
        _layer(steps, layer in inside, OFFLOAD_HOST in _choices(sets, layer))
        for layer, steps in zip(named, replayed, strict=True)
    ):
        count = len(list(same))
        parts.append(f"{count} layers {what}" if count > 1 else f"1 layer {what.replace('replay', 'replays', 1)}")
    return ", ".join(parts) + _ahead(sets, range(named[0], named[-1] + 1))


def _ahead(sets: ChunkPlan, layers: range) -> str:
    """``; the last 2 ahead of the gradient``, or ``; all ahead of the gradient while at most 3 forwards are in
    flight``."""
    units = sets.units_ahead(layers)
    if not units:
        return ""
    count = layers.stop - units[-1].start
    which = "all" if count == len(layers) else f"the last {count}" if count > 1 else "the last"
    most = sets.ahead_within
    while_ = f" while at most {most} forward{'s are' if most > 1 else ' is'} in flight" if most else ""
    return f"; {which} ahead of the gradient{while_}"


def _layer(steps: Collection[str], grouped: bool, away: bool) -> str:
    names = [name for name in steps if name not in GATHERS]
    home = ", the rest in host memory" if away else ""
    if grouped:
        return f"replay whole, as a group{home}"
    return f"replay {' '.join(names) or 'nothing'}{home}"


def _choices(sets: ChunkPlan, layer: int) -> set[str]:
    save_set = sets.save_set(f"layers.{layer}")
    decisions = (save_set.default, *save_set.decisions.values())
    return {choice for d in decisions for choice in (d.output, d.internals)}
