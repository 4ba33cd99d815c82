"""``megackpt plan``: does it fit, how fast will it be, and what is the least recompute that makes it fit?

Needs no GPU and does not import torch (but for --traced).
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from megackpt.cli.plan_inputs import Inputs, read_inputs
from megackpt.config.errors import UsageError
from megackpt.config.parse import refuse
from megackpt.config.recompute import MOST_GIB
from megackpt.plan.accelerators import MACHINES
from megackpt.plan.predicted import predicted
from megackpt.plan.report import Report, report

DOES_NOT_FIT = 1


def main(argv: Sequence[str]) -> int:
    """0 if the flags as given fit, 1 if they do not, 2 (SystemExit) for a command line that cannot be planned."""
    own, words = read_own(argv)
    try:
        inputs = read_inputs(own, words, os.environ)
        made = report_of(inputs)
        _write(made, own)
        traced = "" if own.traced is None else _traced(inputs, own.traced)
    except UsageError as error:
        refuse(error, 0)
    from megackpt.observe.plan_table import table

    print(table(made) + traced, end="")
    return 0 if made.fits else DOES_NOT_FIT


def read_own(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """This command's own flags, and the words that are the trainer's."""
    parser = argparse.ArgumentParser(
        prog="megackpt plan",
        allow_abbrev=False,
        usage="megackpt plan [run.sh | --config FILE.yaml | flags of pretrain_gpt.py] [options]",
        description="Memory and time of a run before it starts. Exit code 1 if the flags as given do not fit.",
    )
    parser.add_argument("--world-size", type=int, metavar="N", help="ranks of the whole run")
    parser.add_argument(
        "--machine", default="h100-80gb", metavar="NAME",
        help=f"{', '.join(MACHINES)}, or a JSON file with the same fields (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--memory-budget-gib", type=float, metavar="X", help="memory of a rank to plan for (default: the machine's)"
    )
    parser.add_argument(
        "--plan-split", choices=("even", "auto"), default="even",
        help="auto: the recommended plan may have other numbers of layers per stage",
    )
    parser.add_argument(
        "--plan-slots", choices=("on", "off"), default="on",
        help="on: it may keep more of some micro-batches in flight than of others",
    )
    parser.add_argument(
        "--plan-ahead", choices=("on", "off"), default="on",
        help="on: it may rebuild while a gradient is on its way",
    )
    parser.add_argument("--plan-offload", action="store_true", help="it may send activations to host memory")
    parser.add_argument("--json", metavar="FILE", help="write everything (docs/plan.md)")
    parser.add_argument("--html", metavar="FILE", help="write pictures")
    parser.add_argument("--trace", metavar="FILE", help="write a trace for Perfetto or chrome://tracing")
    parser.add_argument("--timeline", metavar="DIR", help="write the predicted event record (megackpt compare)")
    parser.add_argument("--plan-out", metavar="FILE", help="write the recommended plan, for --recompute-plan")
    parser.add_argument(
        "--traced", type=int, nargs="?", const=0, metavar="RANK",
        help="also trace the model of a rank (default 0) on fake tensors and compare every step with the plan's figures"
    )  # fmt: skip
    script, words = _script(list(argv))
    own, rest = parser.parse_known_args(words)
    own.script = script
    if own.world_size is not None and own.world_size < 1:
        parser.error(f"--world-size must be at least 1; got {own.world_size}")
    if own.memory_budget_gib is not None and not 0 < own.memory_budget_gib <= MOST_GIB:
        parser.error(f"--memory-budget-gib must be above 0 and at most {MOST_GIB:,}; got {own.memory_budget_gib}")
    if own.traced is not None and own.traced < 0:
        parser.error(f"--traced must be a rank, 0 or more; got {own.traced}")
    return own, rest


def _script(words: list[str]) -> tuple[str | None, list[str]]:
    """A launch script is the first word."""
    if words and not words[0].startswith("-"):
        return words[0], words[1:]
    return None, words


def make_report(own: argparse.Namespace, words: Sequence[str]) -> Report:
    """Raises UsageError."""
    return report_of(read_inputs(own, words, os.environ))


def report_of(inputs: Inputs) -> Report:
    """Raises UsageError."""
    try:
        return report(
            inputs.model, inputs.layout, inputs.plan, inputs.machine, inputs.budget_bytes, notices=inputs.notices,
            options=inputs.options,
        )
    except ValueError as error:
        raise UsageError(f"{error}.") from error


def _traced(inputs: Inputs, rank: int) -> str:
    """What the model says to the plan's figures; needs torch, so it is loaded for this alone."""
    from megackpt.train.traced import compare

    ranks = inputs.config.parallel.world_size
    if rank >= ranks:
        raise UsageError(f"--traced {rank}: the run has {ranks} ranks, 0 to {ranks - 1}.")
    return "\n" + compare(inputs.config, inputs.vocab, rank) + "\n"


def _write(made: Report, own: argparse.Namespace) -> None:
    texts: dict[str, str] = {}
    if own.json:
        texts[own.json] = json.dumps(made.to_json(), indent=1) + "\n"
    if own.html:
        from megackpt.observe.plan_html import page

        texts[own.html] = page(made)
    if own.trace:
        from megackpt.observe.plan_trace import trace

        texts[own.trace] = json.dumps(trace(made))
    if own.plan_out:
        if made.best is None:
            raise UsageError(f"--plan-out {own.plan_out}: there is no plan that fits. {made.why_not}.")
        texts[own.plan_out] = made.best.plan.dumps() + "\n"
    if own.timeline:
        try:
            predicted(made.given).write(own.timeline)
        except OSError as error:
            raise UsageError(f"--timeline {own.timeline} cannot be written: {error.strerror or error}.") from None
    for name, text in texts.items():
        try:
            Path(name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{name} cannot be written: {error.strerror or error}.") from None
