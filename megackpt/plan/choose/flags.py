"""The best that one policy for all stages can do: the yardstick of a per-stage choice, and its fallback.

`megatron_policies` are Megatron's recompute flags executed Megatron's way (a replayed layer is re-run whole, its last
product and reductions included).  `flag_policies` are the same flags executed by our engine.  `best_mixture` is the
best that two save-sets in one proportion on every piece can do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from megackpt.plan.choose.pareto import Item, group_items, priced
from megackpt.plan.choose.prices import LayerPricing, picoseconds
from megackpt.plan.choose.problem import Counts, Pick, Problem
from megackpt.plan.policies import free_tier, full_layer, keep_everything, selective

Policy = Callable[[int], tuple[Item, ...]]
"""Layers of a piece -> its items."""


@dataclass(frozen=True)
class Global:
    """The outcome of one policy on all pieces."""

    name: str
    picks: tuple[Pick, ...]
    step_seconds: float


def fits(problem: Problem, counts: Counts, picks: Sequence[Pick]) -> bool:
    """Whether all stages stay within the budget, by the same bound that the per-stage choice uses."""
    for stage, pick in enumerate(picks):
        room = problem.room(stage, sum(counts[stage]), pick.transient_bytes)
        kept = [sum(i.kept_bytes for i in mixture) for mixture in pick.slots[0]]
        if any(int(row @ kept) > limit for row, limit in zip(problem.rows[stage], room, strict=True)):
            return False
    return True


def _whole(item: Item, pricing: LayerPricing, layers: int = 1) -> Item:
    """The same bytes, but the layer's forward is re-run to its end."""
    return replace(item, replay_ps=picoseconds(layers * pricing.forward_seconds))


def _uniform(item: Item, group: Callable[[int], Item]) -> Policy:
    """Groups as large as ``item`` says, a last one clipped (`group` makes one of any size)."""

    def policy(layers: int) -> tuple[Item, ...]:
        whole, rest = divmod(layers, item.layers)
        return (item,) * whole + ((group(rest),) if rest else ())

    return policy


def _block(replayed: Item, kept: Item, count: int) -> Policy:
    return lambda layers: (replayed,) * min(count, layers) + (kept,) * max(0, layers - count)


def megatron_policies(pricing: LayerPricing, layers: int, everything: Item) -> dict[str, Policy]:
    """Megatron's flags for pieces of at most ``layers`` layers.  ``everything`` is the item that keeps all."""
    (input_only, core) = priced(pricing, [full_layer("layer-input"), selective()])
    whole = _whole(input_only, pricing)
    core = replace(core, kept_bytes=core.kept_bytes + (everything.kept_bytes - priced_none(pricing).kept_bytes))
    made: dict[str, Policy] = {
        "none": _block(whole, everything, 0),
        "selective (core_attn)": _block(whole, core, 0),
        "full, uniform 1": _block(whole, everything, layers),
    }
    made |= {f"full, block {k}": _block(whole, everything, k) for k in range(1, layers)}

    def group(size: int) -> Item:
        return whole if size == 1 else _whole(group_items(pricing, [size])[0], pricing, size)

    made |= {f"full, uniform {size}": _uniform(group(size), group) for size in range(2, layers + 1)}
    return made


def priced_none(pricing: LayerPricing) -> Item:
    """The item of policy none."""
    return priced(pricing, [keep_everything()])[0]


def flag_policies(pricing: LayerPricing, layers: int, groups: bool = True) -> dict[str, Policy]:
    """The recompute flags as our engine runs them, for pieces of at most ``layers`` layers."""
    sets = [keep_everything(), free_tier(), selective(), full_layer("boundaries"), full_layer("layer-input")]
    none, free, core, boundaries, input_only = priced(pricing, sets)
    made: dict[str, Policy] = {
        "none": _block(none, none, 0),
        "free": _block(free, free, 0),
        "selective (core_attn)": _block(core, core, 0),
    }
    for name, item in (("boundaries", boundaries), ("layer-input", input_only)):
        made |= {f"full, block {k}, {name}": _block(item, none, k) for k in range(1, layers)}
        made[f"full, uniform 1, {name}"] = _block(item, item, layers)

    def group(size: int) -> Item:
        return input_only if size == 1 else group_items(pricing, [size])[0]

    if groups:
        made |= {f"full, uniform {size}": _uniform(group(size), group) for size in range(2, layers + 1)}
    return made


def applied(problem: Problem, counts: Counts, policy: Policy) -> tuple[Pick, ...]:
    """One policy on all pieces."""
    return tuple(Pick((tuple(policy(count) for count in stage),)) for stage in counts)


def best_policy(problem: Problem, policies: dict[str, Policy], counts: Counts | None = None) -> Global | None:
    """The fastest of the policies that fit, in simulation; of equals the first.  None if none fits."""
    division = counts or problem.division
    best: Global | None = None
    for name, policy in policies.items():
        picks = applied(problem, division, policy)
        if fits(problem, division, picks):
            seconds = problem.step_seconds(division, picks)
            if best is None or seconds < best.step_seconds:
                best = Global(name, picks, seconds)
    return best


def best_mixture(problem: Problem, items: Iterable[Item]) -> Global | None:
    """The best proportion of two items, the same on every piece (pieces must have equally many layers)."""
    (layers,) = {count for stage in problem.division for count in stage}
    choices = list(items)
    limits = {item.transient_bytes: _most_per_piece(problem, layers, item.transient_bytes) for item in choices}
    best: tuple[int, int, int, int] | None = None
    for i, lean in enumerate(choices):
        for j, rich in enumerate(choices[i:], i):
            limit = limits[max(lean.transient_bytes, rich.transient_bytes)]
            for count in range(1, layers + 1):
                if count * lean.kept_bytes + (layers - count) * rich.kept_bytes <= limit:
                    ps = count * lean.replay_ps + (layers - count) * rich.replay_ps
                    best = min(best or (ps, i, j, count), (ps, i, j, count))
    if best is None:
        return None
    _, i, j, count = best
    picks = applied(problem, problem.division, _block(choices[i], choices[j], count))
    name = f"{count} of {layers} layers of each piece lean, the others rich"
    return Global(name, picks, problem.step_seconds(problem.division, picks))


def best_uniform(problem: Problem, items: Iterable[Item]) -> Global | None:
    """The best single item for all layers."""
    policies = {str(place): _block(item, item, 0) for place, item in enumerate(items)}
    return best_policy(problem, policies)


def _most_per_piece(problem: Problem, layers: int, transient: int) -> int:
    """Bytes that a piece of so many layers may keep, when all pieces keep the same."""
    return min(
        int((problem.room(stage, layers * problem.chunks, transient) // rows.sum(axis=1)).min())
        for stage, rows in enumerate(problem.rows)
    )
