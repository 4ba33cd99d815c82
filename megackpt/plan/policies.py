"""The named policies of the recompute flags, as plain functions from numbers to a plan.

=====================================  =========================================================================
none                                   everything; under sequence parallelism the norm output is kept as a shard
                                       and gathered again in backward
free                                   none less both norm outputs, the activation output and the masks
selective                              none less the masks and the outputs and internals of the named modules
full, uniform 1 or block, boundaries   the layer input and ``attn.residual``: 4sbh/t, no reduction replayed
full, ..., layer-input                 the layer input: 2sbh/t, one reduction replayed
full, uniform k >= 2                   the input of each group of k layers: 2sbh/t per group, 2k-1 reductions
=====================================  =========================================================================

``mlp.down`` is never replayed in any of them (within a group, the last one's), ``attn.proj`` only with the layer
input alone: what nobody saved depends on, nobody rebuilds.
"""

from __future__ import annotations

from collections.abc import Sequence

from megackpt.plan.decision import KEEP, REPLAY, REPLAY_ALL, ChunkPlan, Decision, Group, Plan, SaveSet
from megackpt.plan.steps import BLOCK, GATHERS, MODULES, NORMS

_GATHERED = Decision(output=REPLAY)
_MASKS = Decision(masks=REPLAY)
_OUTPUT = Decision(output=REPLAY, masks=REPLAY)


def keep_everything() -> SaveSet:
    """Policy none: only the gathers are replayed, so that 34sbh/t of the paper's Table 2 holds."""
    return SaveSet({name: _GATHERED for name in GATHERS})


def free_tier() -> SaveSet:
    """None less what costs next to nothing to rebuild: norm outputs, activation output, masks."""
    decisions = {name: _GATHERED for name in GATHERS}
    decisions |= {name: _OUTPUT for name in (*NORMS, "mlp.act")}
    return SaveSet(decisions, _MASKS)


def selective(modules: Sequence[str] = ("core_attn",)) -> SaveSet:
    """None less the masks and the outputs and internals of the named modules (Megatron's names or step names)."""
    decisions = {name: Decision(output=REPLAY, masks=REPLAY) for name in GATHERS}
    for step in steps_of(modules):
        decisions[step] = REPLAY_ALL
    return SaveSet(decisions, _MASKS)


def steps_of(modules: Sequence[str]) -> tuple[str, ...]:
    """Step names of the given modules.  Raises ValueError on an unknown one, and on a boundary or a consumer
    whose replay could not save anything."""
    known = {s.name for s in BLOCK}
    steps: list[str] = []
    for module in modules:
        if module not in MODULES and module not in known:
            raise ValueError(f"{module!r} is neither one of {sorted(MODULES)} nor a step ({', '.join(sorted(known))})")
        steps += MODULES.get(module, (module,))
    return tuple(dict.fromkeys(steps))


def full_layer(keep: str = "boundaries") -> SaveSet:
    """One fully replayed layer that keeps its input and, with ``keep='boundaries'``, ``attn.residual``."""
    kept = Decision(output=KEEP, internals=REPLAY, masks=REPLAY)
    decisions = {"mlp.residual": kept}
    if keep == "boundaries":
        decisions["attn.residual"] = kept
    elif keep != "layer-input":
        raise ValueError(f"keep={keep!r} is neither 'boundaries' nor 'layer-input'")
    return SaveSet(decisions, REPLAY_ALL)


def chunk_plan(
    layers: range,
    *,
    granularity: str,
    method: str = "uniform",
    num_layers: int = 1,
    modules: Sequence[str] = ("core_attn",),
    keep: str = "boundaries",
) -> ChunkPlan:
    """The plan of one chunk that holds the global ``layers``; a last group is clipped to what is left."""
    ends = keep_everything() if granularity == "none" else SaveSet({name: _GATHERED for name in GATHERS}, _MASKS)
    sets = {"embedding": ends, "head": ends}
    groups: tuple[Group, ...] = ()
    if granularity == "full" and method == "uniform" and num_layers > 1:
        firsts = range(layers.start, layers.stop, num_layers)
        groups = tuple(Group(i, min(i + num_layers, layers.stop) - 1) for i in firsts)
    for place, layer in enumerate(layers):
        if granularity == "full":
            whole = method == "uniform" or place < num_layers
            sets[f"layers.{layer}"] = full_layer(keep) if whole else keep_everything()
        else:
            makers = {"none": keep_everything, "free": free_tier}
            sets[f"layers.{layer}"] = selective(modules) if granularity == "selective" else makers[granularity]()
    return ChunkPlan(sets, groups)


def plan_for(stages: Sequence[Sequence[range]], **policy: object) -> Plan:
    """The plan for layers by [stage][chunk] under one policy for all."""
    return Plan(tuple(tuple(chunk_plan(c, **policy) for c in s) for s in stages), policy_name(**policy))  # type: ignore


def policy_name(
    granularity: str,
    method: str = "uniform",
    num_layers: int = 1,
    modules: Sequence[str] = ("core_attn",),
    keep: str = "boundaries",
) -> str:
    """The policy in the words of its flags: ``selective (core_attn)``, ``full, block 3, layer-input``."""
    if granularity == "selective":
        return f"selective ({', '.join(modules)})"
    if granularity != "full":
        return granularity
    grouped = method == "uniform" and num_layers > 1
    return f"full, {method} {num_layers}, {'group input' if grouped else keep}"
