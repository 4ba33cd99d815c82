"""Module graphs: where they are cut, what their plans take, and that no plan of the segments is better."""
from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import pytest

from megackpt.plan.chains import (
    Chain,
    ChainPlan,
    Drop,
    GraphPlan,
    InfeasibleBudget,
    Keep,
    ModuleGraph,
    Node,
    Stage,
    heterogeneous,
    plan_graph,
    run,
    run_graph,
)
from megackpt.plan.decision import Group
from tests.plan.chains.oracle import best_graph_costs, cost_at, random_chain, random_stage

UNIT = Stage(1, 3, gradient_bytes=1)


def graph_of(text: str, random: Random | None = None) -> ModuleGraph:
    """``a b:a c:b d:ca`` with unit or random numbers."""
    nodes = []
    for word in text.split():
        name, _, reads = word.partition(":")
        nodes.append(Node(name, random_stage(random) if random else UNIT, tuple(reads)))
    return ModuleGraph(tuple(nodes), random.randint(0, 3) if random else 0)


def with_tape(graph: ModuleGraph, name: str, tape_bytes: int) -> ModuleGraph:
    stage = replace(UNIT, tape_bytes=tape_bytes)
    return replace(graph, nodes=tuple(replace(n, stage=stage) if n.name == name else n for n in graph.nodes))


def spans(graph: ModuleGraph) -> list[str]:
    return ["".join(node.name for node in graph.nodes[s.first : s.last + 1]) for s in graph.segments]


CHAIN = "a b:a c:b d:c e:d"
SKIP = "a b:a c:b d:ca e:d"
TOWERS = "a b:a c:b d e:d f:ce g:f"
RESIDUAL = "a b:a c:b d:ca e:d f:e g:fd h:g"
DIAMOND = "a b:a c:b d:a e:d f:e g:cf h:g i:h j:i"  # ten nodes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CHAIN, ["abcde"]),
        (SKIP, ["a", "bc", "de"]),
        (TOWERS, ["abc", "de", "fg"]),
        (RESIDUAL, ["a", "bc", "d", "ef", "gh"]),
        (DIAMOND, ["a", "bc", "def", "ghij"]),
        ("a b c:a d:b e:cd", ["a", "b", "c", "d", "e"]),  # branches that run in turns
        ("a b:aa", ["a", "b"]),
    ],
)
def test_joints_are_boundaries(text: str, expected: list[str]) -> None:
    assert spans(graph_of(text)) == expected


def test_bytes_by_hand() -> None:
    """Towers abc and de, joined by f: every output and gradient 1, every tape 3."""
    graph = graph_of(TOWERS)
    kept = GraphPlan(tuple(ChainPlan.keep_all(n) for n in (3, 2, 2)))
    assert run_graph(graph, kept).held_bytes == 21
    # B of g: 21 held, its gradient and that of f's output; B of f: 18, the gradient of f and of both towers
    assert run_graph(graph, kept).peak_bytes == 23
    dropped = [ChainPlan((Drop(n, (Keep(),) * n),)) for n in (3, 2)]
    lean = GraphPlan((*dropped, ChainPlan.keep_all(2)))
    report = run_graph(graph, lean)
    assert (report.held_bytes, report.forwards, report.extra_forwards) == (1 + 1 + 6, (2, 2, 2, 2, 2, 1, 1), 5)
    # replay of abc: three tapes and two gradients = 11; of de, abc's output and its gradient there: 6 + 2 + 1 + 1 = 10
    assert report.peak_bytes == 11
    wide = with_tape(graph, "d", 9)
    assert run_graph(wide, lean).peak_bytes == 12 + 2 + 1 + 1  # now de's replay is the peak


@pytest.mark.parametrize("text", [SKIP, TOWERS, RESIDUAL, DIAMOND])
def test_no_plan_of_the_segments_is_better(text: str) -> None:
    random, budgets = Random(len(text)), 0
    for _ in range(2 if text == DIAMOND else 3):
        graph = graph_of(text, random)
        front = best_graph_costs(graph)
        for budget in range(front[0][0], front[-1][0] + 2, 2 if text != DIAMOND else 5):
            report = run_graph(graph, plan_graph(graph, budget))
            assert report.peak_bytes <= budget
            assert report.forward_cost == pytest.approx(cost_at(front, budget), abs=1e-9)
            budgets += 1
        with pytest.raises(InfeasibleBudget) as caught:
            plan_graph(graph, front[0][0] - 1)
        assert caught.value.least == front[0][0]
    assert budgets > 12


def test_a_chain_goes_to_the_chain_planner() -> None:
    chain = Chain(random_chain(Random(4), 9).stages, 3)
    graph = ModuleGraph.of_chain(chain)
    most = run(chain, ChainPlan.keep_all(9)).peak_bytes
    for budget in range(most // 2, most + 1, 3):
        assert plan_graph(graph, budget).segments == (heterogeneous(chain, budget),)
    with pytest.raises(InfeasibleBudget) as caught:
        plan_graph(graph, 1)
    with pytest.raises(InfeasibleBudget) as same:
        heterogeneous(chain, 1)
    assert caught.value.least == same.value.least


def test_units_never_exceed_the_budget() -> None:
    """A residual network of 20 blocks with large uneven sizes."""
    random, nodes = Random(9), [Node("in", Stage(10**6, 10**6))]
    for block in range(20):
        before = nodes[-1].name
        for part in "ab":
            size = random.randint(10**5, 10**6)
            nodes.append(Node(f"{block}{part}", Stage(size, 3 * size, gradient_bytes=size), (nodes[-1].name,)))
        nodes.append(Node(f"{block}+", Stage(10**6, 10**6, 0.1, gradient_bytes=10**6), (nodes[-1].name, before)))
    graph = ModuleGraph(tuple(nodes), 10**6)
    everything = GraphPlan(tuple(ChainPlan.keep_all(len(s.chain)) for s in graph.segments))
    most, costs = run_graph(graph, everything).peak_bytes, []
    for share in (0.5, 0.7, 0.9):
        report = run_graph(graph, plan_graph(graph, int(share * most), units=60))
        assert report.peak_bytes <= share * most
        costs.append(report.forward_cost)
    assert costs == sorted(costs, reverse=True) and costs[-1] < 52  # 43 without recompute
    with pytest.raises(InfeasibleBudget) as caught:
        plan_graph(graph, 10**6, units=60)
    least = int(caught.value.least)
    assert run_graph(graph, plan_graph(graph, least, units=60)).peak_bytes <= least < 0.5 * most


def test_groups_text_and_json() -> None:
    graph = graph_of(TOWERS)
    plan = GraphPlan((ChainPlan((Drop(2, (Keep(), Keep())), Keep())), ChainPlan((Drop(2, (Keep(), Keep())),)),
                      ChainPlan.keep_all(2)))  # fmt: skip
    assert plan.to_groups(4) == (Group(4, 5), Group(7, 8))
    assert plan.describe(graph).splitlines() == [
        "a to c:", "  drop a to b", "    keep a to b", "  keep c", "d to e:", "  drop d to e", "    keep d to e",
        "f to g:", "  keep f to g",
    ]  # fmt: skip
    assert GraphPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@pytest.mark.parametrize(
    ("text", "words"),
    [("a:b b", "a reads b, which does not run before it"), ("a a:a", "two nodes are called a"),
     ("a b:a c:a", "nobody reads the outputs of b")],
)  # fmt: skip
def test_refusals(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        graph_of(text)
