"""Two plans side by side as text: what each costs, and stage by stage where the bytes went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megackpt.observe.plan_table import columns
from megackpt.plan.accelerators import GIB

Plan = Mapping[str, Any]
"""One plan of the document of ``megackpt plan --json`` with its ``machine`` and ``memory_budget_bytes``."""


def comparison(first: str, a: Plan, second: str, b: Plan) -> str:
    """``first`` and ``second`` name the two."""
    rows: list[tuple[str, ...]] = [("", "A", "B", "B against A")]
    rows.append(("plan", a["name"], b["name"], ""))
    rows.append(("machine", a["machine"], b["machine"], ""))
    rows.append(("layout", _layout(a), _layout(b), ""))
    rows.append(("budget, GiB", *(f"{p['memory_budget_bytes'] / GIB:.1f}" for p in (a, b)), ""))
    rows.append(("fits", *("yes" if p["fits"] else "NO" for p in (a, b)), ""))
    for name, key, unit, shape in (
        ("peak, GiB", "peak_bytes", GIB, ".2f"),
        ("step, s", "step_seconds", 1, ".4g"),
        ("tokens/s", "tokens_per_second", 1, ",.0f"),
    ):
        rows.append((name, *(format(p[key] / unit, shape) for p in (a, b)), f"{b[key] / a[key] - 1:+.1%}"))
    for name, key in (("replay", "overhead"), ("bubble", "bubble_share"), ("MFU", "mfu"), ("HFU", "hfu")):
        rows.append((name, *(f"{p[key]:.1%}" for p in (a, b)), f"{(b[key] - a[key]) * 100:+.1f} points"))
    text = f"A: {first}\nB: {second}\n\n{columns(rows)}\n"
    if len(a["stages"]) != len(b["stages"]):
        return text + "The two have different numbers of stages, so stages are not compared.\n"
    return text + "Stages: peak in GiB, and the terms that differ\n" + columns(_stages(a, b))


def _layout(plan: Plan) -> str:
    layout = plan["layout"]
    stages, chunks = len(layout["pieces"]), len(layout["pieces"][0])
    text = f"tp {layout['t']} cp {layout['c']} dp {layout['d']} pp {stages}"
    return text + (f" x{chunks}" if chunks > 1 else "") + f", {layout['n']} x {layout['micro_batch']}"


def _stages(a: Plan, b: Plan) -> Sequence[Sequence[str]]:
    rows = [("stage", "A", "B", "B - A", "why")]
    for one, other in zip(a["stages"], b["stages"], strict=True):
        names = dict.fromkeys([*one["terms"], *other["terms"]])
        moved = {name: other["terms"].get(name, 0) - one["terms"].get(name, 0) for name in names}
        largest = sorted((name for name in moved if moved[name]), key=lambda name: -abs(moved[name]))
        why = ", ".join(f"{name} {moved[name] / GIB:+.2f}" for name in largest[:3])
        sizes = [p["total_bytes"] / GIB for p in (one, other)]
        difference = (other["total_bytes"] - one["total_bytes"]) / GIB
        rows.append((str(one["stage"]), f"{sizes[0]:.2f}", f"{sizes[1]:.2f}", f"{difference:+.2f}", why))
    return rows
