"""Predicted and measured seconds of a step, side by side, on this machine.

    megackpt calibrate --out machine.json
    python tools/bench_prediction.py --machine machine.json
    python tools/bench_prediction.py --machine machine.json --only "hidden 256"

Each case is planned with the flags that are then trained with, by torchrun, one thread per rank.  Measured is the
median iteration after the first ones.  A second table has what replay costs: the time of a run with full recompute
over that of the same run without.  Needs no GPU; about four minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # runs from a clone, installed or not

from megackpt.cli.plan import read_own  # noqa: E402
from megackpt.cli.plan_inputs import read_inputs  # noqa: E402
from megackpt.plan.evaluate import Evaluator  # noqa: E402
from tools.bench_common import machine, table, write_json  # noqa: E402

COMMON = "--vocab-size 509 --micro-batch-size 2 --global-batch-size 16 --hidden-dropout 0 --attention-dropout 0"
LLAMA = (
    "--group-query-attention --num-query-groups 4 --position-embedding-type rope --normalization RMSNorm --swiglu"
    " --disable-bias-linear --untie-embeddings-and-output-weights"
)
FULL = "--recompute-granularity full"


@dataclass(frozen=True)
class Model:
    """A model's flags, and how many iterations of it are trained (a quarter of them before any counts)."""

    flags: str
    iterations: int


MODELS = {
    "T0": Model("--num-layers 4 --hidden-size 96 --num-attention-heads 8 --ffn-hidden-size 336 --seq-length 40", 60),
    "hidden 256": Model("--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 64", 40),
    "Llama": Model(
        f"--num-layers 4 --hidden-size 128 --num-attention-heads 8 --ffn-hidden-size 352 --seq-length 96 {LLAMA}"
        " --micro-batch-size 1 --global-batch-size 12",
        40,
    ),
    "vocabulary 8192": Model(
        "--num-layers 6 --hidden-size 256 --num-attention-heads 8 --seq-length 256 --vocab-size 8192"
        " --untie-embeddings-and-output-weights",
        8,
    ),
}
LAYOUTS = {
    "pp 1": (1, ""),
    "pp 2": (2, "--pipeline-model-parallel-size 2"),
    "pp 4": (4, "--pipeline-model-parallel-size 4"),
    "tp 2": (2, "--tensor-model-parallel-size 2"),
}
SINGLE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Case:
    """One model in one layout, with full recompute or without any."""

    model: str
    layout: str
    full: bool

    @property
    def name(self) -> str:
        return f"{self.model}, {self.layout}" + ", full" * self.full

    @property
    def world(self) -> int:
        return LAYOUTS[self.layout][0]

    @property
    def words(self) -> list[str]:
        flags = (COMMON, "--device cpu", MODELS[self.model].flags, LAYOUTS[self.layout][1], FULL * self.full)
        return " ".join(flags).split()

    def predicted(self, machine_file: str) -> float:
        own, words = read_own([*self.words, "--world-size", str(self.world), "--machine", machine_file])
        inputs = read_inputs(own, words, {})
        return Evaluator(inputs.model, inputs.layout, inputs.machine)(inputs.plan).step_seconds

    def measured(self) -> list[float]:
        """Seconds of every iteration that counts."""
        iterations = MODELS[self.model].iterations
        with tempfile.TemporaryDirectory() as folder:
            metrics = Path(folder, "metrics.jsonl")
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
            command += [str(self.world), str(ROOT / "pretrain_gpt.py"), *self.words, "--mock-data", "--lr", "1e-4"]
            command += ["--lr-decay-style", "constant", "--train-iters", str(iterations), "--eval-iters", "0"]
            command += ["--num-workers", "0", "--log-interval", "1", "--metrics-file", str(metrics)]
            environment = {**os.environ, **SINGLE_THREAD, "PYTHONPATH": str(ROOT)}
            subprocess.run(command, check=True, env=environment, cwd=folder, capture_output=True)
            lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        return [line["iteration_time_s"] for line in lines if "lm_loss" in line][iterations // 4 :]


@dataclass(frozen=True)
class Result:
    """Of one case, in seconds."""

    case: Case
    predicted: float
    measured: list[float]

    @property
    def typical(self) -> float:
        return statistics.median(self.measured)


def cases() -> list[Case]:
    """Every model in every layout, without replay and with it."""
    return [Case(model, layout, full) for model in MODELS for layout in LAYOUTS for full in (False, True)]


def report(results: Sequence[Result]) -> str:
    """Both tables."""
    rows = [
        (r.case.name, f"{r.predicted * 1e3:.1f}", f"{r.typical * 1e3:.1f}", f"{min(r.measured) * 1e3:.1f}",
         f"{r.predicted / r.typical - 1:+.0%}")
        for r in results
    ]  # fmt: skip
    text = table(("case", "predicted ms", "measured ms", "fastest ms", "off by"), rows)
    kept = {(r.case.model, r.case.layout): r for r in results if not r.case.full}
    ratios = []
    for full in results:
        if full.case.full and (none := kept.get((full.case.model, full.case.layout))):
            said, seen = full.predicted / none.predicted, full.typical / none.typical
            ratios.append((f"{full.case.model}, {full.case.layout}", f"{said:.3f}", f"{seen:.3f}",
                           f"{100 * (said - seen):+.1f}"))  # fmt: skip
    if ratios:
        text += "\n\n" + table(("full over none", "predicted", "measured", "points"), ratios)
    return text


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", required=True, help="file of megackpt calibrate, or a name of the table")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--json", help="file for everything")
    own = parser.parse_args(argv)
    results = []
    for case in cases():
        if own.only not in case.name:
            continue
        results.append(Result(case, case.predicted(own.machine), case.measured()))
        got = results[-1]
        said = f"{case.name}: predicted {got.predicted * 1e3:.1f} ms, measured {got.typical * 1e3:.1f} ms"
        print(said, file=sys.stderr, flush=True)
    print(report(results))
    if own.json:
        rows = [{"case": r.case.name, "predicted_s": r.predicted, "measured_s": r.measured} for r in results]
        write_json(own.json, {"machine": machine(), "cases": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
