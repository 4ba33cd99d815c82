"""Plan a model of quite different parts as a graph with a join, and train it.

    python examples/multimodal.py --budget-share 0.3

A vision transformer reads a picture, a causal text trunk a question, and a fusion part attends from the text to the
picture and answers.  Patches are few and wide, words many and narrow, so no one policy suits
all: every part is measured, the two branches and what follows their join become a graph, and the planner spends the
bytes where they save most work.  The plan is shown, and the training under it equals the one without to the bit.

::

    patches ─ vision 0 ─ ... ─ vision n ─┐
                                         ├─ cross ─ fusion 0 ─ ... ─ head
    words ─── text 0 ─── ... ─ text m ───┘
"""
from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a checkout

from megackpt.plan import ChunkPlan
from megackpt.plan.chains import GraphPlan, InfeasibleBudget, ModuleGraph, Node, plan_graph, run_graph
from megackpt.recompute import Tape, chain, measure
from megackpt.recompute.meter import meter_for

WORDS, PLACES = 16, 4
PATCH, PICTURE = 4, 16


class Attention(nn.Module):
    """Multi-head attention of ``x`` [b, s, h] to ``memory`` [b, m, h]; ``causal`` to itself."""

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.query, self.both, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q, (k, v) = self.query(x), self.both(memory).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))  # [b, a, s, d]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, expand: int, causal: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.mlp = nn.Sequential(nn.Linear(width, expand * width), nn.GELU(), nn.Linear(expand * width, width))
        self.drop = nn.Dropout(0.05)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        x = x + self.drop(self.attention(y, y))
        return x + self.drop(self.mlp(self.second(x)))


class Patches(nn.Module):
    """[b, 1, y, x] -> [b, patches, h]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(1, width, PATCH, PATCH)
        self.position = nn.Parameter(torch.randn((PICTURE // PATCH) ** 2, width) / 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.cut(images).flatten(2).transpose(1, 2) + self.position


class Words(nn.Module):
    """[b, s] -> [b, s, h]."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, width)
        self.position = nn.Parameter(torch.randn(length, width) / 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens) + self.position


class Cross(nn.Module):
    """The join: the text attends to the picture."""

    def __init__(self, vision: int, text: int, heads: int) -> None:
        super().__init__()
        self.bring, self.norm, self.attention = nn.Linear(vision, text), nn.LayerNorm(text), Attention(text, heads)

    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        picture, text = both
        return text + self.attention(self.norm(text), self.bring(picture))


class Head(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, PLACES)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x).mean(1))  # [b, places]


class Multimodal(nn.Module):
    """The parts, each a list; ``tape`` plans over all of them, numbered through."""

    def __init__(
        self, vision: int = 64, text: int = 32, length: int = 24, depths: tuple[int, int, int] = (4, 6, 2)
    ) -> None:
        super().__init__()
        self.vision = nn.ModuleList([Patches(vision), *(Block(vision, 4, 4) for _ in range(depths[0]))])
        self.text = nn.ModuleList([Words(text, length), *(Block(text, 2, 2, causal=True) for _ in range(depths[1]))])
        fusion = [Block(text, 2, 4) for _ in range(depths[2])]
        self.fusion = nn.ModuleList([Cross(vision, text, 2), *fusion, Head(text)])

    def forward(self, images: Tensor, tokens: Tensor) -> Tensor:
        after_vision = len(self.vision)
        after_text = after_vision + len(self.text)
        picture = chain(list(enumerate(self.vision)), images)
        words = chain(list(enumerate(self.text, after_vision)), tokens)
        joined: Any = (picture, words)
        return chain(list(enumerate(self.fusion, after_text)), joined)


def graph_of(model: Multimodal, images: Tensor, tokens: Tensor) -> ModuleGraph:
    """Measure every part on samples, and say who reads whom."""
    nodes: list[Node] = []
    ends: list[str] = []
    joined = (torch.zeros(0), torch.zeros(0))
    with torch.no_grad():
        ends_of_branches = [images, tokens]
        for i, part in enumerate((model.vision, model.text)):
            for module in part:
                ends_of_branches[i] = module(ends_of_branches[i])
        joined = tuple(t.requires_grad_() for t in ends_of_branches)  # type: ignore[assignment]
    for part, name, sample in (
        (model.vision, "vision", images), (model.text, "text", tokens), (model.fusion, "fusion", (joined,)),
    ):  # fmt: skip
        before = tuple(ends) if name == "fusion" else ()
        for place, measured in enumerate(measure(part, sample).modules):
            node = f"{name} {place}"
            nodes.append(Node(node, measured.stage(), before))
            before = (node,)
        ends.append(node)
    aside = 1024  # what a loss over a few scores makes
    return ModuleGraph(tuple(nodes), images.nbytes + tokens.nbytes + aside)


def questions(batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Pictures with one bright quarter; questions, which ask for that quarter or for the one they name; the answers."""
    place = torch.randint(PLACES, (batch,), generator=generator)
    look = torch.randint(2, (batch,), generator=generator)
    images = 0.3 * torch.randn(batch, 1, PICTURE, PICTURE, generator=generator)
    half = PICTURE // 2
    for row, where in enumerate(place.tolist()):
        y, x = half * (where // 2), half * (where % 2)
        images[row, 0, y : y + half, x : x + half] += 1
    tokens = torch.randint(PLACES, WORDS - 2, (batch, length), generator=generator)
    tokens[:, 0] = WORDS - 2 + look
    tokens[:, 1] = torch.randint(PLACES, (batch,), generator=generator)
    return images, tokens, torch.where(look == 1, place, tokens[:, 1])


@dataclass
class Run:
    """What one training left."""

    losses: list[float]
    peak_bytes: int
    state: dict[str, Tensor]


def train(model: Multimodal, plan: ChunkPlan, steps: int, batch: int, length: int) -> Run:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # not an activation: there before the first step
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    losses, peak = [], 0
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=False)
        with meter_for(list(model.parameters())) as meter:
            images, tokens, answers = questions(batch, length, generator)
            meter.reset()
            with Tape(plan):
                scores = model(images, tokens)
            loss = F.cross_entropy(scores, answers)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
        peak = max(peak, meter.peak())
    return Run(losses, peak, {name: value.clone() for name, value in model.state_dict().items()})


@dataclass
class Comparison:
    graph: ModuleGraph
    plan: GraphPlan
    budget: int
    predicted_bytes: int
    plain: Run
    planned: Run


def least_bytes(graph: ModuleGraph) -> int:
    """The smallest budget the planner finds a plan for."""
    try:
        plan_graph(graph, 1)
    except InfeasibleBudget as error:
        return int(error.least)
    return 1


def compare(share: float, steps: int, batch: int = 16, length: int = 24) -> Comparison:
    """Plan for a budget that lies ``share`` of the way from the least to everything, and train with and without."""
    torch.manual_seed(0)
    model = Multimodal(length=length)
    images, tokens, _ = questions(batch, length, torch.Generator().manual_seed(0))
    graph = graph_of(model, images, tokens)
    everything = run_graph(graph, plan_graph(graph, 1 << 60)).peak_bytes
    least = least_bytes(graph)
    budget = round(least + share * (everything - least))
    plan = plan_graph(graph, budget)
    plain = train(copy.deepcopy(model), ChunkPlan(), steps, batch, length)
    planned = train(model, ChunkPlan(groups=plan.to_groups()), steps, batch, length)
    return Comparison(graph, plan, budget, run_graph(graph, plan).peak_bytes, plain, planned)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget-share", type=float, default=0.3,
                        help="between the least feasible bytes (0) and those of keeping everything (1)")  # fmt: skip
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args(argv)
    c = compare(arguments.budget_share, arguments.steps)
    print(f"{'node':12}{'output':>10}{'kept inside':>13}{'work':>14}")
    for node in c.graph.nodes:
        s = node.stage
        print(f"{node.name:12}{s.output_bytes:>10,}{s.tape_bytes - s.output_bytes:>13,}{s.forward_cost:>14,.0f}")
    report = run_graph(c.graph, c.plan)
    print(f"\nplan for {c.budget:,} bytes, predicted peak {c.predicted_bytes:,}, {report.extra_forwards} of "
          f"{len(c.graph)} modules run once more:\n{c.plan.describe(c.graph)}\n")  # fmt: skip
    for name, run in (("as it is", c.plain), ("planned", c.planned)):
        print(f"{name:10} peak {run.peak_bytes:>10,} bytes   loss {run.losses[0]:.4f} -> {run.losses[-1]:.4f}")
    same = c.plain.losses == c.planned.losses and all(
        torch.equal(value, c.planned.state[name]) for name, value in c.plain.state.items()
    )
    print("losses and weights are", "equal to the bit" if same else "DIFFERENT")
    return 0 if same and c.planned.peak_bytes <= c.budget else 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
