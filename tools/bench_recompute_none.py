"""What an open tape costs while it does nothing: the trainer's layers under policy none against no tape at all.

A per mille of a step is less than what one run differs from the next.  So the two run in alternation, A B B A, in one
process; what one such block gives is one ratio of processor times, and what is reported is their median, with the
quartiles to judge it by.
"""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tools.bench_plain import Model
from tools.bench_stacks import OurStack, Training


@dataclass(frozen=True)
class Job:
    """``pairs`` ratios, each of ``turns`` times A B B A."""

    model: Model
    micro_batch: int = 2
    pairs: int = 24
    turns: int = 16


def measure(job: Job) -> dict[str, Any]:
    """Ratios of processor time, tape to no tape, per pair; their quartiles; milliseconds of a step without tape."""
    model = job.model
    x = torch.randn(model.seq, job.micro_batch, model.hidden, generator=torch.Generator().manual_seed(1))
    slope = torch.ones_like(x) / x.numel()
    stack = OurStack(model)
    parameters = list(stack.blocks.parameters())
    with_tape = Training(partial(stack, plan=stack.plan("none")), parameters, x, slope)
    without = Training(partial(stack, plan=None), parameters, x, slope)
    for training in (without, with_tape):
        training.repeat(2)
    ratios, plain = [], []
    for _ in range(job.pairs):
        gc.collect()
        seconds = {False: 0.0, True: 0.0}
        for taped in (False, True, True, False) * job.turns:
            start = time.process_time()
            (with_tape if taped else without).repeat(1)
            seconds[taped] += time.process_time() - start
        ratios.append(seconds[True] / seconds[False])
        plain.append(seconds[False] / (2 * job.turns))
    low, median, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return {"ratios": ratios, "quartiles": [low, median, high], "plain_ms": statistics.median(plain) * 1e3}


HEADER = ("policy none / no tape", "lower quartile", "upper quartile", "between them", "pairs", "step without tape, ms")


def rows_of(measured: dict[str, Any]) -> list[list[str]]:
    low, median, high = measured["quartiles"]
    return [[
        f"{median:.4f}", f"{low:.4f}", f"{high:.4f}", f"{high - low:.4f}", str(len(measured["ratios"])),
        f"{measured['plain_ms']:.1f}",
    ]]  # fmt: skip
