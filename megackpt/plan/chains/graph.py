"""Graphs of modules whose branches part and join: cut at the joints into chains, and a machine for their plans.

Nodes stand in the order in which they run.  A *segment* is a run of nodes each of which reads only the one before it,
and is the only reader of it; so every output at which branches part or join ends a segment.  These outputs are
boundaries: held from when they are made until the backward of their own segment begins.  Within a segment any chain
plan may be followed.  The backward takes the segments in the reverse of their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megackpt.plan.chains.machine import run
from megackpt.plan.chains.types import Chain, ChainPlan, Stage
from megackpt.plan.decision import Group


@dataclass(frozen=True)
class Node:
    """A module: its numbers, and the names of the nodes whose outputs it reads (none: it reads data)."""

    name: str
    stage: Stage
    reads: tuple[str, ...] = ()


@dataclass(frozen=True)
class Segment:
    first: int
    last: int  # inclusive
    chain: Chain  # its input is held by others and counts nothing here
    pending_gradient_bytes: int  # of earlier boundaries whose readers come after this segment


@dataclass(frozen=True)
class ModuleGraph:
    """``input_bytes``: the data that the caller holds throughout.  The last node feeds the loss."""

    nodes: tuple[Node, ...]
    input_bytes: int = 0

    def __post_init__(self) -> None:
        known: set[str] = set()
        for node in self.nodes:
            unknown = [name for name in node.reads if name not in known]
            if unknown:
                raise ValueError(f"{node.name} reads {unknown[0]}, which does not run before it")
            if node.name in known:
                raise ValueError(f"two nodes are called {node.name}")
            known.add(node.name)
        unread = known - {name for node in self.nodes for name in node.reads} - {self.nodes[-1].name}
        if unread:
            raise ValueError(f"nobody reads the outputs of {', '.join(sorted(unread))}")

    @staticmethod
    def of_chain(chain: Chain) -> ModuleGraph:
        """A chain as a graph.  Data has no gradient: that of the chain's input is not counted."""
        nodes = (Node(str(i), stage, (str(i - 1),) if i else ()) for i, stage in enumerate(chain.stages))
        return ModuleGraph(tuple(nodes), chain.input_bytes)

    def __len__(self) -> int:
        return len(self.nodes)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        cuts = self._cuts()
        spans = list(zip(cuts, [*cuts[1:], len(self)], strict=True))
        segment_of = {self.nodes[i].name: n for n, span in enumerate(spans) for i in range(*span)}
        readers = [0] * len(spans)  # by segment, the last segment that reads its output
        for node in self.nodes:
            for name in node.reads:
                readers[segment_of[name]] = max(readers[segment_of[name]], segment_of[node.name])
        gradients = [self.nodes[end - 1].stage.gradient_bytes for _, end in spans]
        result = []
        for n, (first, end) in enumerate(spans):
            into = sum(gradients[segment_of[name]] for name in self.nodes[first].reads)
            pending = sum(gradients[j] for j in range(n) if readers[j] > n)
            stages = tuple(node.stage for node in self.nodes[first:end])
            result.append(Segment(first, end - 1, Chain(stages, 0, into), pending))
        return tuple(result)

    def _cuts(self) -> list[int]:
        readers: dict[str, int] = {}
        for node in self.nodes:
            for name in node.reads:
                readers[name] = readers.get(name, 0) + 1
        cuts = [0]
        for i in range(1, len(self)):
            before = self.nodes[i - 1].name
            if self.nodes[i].reads != (before,) or readers[before] > 1:
                cuts.append(i)
        return cuts


@dataclass(frozen=True)
class GraphPlan:
    """One chain plan per segment."""

    segments: tuple[ChainPlan, ...]

    def to_groups(self, first_layer: int = 0, *, merged: bool = True) -> tuple[Group, ...]:
        """Groups of all segments, node i being layer ``first_layer`` + i: run each segment as a chain of its layers
        under a tape with all of them."""
        groups: list[Group] = []
        for plan in self.segments:
            groups += plan.to_groups(first_layer, merged=merged)
            first_layer += len(plan)
        return tuple(groups)

    def describe(self, graph: ModuleGraph) -> str:
        """A small text tree, nodes by name."""
        lines = []
        for segment, plan in zip(graph.segments, self.segments, strict=True):
            names = [node.name for node in graph.nodes[segment.first : segment.last + 1]]
            lines.append(f"{_span(names, 0, len(names) - 1)}:")
            for row in plan.rows():
                indent = "  " * (row.depth + 1)
                lines.append(f"{indent}{row.kind} {_span(names, row.first, row.last)}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, object]:
        return {"version": 1, "segments": [plan.to_json() for plan in self.segments]}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> GraphPlan:
        if data.get("version") != 1:
            raise ValueError(f"graph plan version {data.get('version')!r}; this code reads version 1")
        return GraphPlan(tuple(ChainPlan.from_json(plan) for plan in data["segments"]))


@dataclass(frozen=True)
class GraphReport:
    """What a plan of a graph takes.  Bytes include the data."""

    peak_bytes: int
    held_bytes: int  # when the forward has ended
    forwards: tuple[int, ...]  # by node
    forward_cost: float
    backward_cost: float

    @property
    def cost(self) -> float:
        return self.forward_cost + self.backward_cost

    @property
    def extra_forwards(self) -> int:
        return sum(self.forwards) - len(self.forwards)


def run_graph(graph: ModuleGraph, plan: GraphPlan) -> GraphReport:
    """Execute each segment's plan on the chain machine, the others' boundaries, tapes and gradients held around it.
    Raises MachineError."""
    held, peak = graph.input_bytes, 0
    forwards: list[int] = []
    forward_cost = backward_cost = 0.0
    for segment, chain_plan in zip(graph.segments, plan.segments, strict=True):
        report = run(segment.chain, chain_plan)
        backward = segment.pending_gradient_bytes + report.backward_peak_bytes
        peak = max(peak, held + report.forward_peak_bytes, held + backward)
        held += report.held_bytes
        forwards += report.forwards
        forward_cost += report.forward_cost
        backward_cost += report.backward_cost
    return GraphReport(peak, held, tuple(forwards), forward_cost, backward_cost)


def _span(names: Sequence[str], first: int, last: int) -> str:
    return names[first] if first == last else f"{names[first]} to {names[last]}"
