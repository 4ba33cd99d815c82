"""Layers of made-up prices, and the oracles that the chooser is compared with."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from megackpt.plan.choose.pareto import Item
from megackpt.plan.choose.prices import StepPrice, StepPrices
from megackpt.plan.choose.problem import End, Problem

FIGURES: dict[str, Any] = json.loads((Path(__file__).parents[2] / "data" / "planner.json").read_text())


@cache
def small_prices(shared: bool = True) -> StepPrices:
    """A layer with small whole numbers: bytes in units of the layer input's, microseconds like a fused GPT layer's."""
    rows = {
        "attn.norm": (5, 2, 1), "attn.gather": (50, 16, 0), "attn.qkv": (400, 6, 0), "attn.core": (40, 2, 1),
        "attn.proj": (130, 0, 0), "attn.reduce": (50, 0, 0), "attn.residual": (8, 2, 0), "mlp.norm": (5, 2, 1),
        "mlp.gather": (50, 16, 0), "mlp.up": (530, 8, 0), "mlp.act": (20, 8, 0), "mlp.down": (530, 0, 0),
        "mlp.reduce": (50, 0, 0), "mlp.residual": (8, 2, 0),
    }  # fmt: skip
    steps = {name: StepPrice(us * 1e-6, output, inside) for name, (us, output, inside) in rows.items()}
    return StepPrices(steps, input_bytes=2, backward_seconds=3.6e-3, weight_seconds=1.6e-3, shared_gathers=shared)


def small_problem(budget: int, **more: Any) -> Problem:
    """12 layers on 3 stages with a head that takes half a layer's time."""
    numbers: dict[str, Any] = {
        "layers": 12, "stages": 3, "micro_batches": 8, "first": End(kept_bytes=3),
        "last": End(4, 9, 0.5e-3, 1e-3), "base_bytes": 11,
    }  # fmt: skip
    return Problem(small_prices(), budget_bytes=budget, **(numbers | more))


def brute_force(items: Sequence[Item], layers: int, room: int, in_flight: int = 1) -> int | None:
    """Least picoseconds of all ways to give every layer an item, with what the worst layer rebuilds on top."""
    best = None
    for mixture in itertools.combinations_with_replacement(items, layers):
        held = in_flight * sum(i.kept_bytes for i in mixture) + max(i.transient_bytes for i in mixture)
        if held <= room:
            ps = sum(i.replay_ps for i in mixture)
            best = ps if best is None else min(best, ps)
    return best
