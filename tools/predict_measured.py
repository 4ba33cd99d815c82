"""Predicted against measured memory of published Megatron-LM runs: a table, and the error's median.

    python tools/predict_measured.py [FILE] [--terms]

FILE holds cases as in tests/data/measured_memory.json: launch arguments, hardware, GPUs, and two allocator counters of
the last rank (`alloc` between steps, `peak`).  A case may name its `world_size` where that is not `gpus`.

Where the data-parallel size that follows from the GPUs contradicts the measured state of a sharded optimizer, the row
says which size the state belongs to, and a second row predicts with that one.  Rows whose attention kernel is not
named by the arguments also show the peak under the other reading.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megackpt.plan.megatron import MegatronMemory, MegatronRun, predict_memory, read_arguments
from megackpt.plan.megatron.memory import parameter_count

CASES = Path(__file__).resolve().parent.parent / "tests" / "data" / "measured_memory.json"
CONTRADICTION = 0.2  # of the state: beyond any rounding, buffer or workspace
LIMIT = 0.05


@dataclass(frozen=True)
class Row:
    """One prediction beside its measurement; ``memory`` is None where the run is not modelled."""

    case: Mapping[str, Any]
    memory: MegatronMemory | None
    other_peak: int | None = None  # with the attention kernel read the other way
    note: str = ""

    @property
    def state_error(self) -> float:
        return 0.0 if self.memory is None else self.memory.between_bytes / self.case["alloc"] - 1

    @property
    def peak_error(self) -> float:
        return 0.0 if self.memory is None else self.memory.peak_bytes / self.case["peak"] - 1


def rows_of(case: Mapping[str, Any]) -> list[Row]:
    """One row, or two where the arguments leave the data-parallel size open."""
    run = read_arguments(case["args"], int(case.get("world_size") or case["gpus"]), case["hardware"])
    if run.not_modelled:
        return [Row(case, None, note="; ".join(f"{flag}: needs {why}" for flag, why in run.not_modelled.items()))]
    memory, other = predict_memory(run), None
    if not run.attention_is_named:
        other = predict_memory(run.with_attention("unfused")).peak_bytes
    row = Row(case, memory, other)
    if run.sharded_optimizer and row.state_error > CONTRADICTION:
        d = implied_copies(run, memory, int(case["alloc"]))
        note = f"12/d: {case['gpus']} GPUs give d = {run.d}, the measured state is that of d = {d}"
        return [Row(case, memory, other, note), Row(case, predict_memory(run.with_copies(d)), None, f"with d = {d}")]
    return [row]


def implied_copies(run: MegatronRun, memory: MegatronMemory, alloc: int) -> int:
    """The number of optimizer shards whose state comes nearest to what was measured: doublings of the node's."""
    rest = memory.between_bytes - memory.between["state"]
    count = parameter_count(run)
    sizes = [run.d * 2**k for k in range(1, 12)]
    return min(sizes, key=lambda d: abs(count * (6 + 12 / d) + rest - alloc))


def table(cases: Sequence[Mapping[str, Any]], *, terms: bool = False) -> tuple[str, list[Row]]:
    rows = [row for case in cases for row in rows_of(case)]
    width = max(len(row.case["case"]) for row in rows)
    lines = [
        f"{'case':{width}}  gpu   state GB  measured  error   peak GB  measured  error   unfused",
    ]
    for row in rows:
        lines.append(_line(row, width))
        if terms and row.memory is not None:
            parts = (f"{name} {value / 1e9:.3f}" for name, value in row.memory.peak.items() if value)
            lines.append(" " * width + "  peak: " + ", ".join(parts))
    return "\n".join(lines), rows


def _line(row: Row, width: int) -> str:
    head = f"{row.case['case']:{width}}  {row.case['hardware']:5}"
    if row.memory is None:
        return f"{head} not modelled: {row.note}"
    state, peak = row.memory.between_bytes / 1e9, row.memory.peak_bytes / 1e9
    other = "" if row.other_peak is None else f"{row.other_peak / 1e9:8.3f}"
    return (
        f"{head} {state:8.3f}  {row.case['alloc'] / 1e9:8.3f} {row.state_error:+6.1%}"
        f"  {peak:8.3f}  {row.case['peak'] / 1e9:8.3f} {row.peak_error:+6.1%}  {other:8}  {row.note}"
    ).rstrip()


def summary(rows: Sequence[Row]) -> str:
    """Medians over rows that are modelled and not replaced by a second reading."""
    counted = [row for row in rows if row.memory is not None and not row.note.startswith("12/d")]
    if not counted:
        return "no case is modelled"
    peak = [abs(row.peak_error) for row in counted]
    state = [abs(row.state_error) for row in counted]
    open_rows = [row.case["case"] for row in rows if row not in counted]
    text = (
        f"{len(counted)} rows: peak median {statistics.median(peak):.2%}, worst {max(peak):.2%};"
        f" state median {statistics.median(state):.2%}, worst {max(state):.2%}"
    )
    beyond = [row.case["case"] for row in counted if abs(row.peak_error) > LIMIT]
    text += f"; {len(beyond)} peaks beyond {LIMIT:.0%}" + (f" ({', '.join(beyond)})" if beyond else "")
    return text + (f"; explained by a named term: {', '.join(open_rows)}" if open_rows else "")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=CASES, help="cases (default: tests/data)")
    parser.add_argument("--terms", action="store_true", help="also print every term of the peak")
    arguments = parser.parse_args(argv)
    data = json.loads(arguments.file.read_text(encoding="utf-8"))
    text, rows = table(data["cases"] if isinstance(data, dict) else data, terms=arguments.terms)
    print(text)
    print(summary(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
