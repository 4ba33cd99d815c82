"""What a planner can win, in simulation: the table of tests/data/planner.json, reproduced and with shared gathers.

    python tools/bench_planner.py            # both tables, and the figures they are checked against
    python tools/bench_planner.py --json     # as JSON

Overhead of a step over the same step without replay, in percent, for a 175B-like model on H100-like numbers, by the
activation memory of stage 0.  Columns: the best Megatron flags on all stages; the best single save-set; the best
mixture of two save-sets; the exact choice per stage (and chunk); the same with other numbers of layers per stage;
with host offload; with slots.  The figures price a gather for every replayed product, as Megatron does; our engine
shares it with the weight gradient.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megackpt.plan.choose.choose import Options, choose
from megackpt.plan.choose.flags import best_mixture, best_policy, best_uniform, megatron_policies
from megackpt.plan.choose.pareto import Item, layer_items
from megackpt.plan.choose.prices import StepPrice, StepPrices
from megackpt.plan.choose.problem import End, Problem

FIGURES = Path(__file__).resolve().parent.parent / "tests" / "data" / "planner.json"
MIB, GIB = 2**20, 2**30
COLUMNS = ("flags", "uniform", "mixture", "exact", "split", "offload", "slots")


@dataclass(frozen=True)
class Case:
    """One cell's problem, its save-sets, and the step without replay."""

    problem: Problem
    items: list[Item]
    baseline: float

    def overhead(self, seconds: float | None) -> float | None:
        return None if seconds is None else 100 * (seconds / self.baseline - 1)


def layer_prices(figures: dict[str, Any], fused: bool, shared: bool) -> StepPrices:
    """The layer of the figures.  Outputs that nobody saves are priced at no bytes."""
    us, mib = figures["microseconds"], {k: int(v * MIB) for k, v in figures["mib"].items()}
    core, unit = us["core_fused" if fused else "core_unfused"], mib["unit"]
    rows = {
        "attn.norm": (us["norm"], unit, 0), "attn.gather": (us["gather"], 8 * unit, 0),
        "attn.qkv": (us["qkv"], mib["qkv"], 0),
        "attn.core": (core, unit, mib["log_sum_exp_fused" if fused else "softmax_unfused"]),
        "attn.proj": (us["proj"], 0, 0), "attn.reduce": (us["reduce"], 0, 0),
        "attn.residual": (us["residual"], unit, 0),
        "mlp.norm": (us["norm"], unit, 0), "mlp.gather": (us["gather"], 8 * unit, 0),
        "mlp.up": (us["up"], mib["up"], 0), "mlp.act": (us["act"], mib["up"], 0),
        "mlp.down": (us["down"], 0, 0), "mlp.reduce": (us["reduce"], 0, 0), "mlp.residual": (us["residual"], unit, 0),
    }  # fmt: skip
    products = us["qkv"] + us["proj"] + us["up"] + us["down"]
    rest = 2 * (us["norm"] + us["gather"] + us["reduce"] + us["residual"]) + us["act"]
    backward = 2 * products + 2.5 * core + rest + 2 * us["gather"]
    return StepPrices(
        {name: StepPrice(seconds * 1e-6, output, inside) for name, (seconds, output, inside) in rows.items()},
        input_bytes=unit,
        backward_seconds=backward * 1e-6,
        weight_seconds=products * 1e-6,
        mask_bytes=0 if fused else mib["masks_unfused"],
        shared_gathers=shared,
    )


def case_of(figures: dict[str, Any], row: dict[str, Any], gib: float, shared: bool) -> Case:
    """The problem of one cell: ``gib`` of activations on stage 0, all stages with the same memory."""
    model, p = figures["model"], row["stages"]
    t, h = model["tensor_parallel"], model["hidden"]
    per = model["state_bytes_per_parameter"]
    layer, embedding = int(per * 12 * h * h / t), int(per * model["vocabulary"] * h / t)
    head = 2 * model["sequence"] * model["micro_batch"] * h * model["vocabulary"] / t / model["flops_per_s"]
    pricing = layer_prices(figures, row["fused"], shared)
    problem = Problem(
        pricing,
        layers=model["layers"],
        stages=p,
        micro_batches=model["micro_batches"],
        budget_bytes=int(gib * GIB) + model["layers"] // p * layer + embedding,
        chunks=row["chunks"],
        first=End(state_bytes=embedding),
        last=End(forward_seconds=head, backward_seconds=2 * head, weight_seconds=head, state_bytes=embedding),
        layer_state_bytes=layer,
        host_bytes_per_s=model["host_bytes_per_s"],
    )
    return Case(problem, layer_items(pricing), problem.step_seconds(problem.division, None))


def cells(case: Case) -> dict[str, float | None]:
    """Overhead in percent by column; None where a column does not apply."""
    problem, items = case.problem, case.items
    everything = max(items, key=lambda item: item.kept_bytes)
    policies = megatron_policies(problem.pricing, max(map(max, problem.division)), everything)
    globals_ = [best_policy(problem, policies), best_uniform(problem, items), best_mixture(problem, items)]
    seconds: dict[str, float | None] = dict.fromkeys(COLUMNS)
    for name, found in zip(COLUMNS, globals_, strict=False):
        seconds[name] = found.step_seconds if found else None
    options = {"exact": Options()}
    if problem.chunks == 1:
        options |= {"split": Options(split=True), "offload": Options(offload=True), "slots": Options(slots=True)}
    for name, option in options.items():
        seconds[name] = choose(problem, option, items).step_seconds
    return {name: case.overhead(value) for name, value in seconds.items()}


def tables(figures: dict[str, Any], shared: bool) -> list[dict[str, Any]]:
    """One entry per case: its name, budgets, and a list of overheads per column."""
    result = []
    for row in figures["cases"]:
        columns = [cells(case_of(figures, row, gib, shared)) for gib in row["gib"]]
        made = {name: [column[name] for column in columns] for name in COLUMNS}
        result.append({"name": row["name"], "gib": row["gib"], **made})
    return result


def _joined(values: list[float | None], digits: int) -> str:
    return "" if None in values else " / ".join(f"{value:.{digits}f}" for value in values if value is not None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    wanted = parser.parse_args()
    figures, began = json.loads(FIGURES.read_text(encoding="utf-8")), time.perf_counter()
    made = {"figures": figures["cases"], "reproduced": tables(figures, False), "shared_gathers": tables(figures, True)}
    if wanted.json:
        print(json.dumps(made, indent=1))
        return 0
    for title, rows in made.items():
        print(f"\n{title}")
        print("  ".join(["case".ljust(20), *(name.ljust(28) for name in ("gib", *COLUMNS))]).rstrip())
        for row in rows:
            texts = [_joined(row.get(name, []), 2 if name == "gib" else 1) for name in ("gib", *COLUMNS)]
            print("  ".join([row["name"].ljust(20), *(text.ljust(28) for text in texts)]).rstrip())
    print(f"\n{time.perf_counter() - began:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
