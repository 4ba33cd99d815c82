"""Autograd under the engine does exactly what the machine says: executions of every layer, peak bytes, gradients."""
from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from megackpt.observe.memory_tracker import MemoryTracker
from megackpt.plan import ChunkPlan, Group
from megackpt.plan.chains import (
    Chain,
    ChainPlan,
    Drop,
    GraphPlan,
    Keep,
    ModuleGraph,
    Node,
    Stage,
    binomial,
    extra_advances,
    heterogeneous,
    least_budget,
    plan_graph,
    run,
    run_graph,
    uniform,
)
from megackpt.recompute import RngLedger, Stream, Tape, chain, dropout
from tests.plan.chains.oracle import all_segment_moves, figures

ROWS = 8


class Layer(nn.Module):
    """(x sin x) W with a frozen W: saves x and sin x, not its output."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5, requires_grad=False)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return (x * torch.sin(x)) @ self.weight


def stage_of(inputs: int, outputs: int, last: bool, cost: float = 1.0) -> Stage:
    """A layer in numbers.  Forward: sin x beside x sin x, then that beside the output.  Backward: the product's
    gradient beside the output's, then four tensors of the input's size.  The caller holds the last gradient."""
    a, b = 4 * ROWS * inputs, 4 * ROWS * outputs
    return Stage(
        output_bytes=b,
        tape_bytes=a + b,
        forward_cost=cost,
        gradient_bytes=0 if last else b,
        reads_output=False,
        forward_transient=max(a, 2 * a - b),
        tape_transient=a,
        backward_transient=2 * a if last else max(0, 2 * a - b),
    )


class Deep:
    """A chain of layers of the given widths, as modules and as numbers."""

    def __init__(self, widths: Sequence[int]) -> None:
        pairs = list(zip(widths, widths[1:], strict=False))
        self.layers = [Layer(*pair) for pair in pairs]
        stages = tuple(stage_of(*pair, last=i == len(pairs) - 1) for i, pair in enumerate(pairs))
        self.numbers = Chain(stages, input_gradient_bytes=4 * ROWS * widths[0])
        self.x, self.gradient = torch.randn(ROWS, widths[0]), torch.randn(ROWS, widths[-1])

    def step(self, groups: tuple[Group, ...], first: int = 0) -> tuple[Tensor, tuple[int, ...], int]:
        """Gradient of the input, executions of each layer, and peak bytes."""
        for layer in self.layers:
            layer.runs = 0
        x = self.x.clone().requires_grad_()
        with MemoryTracker() as tracker:
            with Tape(ChunkPlan(groups=groups)):
                end = get_gradient_edge(chain(list(enumerate(self.layers, first)), x))
            torch.autograd.backward((end,), (self.gradient,))
        assert x.grad is not None
        return x.grad, tuple(layer.runs for layer in self.layers), tracker.peak_bytes

    def check(self, plan: ChainPlan, first: int = 0, *, merged: bool = True) -> None:
        report = run(self.numbers, plan)
        gradient, runs, peak = self.step(plan.to_groups(first, merged=merged), first)
        assert torch.equal(gradient, self.step(())[0])
        assert runs == report.forwards
        assert peak == report.peak_bytes


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 5, 6, 8])
def test_binomial_plans_of_24_layers(slots: int) -> None:
    table = figures()["executed"]
    deep, plan = Deep([6] * 25), binomial(24, slots)
    deep.check(plan)
    assert sum(deep.step(plan.to_groups())[1]) == table["forwards"][str(slots)] == 24 + extra_advances(24, slots)


@pytest.mark.parametrize("length", [2, 3, 5, 10, 16, 32, 48])
def test_the_table_of_binomial_counts(length: int) -> None:
    table, deep = figures()["binomial"], Deep([4] * (length + 1))
    extra = table["rows"].get(str(length))
    for slots, expected in zip(table["slots"], extra, strict=True):
        if slots in (1, 2, 4, 16):
            assert sum(deep.step(binomial(length, slots).to_groups())[1]) == length + expected


def test_plans_of_unequal_layers() -> None:
    """What the planner gives from the least budget up, to the byte."""
    random = Random(1)
    for _ in range(3):
        deep = Deep([random.randint(1, 60) for _ in range(11)])
        low, high = least_budget(deep.numbers), run(deep.numbers, ChainPlan.keep_all(10)).peak_bytes
        for share in (0.0, 0.1, 0.3, 0.6, 1.0):
            budget = low + int(share * (high - low))
            plan = heterogeneous(deep.numbers, budget)
            deep.check(plan)
            assert deep.step(plan.to_groups())[2] <= budget


def test_the_table_of_unequal_chains() -> None:
    """Its plans are made for layers of tape 3 and 17; the executions are the same for layers that look different."""
    for row in figures()["heterogeneous"]["rows"]:
        length, deep = row["length"], Deep([3] * (row["length"] + 1))
        for first, _, executions in row["executions"]:
            plan = heterogeneous(Chain.uniform(length, tape_bytes=row["tape"]), first + 1)
            assert sum(deep.step(plan.to_groups())[1]) == executions


@pytest.mark.parametrize("merged", [True, False])
def test_any_plan(merged: bool) -> None:
    """Random trees, the last segment dropped too, replays that nest, layers numbered from 7."""
    random = Random(2)
    for _ in range(10):
        length = random.randint(1, 5)
        deep = Deep([random.randint(1, 60) for _ in range(length + 1)])
        plans = all_segment_moves(length)
        for moves in random.sample(plans, min(4, len(plans))):
            deep.check(ChainPlan(moves), 7, merged=merged)


def test_uniform_groups() -> None:
    deep = Deep([5] * 21)
    for in_flight in (1, 2):
        deep.check(uniform(20, 1, 3, in_flight).plan(20, in_flight))


def test_dropout_and_weights_under_a_binomial_plan() -> None:
    """Trained layers with dropout: every gradient and the stream's position are those of the plain run."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return x + dropout(torch.tanh(self.linear(x)), 0.3, stream)

    layers = list(enumerate(Noisy() for _ in range(24)))
    x0, results = torch.randn(5, 6), []
    for groups in ((), binomial(24, 3).to_groups(), binomial(24, 5).to_groups(merged=False)):
        ledger = RngLedger(defaults=False)
        stream = ledger.register(Stream("s", 5))
        x = x0.clone().requires_grad_()
        with Tape(ChunkPlan(groups=groups), ledger):
            y = chain(layers, x)
        y.square().sum().backward()
        gradients = [x.grad, *(p.grad for _, layer in layers for p in layer.parameters())]
        results.append((stream.position, [g.clone() for g in gradients if g is not None]))
        for _, layer in layers:
            layer.zero_grad()
    for position, gradients in results[1:]:
        assert position == results[0][0] == 24
        assert len(gradients) == 49 and all(map(torch.equal, gradients, results[0][1]))


def test_a_graph_of_two_towers() -> None:
    """Each segment runs as a chain of its own layers under one tape with the plan's groups."""
    widths = {"a": (8, 8), "b": (8, 8), "c": (8, 4), "d": (6, 9), "e": (9, 4), "f": (4, 7), "g": (7, 3)}
    reads = {"b": "a", "c": "b", "e": "d", "f": "ce", "g": "f"}
    modules = [Layer(*pair) for pair in widths.values()]
    nodes = [Node(n, stage_of(*w, last=False), tuple(reads.get(n, ""))) for n, w in widths.items()]
    graph, numbered = ModuleGraph(tuple(nodes)), list(enumerate(modules))
    x, y = torch.randn(ROWS, 8), torch.randn(ROWS, 6)

    def step(plan: GraphPlan) -> tuple[list[Tensor], tuple[int, ...]]:
        for module in modules:
            module.runs = 0
        inputs = [t.clone().requires_grad_() for t in (x, y)]
        with Tape(ChunkPlan(groups=plan.to_groups())):
            joined = chain(numbered[:3], inputs[0]) + chain(numbered[3:5], inputs[1])
            chain(numbered[5:], joined).sum().backward()
        return [t.grad for t in inputs if t.grad is not None], tuple(module.runs for module in modules)

    everything = plan_graph(graph, 10**9)
    lean = plan_graph(graph, int(0.55 * run_graph(graph, everything).peak_bytes))
    plans = [everything, lean, GraphPlan((binomial(3, 1), ChainPlan((Drop(2, (Keep(), Keep())),)), binomial(2, 1)))]
    reference = step(everything)[0]
    for plan in plans:
        gradients, runs = step(plan)
        assert runs == run_graph(graph, plan).forwards
        assert all(map(torch.equal, gradients, reference))
    assert [run_graph(graph, plan).extra_forwards > 0 for plan in plans] == [False, True, True]
