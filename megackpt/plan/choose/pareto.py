"""All sensible save-sets of a layer, pruned to those that no other beats in every respect.

Eight tensors of a layer can be kept or rebuilt: both norm outputs, the rotated or plain q, k, v, the attention
core's output and what it saves inside (softmax or log-sum-exp), the residual after attention, the up product, the
activation output; and, when asked for, both gathered inputs.  Of the 256 subsets of the eight about 20 remain.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from megackpt.plan.choose.prices import LayerPricing, picoseconds
from megackpt.plan.decision import KEEP, REPLAY, REPLAY_ALL, Decision, SaveSet

# Dropout masks are redrawn in all of these: that costs neither bytes nor a product.
_KEPT = Decision(KEEP, KEEP, REPLAY)
_OUTPUT = Decision(KEEP, REPLAY, REPLAY)
_INTERNALS = Decision(REPLAY, KEEP, REPLAY)
# Steps that are never asked to rebuild anything while the layer's output is kept, or only for attn.residual.
_BOUNDARY = {"mlp.residual": _OUTPUT}


@dataclass(frozen=True)
class Item:
    """One way to treat one layer (``layers`` = 1) or a group of them that is replayed as one."""

    kept_bytes: int  # per micro-batch in flight
    replay_ps: int  # picoseconds that backward takes longer
    transient_bytes: int  # most bytes backward holds above what was kept
    layers: int = 1
    save_set: SaveSet | None = None  # None: a group, rebuilt whole from its input
    host_bytes: int = 0  # per micro-batch, kept in host memory

    @cached_property
    def rank(self) -> tuple[int, int, int, int, str]:
        """A total order: leanest, then fastest first."""
        return (self.kept_bytes, self.replay_ps, self.transient_bytes, self.layers, repr(self.save_set))


def save_sets(absent: Iterable[str] = (), keep_gathered: bool = False) -> list[SaveSet]:
    """Every combination of kept tensors; ``keep_gathered`` adds those that keep a gathered input (2sbh, not
    divided by t) and spare the gather of the weight gradient."""
    gone = set(absent)
    gathers = [name for name in ("attn.gather", "mlp.gather") if name not in gone and keep_gathered]
    rotations = [name for name in ("attn.qknorm", "attn.rope") if name not in gone]
    choices: list[list[dict[str, Decision]]] = []
    for name in ("attn.norm", "attn.residual", "mlp.norm", "mlp.up", "mlp.act", *gathers):
        choices.append([{}, {name: _KEPT}])
    choices.append([{}, *({name: _KEPT for name in rotations[k:]} for k in range(len(rotations)))])
    choices.append([{}, {"attn.qkv": _KEPT}])
    choices.append([{}, {"attn.core": _KEPT}, {"attn.core": _OUTPUT}, {"attn.core": _INTERNALS}])
    result = []
    for parts in itertools.product(*choices):
        decisions = dict(_BOUNDARY)
        for part in parts:
            decisions |= part
        result.append(SaveSet(decisions, REPLAY_ALL))
    return result


def priced(pricing: LayerPricing, sets: Iterable[SaveSet]) -> list[Item]:
    """The items of ``sets`` under ``pricing``."""
    return [
        Item(
            pricing.kept_bytes(save_set),
            picoseconds(pricing.replay_seconds(save_set)),
            pricing.transient_bytes(save_set),
            1,
            save_set,
        )
        for save_set in sets
    ]


def prune(items: Sequence[Item], transient: bool = True) -> list[Item]:
    """The items of which none is at least as good in bytes and seconds (and, with ``transient``, in the bytes that
    backward rebuilds), by ascending bytes.  Of equal ones the first by `Item.rank` stays."""
    kept: list[Item] = []
    for item in sorted(items, key=lambda item: item.rank):
        if not any(
            other.layers == item.layers
            and other.replay_ps <= item.replay_ps
            and (not transient or other.transient_bytes <= item.transient_bytes)
            for other in kept  # all of them keep at most as many bytes
        ):
            kept.append(item)
    return kept


def layer_items(pricing: LayerPricing, keep_gathered: bool = False) -> list[Item]:
    """The Pareto save-sets of one layer over kept bytes, replay seconds and rebuilt bytes."""
    return prune(priced(pricing, save_sets(pricing.absent, keep_gathered)))


def group_items(pricing: LayerPricing, sizes: Iterable[int]) -> list[Item]:
    """Groups of layers that keep their input alone: leaner than any save-set, and slower."""
    items = []
    for size in sizes:
        kept, transient, seconds = pricing.group(size)
        items.append(Item(kept, picoseconds(seconds), transient, size))
    return items
