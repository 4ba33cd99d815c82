"""Predicted and measured seconds of a step, side by side, on this machine.

    megackpt calibrate --out machine.json
    python tools/bench_prediction.py --machine machine.json

Each case is planned with the flags that are then trained with, by torchrun, one thread per rank.  Measured is the
median iteration after the first ten.  Needs no GPU; about a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # runs from a clone, installed or not

from megackpt.cli.plan_inputs import read_inputs  # noqa: E402
from megackpt.plan.evaluate import Evaluator  # noqa: E402
from tools.bench_common import machine, table, write_json  # noqa: E402

COMMON = (
    "--num-layers 4 --vocab-size 509 --micro-batch-size 2 --global-batch-size 16 --hidden-dropout 0"
    " --attention-dropout 0 --device cpu --position-embedding-type learned_absolute"
)
MODELS = {
    "T0": "--hidden-size 96 --num-attention-heads 8 --ffn-hidden-size 336 --seq-length 40",
    "hidden 256": "--hidden-size 256 --num-attention-heads 8 --ffn-hidden-size 1024 --seq-length 64",
}
LAYOUTS = {
    "pp 1": (1, ""),
    "pp 2": (2, "--pipeline-model-parallel-size 2"),
    "pp 2, full": (2, "--pipeline-model-parallel-size 2 --recompute-granularity full"),
    "tp 2": (2, "--tensor-model-parallel-size 2"),
}
FIRST = 10  # iterations that do not count
SINGLE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Case:
    """One model in one layout."""

    name: str
    world: int
    words: tuple[str, ...]

    def predicted(self, machine_file: str) -> float:
        own = Namespace(script=None, world_size=self.world, machine=machine_file, memory_budget_gib=None)
        inputs = read_inputs(own, self.words, {})
        return Evaluator(inputs.model, inputs.layout, inputs.machine)(inputs.plan).step_seconds

    def measured(self, iterations: int) -> list[float]:
        """Seconds of every iteration that counts."""
        with tempfile.TemporaryDirectory() as folder:
            metrics = Path(folder, "metrics.jsonl")
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
            command += [str(self.world), str(ROOT / "pretrain_gpt.py"), *self.words, "--mock-data", "--lr", "1e-4"]
            command += ["--lr-decay-style", "constant", "--train-iters", str(FIRST + iterations), "--eval-iters", "0"]
            command += ["--num-workers", "0", "--log-interval", "1", "--metrics-file", str(metrics)]
            environment = {**os.environ, **SINGLE_THREAD, "PYTHONPATH": str(ROOT)}
            subprocess.run(command, check=True, env=environment, cwd=folder, capture_output=True)
            lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        return [line["iteration_time_s"] for line in lines if "lm_loss" in line][FIRST:]


def cases() -> list[Case]:
    """Every model in every layout."""
    return [
        Case(f"{model}, {layout}", world, (*COMMON.split(), *sizes.split(), *more.split()))
        for model, sizes in MODELS.items()
        for layout, (world, more) in LAYOUTS.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", required=True, help="file of megackpt calibrate, or a name of the table")
    parser.add_argument("--iterations", type=int, default=40, help="that count, of each case (default %(default)s)")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--json", help="file for everything")
    own = parser.parse_args(argv)
    rows, results = [], []
    for case in cases():
        if own.only not in case.name:
            continue
        predicted, seconds = case.predicted(own.machine), case.measured(own.iterations)
        middle = statistics.median(seconds)
        rows.append((case.name, f"{predicted * 1e3:.1f}", f"{middle * 1e3:.1f}", f"{min(seconds) * 1e3:.1f}",
                     f"{predicted / middle - 1:+.0%}"))  # fmt: skip
        results.append({"case": case.name, "predicted_s": predicted, "measured_s": seconds})
        print(" ".join((f"{case.name}: predicted {rows[-1][1]} ms, measured {rows[-1][2]} ms,"
                        f" fastest {rows[-1][3]} ms").split()), file=sys.stderr, flush=True)  # fmt: skip
    print(table(("case", "predicted ms", "measured ms", "fastest ms", "off by"), rows))
    if own.json:
        write_json(own.json, {"machine": machine(), "cases": results})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
