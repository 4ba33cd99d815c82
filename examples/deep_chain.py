"""A thousand layers whose activations fit into a logarithmic number of slots.

A chain of L layers keeps L tapes for its backward. A binomial schedule keeps the inputs of a few segments instead and
makes the tapes anew, segment by segment, each from the nearest input that it kept. With s slots no layer runs more
than r extra times, where r is the least number with C(s + r, s) >= L; together the layers run

    L + t(L, s) times,   t(L, s) = r L - C(s + r, s + 1)          (Griewank & Walther 2000)

so with s = log2(L) both the memory and the work per layer grow with log(L) only. This script runs it under autograd and
prints what it counts beside what the formula and the abstract machine say beforehand:

    python examples/deep_chain.py
    python examples/deep_chain.py --layers 300 --slots 1 3 9 --width 32
"""
from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from megackpt.observe.memory_tracker import MemoryTracker
from megackpt.plan import ChunkPlan
from megackpt.plan.chains import Chain, ChainPlan, Stage, binomial, extra_advances, run
from megackpt.recompute import Tape, chain


class Layer(nn.Module):
    """x + tanh(x W). Beside its input, autograd saves the tanh for its backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return x + torch.tanh(x @ self.weight)


def as_chain(layers: int, rows: int, width: int) -> Chain:
    """The layers in numbers, for the planner and the machine. One activation: ``rows * width`` floats."""
    one, weight = 4 * rows * width, 4 * width * width
    stage = Stage(
        output_bytes=one,
        tape_bytes=2 * one,  # the tanh and the output
        reads_output=False,  # the sum saves nothing
        gradient_bytes=one,
        forward_transient=one,  # the tanh, gone when the sum is made
        backward_transient=weight,  # the weight's gradient before it is added up
    )
    last = Stage(one, 2 * one, reads_output=False, forward_transient=one, backward_transient=weight)
    return Chain((*[stage] * (layers - 1), last), input_gradient_bytes=one)


@dataclass(frozen=True)
class Row:
    slots: int | None  # None: everything is kept
    runs: int
    predicted_runs: int
    peak: int
    predicted_peak: int
    seconds: float
    exact: bool  # every gradient equals that of the run that keeps everything, bit for bit


def train_step(
    layers: list[tuple[int, Layer]], x: Tensor, gradient: Tensor, plan: ChainPlan
) -> tuple[int, list[Tensor]]:
    """Forward and backward under the plan: peak bytes, and the gradients of input and weights."""
    for _, layer in layers:
        layer.weight.grad = torch.zeros_like(layer.weight)  # there before we measure: only activations are counted
        layer.runs = 0
    x = x.clone().requires_grad_()
    with MemoryTracker() as tracker:
        with Tape(ChunkPlan(groups=plan.to_groups())):
            end = get_gradient_edge(chain(layers, x))  # backward needs the output's node, not the output
        torch.autograd.backward((end,), (gradient,))
    gradients = [x.grad, *(layer.weight.grad for _, layer in layers)]
    return tracker.peak_bytes, [g for g in gradients if g is not None]


def measure(length: int, slots: Sequence[int], rows: int, width: int) -> list[Row]:
    layers = list(enumerate(Layer(width) for _ in range(length)))
    x, gradient = torch.randn(rows, width), torch.randn(rows, width)
    numbers = as_chain(length, rows, width)
    reference: list[Tensor] = []
    table = []
    for s in (None, *slots):
        plan = ChainPlan.keep_all(length) if s is None else binomial(length, s)
        expected = length if s is None else length + extra_advances(length, s)
        report = run(numbers, plan)
        start = time.perf_counter()
        peak, gradients = train_step(layers, x, gradient, plan)
        seconds = time.perf_counter() - start
        reference = reference or gradients
        exact = all(map(torch.equal, gradients, reference))
        runs = sum(layer.runs for _, layer in layers)
        table.append(Row(s, runs, expected, peak, report.peak_bytes, seconds, exact))
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Deep chains under a logarithmic number of slots.")
    parser.add_argument("--layers", type=int, default=1000)
    parser.add_argument("--slots", type=int, nargs="+", help="default: half of log2(layers), log2(layers), twice that")
    parser.add_argument("--rows", type=int, default=16, help="rows of an activation")
    parser.add_argument("--width", type=int, default=16, help="columns of an activation")
    options = parser.parse_args(arguments)
    if min(options.layers, options.rows, options.width, *(options.slots or [1])) < 1:
        parser.error("--layers, --slots, --rows and --width are at least 1")
    log = max(1, math.ceil(math.log2(options.layers)))
    slots = options.slots or [max(1, log // 2), log, 2 * log]
    torch.manual_seed(0)
    torch.set_num_threads(1)

    table = measure(options.layers, slots, options.rows, options.width)
    print(f"{options.layers} layers, one activation {4 * options.rows * options.width:,} bytes")
    print("  slots  layer runs   formula  per layer  peak bytes   machine   of all  seconds  gradients")
    for row in table:
        print(
            f"{'all' if row.slots is None else row.slots:>7}  {row.runs:>10,}  {row.predicted_runs:>8,}"
            f"  {row.runs / options.layers:>9.2f}  {row.peak:>10,}  {row.predicted_peak:>8,}"
            f"  {row.peak / table[0].peak:>6.1%}  {row.seconds:>7.2f}  {'equal' if row.exact else 'DIFFERENT'}"
        )
    right = all(r.exact and r.runs == r.predicted_runs and r.peak == r.predicted_peak for r in table)
    if not right:
        print("a count differs from its prediction", file=sys.stderr)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
