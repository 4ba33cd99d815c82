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
from dataclasses import dataclass
from typing import Any

from megackpt.plan.decision import KEEP, REPLAY, REPLAY_ALL, SHARD, ChunkPlan, Decision, Group, Plan, SaveSet
from megackpt.plan.steps import BLOCK, CONSUMERS, GATHERS, HEAD_CHUNK, MODULES, NORMS

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


def full_layer(keep: str = "boundaries", boundary: str = KEEP) -> SaveSet:
    """One fully replayed layer that keeps its input and, with ``keep='boundaries'``, ``attn.residual``.

    ``boundary``: how a boundary is kept, ``keep`` or ``shard``.
    """
    kept = Decision(output=boundary, masks=REPLAY)
    halves = {"boundaries": ("attn", "mlp"), "layer-input": ("mlp",)}
    if keep not in halves:
        raise ValueError(f"keep={keep!r} is neither 'boundaries' nor 'layer-input'")
    # What only feeds a kept boundary is saved by nobody: dropping it would remember a call that is never made.
    decisions = {f"{half}.residual": kept for half in halves[keep]}
    decisions |= {step: _MASKS for half in halves[keep] for step in CONSUMERS[half]}
    return SaveSet(decisions, REPLAY_ALL)


@dataclass(frozen=True)
class Policy:
    """A named policy with its details; each detail means what the flag of its name says.

    ``distribute``: boundaries of full recomputation are kept as this rank's part (``--distribute-saved-activations``).
    ``ahead``: layers that are rebuilt while a gradient is on its way (``--recompute-ahead-layers``).
    ``chunked_loss``: the head runs in parts, which are always replayed (``--loss-chunk-size``).
    """

    granularity: str = "none"
    method: str = "uniform"
    num_layers: int = 1
    modules: tuple[str, ...] = ("core_attn",)
    keep: str = "boundaries"
    distribute: bool = False
    chunked_loss: bool = False
    ahead: int = 0

    @property
    def grouped(self) -> bool:
        return self.granularity == "full" and self.method == "uniform" and self.num_layers > 1

    def __str__(self) -> str:
        """In the words of the flags: ``selective (core_attn)``, ``full, block 3, layer-input``."""
        words = self.granularity
        if self.granularity == "selective":
            words += f" ({', '.join(self.modules)})"
        elif self.granularity == "full":
            words += f", {self.method} {self.num_layers}, {'group input' if self.grouped else self.keep}"
        words += ", boundaries distributed" * self.distribute + ", loss in chunks" * self.chunked_loss
        return words + f", {self.ahead} layer{'s' * (self.ahead != 1)} ahead" * bool(self.ahead)

    def layer(self, place: int) -> SaveSet:
        """The save-set of the ``place``-th layer of a chunk."""
        if self.granularity == "full":
            boundary = SHARD if self.distribute else KEEP
            whole = self.method == "uniform" or place < self.num_layers
            return full_layer(self.keep, boundary) if whole else keep_everything()
        if self.granularity == "selective":
            return selective(self.modules)
        return free_tier() if self.granularity == "free" else keep_everything()

    def ends(self) -> SaveSet:
        """The save-set of embedding and head: their masks as the layers', their gathers replayed."""
        decisions = {name: _GATHERED for name in GATHERS}
        if self.chunked_loss:
            decisions[HEAD_CHUNK.name] = Decision(internals=REPLAY)
        return SaveSet(decisions, Decision() if self.granularity == "none" else _MASKS)

    def chunk(self, layers: range) -> ChunkPlan:
        """The plan of one chunk that holds the global ``layers``; a last group is clipped to what is left."""
        sets = {"embedding": self.ends(), "head": self.ends()}
        sets |= {f"layers.{layer}": self.layer(place) for place, layer in enumerate(layers)}
        groups: tuple[Group, ...] = ()
        if self.grouped:
            output = SHARD if self.distribute else KEEP
            firsts = range(layers.start, layers.stop, self.num_layers)
            groups = tuple(Group(i, min(i + self.num_layers, layers.stop) - 1, output=output) for i in firsts)
        return ChunkPlan(sets, groups, self.ahead)


def chunk_plan(layers: range, **details: Any) -> ChunkPlan:
    """The plan of one chunk under ``Policy(**details)``."""
    return Policy(**details).chunk(layers)


def plan_for(stages: Sequence[Sequence[range]], policy: Policy) -> Plan:
    """The plan for layers by [stage][chunk] under one policy for all."""
    return Plan(tuple(tuple(policy.chunk(c) for c in s) for s in stages), str(policy))
