"""Equal groups, each replayed from its input: the simplest plan, and how many groups are best.

c groups of g = ceil(L/c) layers hold c inputs, and one group's tapes while it is replayed; with n micro-batches in
flight every one holds its inputs but only one is replayed at a time:

    bytes(c) = n c A_in + ceil(L/c) A_layer,   least near c = sqrt(L A_layer / (n A_in))

For a transformer A_layer / A_in is about 17, so the best c is about four times the square root of L.  Whatever c is,
every layer runs at most once more: more groups never cost more work.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt, sqrt

from megackpt.plan.chains.types import ChainPlan, Drop, InfeasibleBudget, Keep


@dataclass(frozen=True)
class UniformGroups:
    groups: int
    bytes: int
    extra_forwards: int  # layers run once more, per micro-batch

    def plan(self, layers: int, in_flight: int = 1) -> ChainPlan:
        return uniform_plan(layers, self.groups, keep_last=in_flight == 1)


def uniform_bytes(layers: int, groups: int, input_bytes: int, layer_bytes: int, in_flight: int = 1) -> int:
    """n c A_in + ceil(L/c) A_layer; the input of the first group is among the c."""
    return in_flight * groups * input_bytes + -(-layers // groups) * layer_bytes


def real_optimum(layers: int, input_bytes: int, layer_bytes: int, in_flight: int = 1) -> float:
    """The c at which the bytes are least when c need not be an integer."""
    return sqrt(layers * layer_bytes / (in_flight * input_bytes))


def uniform(
    layers: int, input_bytes: int, layer_bytes: int, in_flight: int = 1, budget: int | None = None
) -> UniformGroups:
    """The groups with the least bytes; with a budget, those with the least extra work that fit it (with several
    micro-batches in flight no group can be spared, so there the least bytes again).

    ``input_bytes``: a group's input, per micro-batch.  ``layer_bytes``: what keeping a layer costs, output included.
    Raises InfeasibleBudget."""
    choices = [_choice(layers, c, input_bytes, layer_bytes, in_flight) for c in _candidates(layers)]
    leanest = min(choices, key=lambda u: (u.bytes, u.groups))
    if budget is None:
        return leanest
    if leanest.bytes > budget:
        raise InfeasibleBudget(budget, leanest.bytes)
    return min((u for u in choices if u.bytes <= budget), key=lambda u: (u.extra_forwards, u.bytes))


def uniform_plan(layers: int, groups: int, *, keep_last: bool = True) -> ChainPlan:
    """Groups of layers/groups, the last ones one larger where it does not divide.  ``keep_last``: the last group is
    the first that the backward needs, so with one micro-batch in flight it may as well be kept."""
    if not 1 <= groups <= layers:
        raise ValueError(f"{groups} groups of {layers} layers")
    size, larger = divmod(layers, groups)
    sizes = [size] * (groups - larger) + [size + 1] * larger
    drops = [Drop(n, (Keep(),) * n) for n in (sizes[:-1] if keep_last else sizes)]
    return ChainPlan((*drops, *((Keep(),) * (sizes[-1] if keep_last else 0))))


def _choice(layers: int, groups: int, input_bytes: int, layer_bytes: int, in_flight: int) -> UniformGroups:
    spared = -(-layers // groups) if in_flight == 1 else 0
    return UniformGroups(groups, uniform_bytes(layers, groups, input_bytes, layer_bytes, in_flight), layers - spared)


def _candidates(layers: int) -> list[int]:
    """Numbers of groups worth a look: for every group size the fewest groups that reach it."""
    small = range(1, isqrt(layers) + 2)
    return sorted({c for g in small for c in (g, -(-layers // g)) if c <= layers})
