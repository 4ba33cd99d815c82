"""Predicted and measured seconds of a step, side by side, on this machine.

    megackpt calibrate --out machine.json
    python tools/bench_prediction.py --machine machine.json
    python tools/bench_prediction.py --machine machine.json --only "hidden 256"

Each model is planned in every layout, without recompute and with full, and trained on as many processes of one thread.
A run changes its plan every few steps (no bit of the weights changes by it), so that both plans meet the same machine;
measured is the median step of each.  A second table has what replay costs: a step with it over one without.  Needs no
GPU; about five minutes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # runs from a clone, installed or not

from megackpt.cli.plan import read_own  # noqa: E402
from megackpt.cli.plan_inputs import read_inputs  # noqa: E402
from megackpt.config.parse import parse  # noqa: E402
from megackpt.mesh.device import DeviceSeam  # noqa: E402
from megackpt.observe.numbers import split_of  # noqa: E402
from megackpt.plan.evaluate import Evaluator  # noqa: E402
from megackpt.train.build import build, build_plan  # noqa: E402
from megackpt.train.loop import loader  # noqa: E402
from megackpt.train.step import Stepper  # noqa: E402
from tools.bench_common import machine, on_ranks, table, write_json  # noqa: E402

COMMON = "--vocab-size 509 --micro-batch-size 2 --global-batch-size 16 --hidden-dropout 0 --attention-dropout 0"
LLAMA = (
    "--group-query-attention --num-query-groups 4 --position-embedding-type rope --normalization RMSNorm --swiglu"
    " --disable-bias-linear --untie-embeddings-and-output-weights"
)
PLANS = {"none": "", "full": "--recompute-granularity full"}
TRAINED = "--mock-data --num-workers 0 --lr 1e-4 --lr-decay-style constant --train-iters 1000000 --eval-iters 0"
AT_ONCE = 4  # steps under one plan; the first does not count
FIRST = 1  # rounds that do not count


@dataclass(frozen=True)
class Model:
    """A model's flags, and how often each plan of it has its turn."""

    flags: str
    rounds: int


MODELS = {
    "T0": Model("--num-layers 4 --hidden-size 96 --num-attention-heads 8 --ffn-hidden-size 336 --seq-length 40", 20),
    "hidden 256": Model("--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 64", 10),
    "Llama": Model(
        f"--num-layers 4 --hidden-size 128 --num-attention-heads 8 --ffn-hidden-size 352 --seq-length 96 {LLAMA}"
        " --micro-batch-size 1 --global-batch-size 12",
        12,
    ),
    "vocabulary 8192": Model(
        "--num-layers 6 --hidden-size 256 --num-attention-heads 8 --seq-length 256 --vocab-size 8192"
        " --untie-embeddings-and-output-weights",
        2,
    ),
}
LAYOUTS = {
    "pp 1": (1, ""),
    "pp 2": (2, "--pipeline-model-parallel-size 2"),
    "pp 4": (4, "--pipeline-model-parallel-size 4"),
    "tp 2": (2, "--tensor-model-parallel-size 2"),
}


@dataclass(frozen=True)
class Case:
    """One model in one layout."""

    model: str
    layout: str

    @property
    def name(self) -> str:
        return f"{self.model}, {self.layout}"

    @property
    def world(self) -> int:
        return LAYOUTS[self.layout][0]

    def words(self, plan: str) -> list[str]:
        flags = (COMMON, "--device cpu", MODELS[self.model].flags, LAYOUTS[self.layout][1], PLANS[plan])
        return " ".join(flags).split()

    def predicted(self, plan: str, machine_file: str) -> float:
        own, words = read_own([*self.words(plan), "--world-size", str(self.world), "--machine", machine_file])
        inputs = read_inputs(own, words, {})
        return Evaluator(inputs.model, inputs.layout, inputs.machine)(inputs.plan).step_seconds

    def measured(self) -> dict[str, list[float]]:
        """Seconds of every step that counts, by plan."""
        words = {plan: [*self.words(plan), *TRAINED.split()] for plan in PLANS}
        found: dict[str, list[float]] = on_ranks(self.world, on_rank, words, self.world, MODELS[self.model].rounds)[0]
        return found


def on_rank(words: dict[str, list[str]], world: int, rounds: int) -> dict[str, list[float]]:
    """One rank trains under the plans of all command lines in turns; the default group must exist."""
    seam = DeviceSeam("cpu", torch.device("cpu"), "gloo")
    configs = {plan: parse(line, {}, world) for plan, line in words.items()}
    trainer = build(configs["none"], seam)
    plans = {plan: build_plan(config, split_of(config)) for plan, config in configs.items()}
    stepper, seconds = Stepper(trainer), {plan: list[float]() for plan in plans}
    with loader(trainer, trainer.datasets.train, 0) as batches:
        for turn in range(FIRST + rounds):
            for name in plans if turn % 2 == 0 else reversed(plans):
                stepper.trainer = replace(trainer, plan=plans[name])
                for step in range(AT_ONCE):
                    start = time.perf_counter()
                    stepper.train(batches, 0)
                    if turn >= FIRST and step:
                        seconds[name].append(time.perf_counter() - start)
    return seconds


@dataclass(frozen=True)
class Result:
    """Of one case, in seconds, by plan."""

    case: Case
    predicted: dict[str, float]
    measured: dict[str, list[float]]

    @property
    def typical(self) -> dict[str, float]:
        return {plan: statistics.median(seconds) for plan, seconds in self.measured.items()}

    @property
    def ratios(self) -> tuple[float, float]:
        """Full over none, as predicted and as measured."""
        return self.predicted["full"] / self.predicted["none"], self.typical["full"] / self.typical["none"]


def cases() -> list[Case]:
    """Every model in every layout."""
    return [Case(model, layout) for model in MODELS for layout in LAYOUTS]


def report(results: Sequence[Result]) -> str:
    """Both tables."""
    rows = [
        (f"{r.case.name}, {plan}", f"{said * 1e3:.1f}", f"{r.typical[plan] * 1e3:.1f}",
         f"{min(r.measured[plan]) * 1e3:.1f}", f"{said / r.typical[plan] - 1:+.0%}")
        for r in results for plan, said in r.predicted.items()
    ]  # fmt: skip
    ratios = [
        (r.case.name, f"{said:.3f}", f"{seen:.3f}", f"{100 * (said - seen):+.1f}")
        for r in results for said, seen in [r.ratios]
    ]  # fmt: skip
    times = table(("case", "predicted ms", "measured ms", "fastest ms", "off by"), rows)
    return times + "\n\n" + table(("full over none", "predicted", "measured", "points"), ratios)


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
        result = Result(case, {plan: case.predicted(plan, own.machine) for plan in PLANS}, case.measured())
        results.append(result)
        for plan, said in result.predicted.items():
            line = f"{case.name}, {plan}: predicted {said * 1e3:.1f} ms, measured {result.typical[plan] * 1e3:.1f} ms"
            print(line, file=sys.stderr, flush=True)
    print(report(results))
    if own.json:
        rows = [{"case": r.case.name, "predicted_s": r.predicted, "measured_s": r.measured} for r in results]
        write_json(own.json, {"machine": machine(), "cases": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
