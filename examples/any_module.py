"""Train a network of your own under a byte budget, with `megackpt.recompute` alone.

    python examples/any_module.py --budget-share 0.2

A residual convolutional network with BatchNorm learns which of four textures a picture shows.  Its blocks are measured,
a plan is made whose activations fit the budget, and it is trained twice: as it is, and under the plan.  Losses, weights
and running statistics are the same to the bit; only memory and time differ.
"""
from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a checkout

from megackpt.recompute import Fitted, fit
from megackpt.recompute.meter import meter_for

CLASSES = 4


class Residual(nn.Module):
    """Two convolutions and a shortcut; ``stride`` 2 halves the picture."""  # [b, c, y, x]

    def __init__(self, into: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(into, out, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(out)
        self.second = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(out)
        self.shortcut = nn.Conv2d(into, out, 1, stride, bias=False) if (into, stride) != (out, 1) else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(y)) + self.shortcut(x))


class Head(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mean((2, 3)))  # [b, classes]


def network(width: int = 8, depth: int = 3) -> nn.Sequential:
    """A stem, three stages of ``depth`` blocks, a head."""
    layers: list[nn.Module] = [nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())]
    for stage in range(3):
        into, out = width << max(stage - 1, 0), width << stage
        layers += [Residual(into if i == 0 else out, out, 2 if stage and i == 0 else 1) for i in range(depth)]
    return nn.Sequential(*layers, Head(width << 2))


def pictures(batch: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Stripes across, stripes down, checks and rings, in noise, and which one each is."""
    labels = torch.randint(CLASSES, (batch,), generator=generator)
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    r = ((y - size / 2) ** 2 + (x - size / 2) ** 2).sqrt()
    textures = torch.stack([(y // 2) % 2, (x // 2) % 2, (y // 2 + x // 2) % 2, (r // 2) % 2]).float()
    return textures[labels, None] + 0.5 * torch.randn(batch, 1, size, size, generator=generator), labels


@dataclass
class Run:
    """What one training left."""

    losses: list[float]
    peak_bytes: int  # activations of one step, the pictures included
    state: dict[str, Tensor]


def train(model: nn.Sequential, forward: Callable[[Tensor], Tensor], steps: int, batch: int, size: int) -> Run:
    """Some steps of SGD on ``forward``, which runs ``model`` in its own way."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # not an activation: there before the first step
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    losses, peak = [], 0
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=False)
        with meter_for(list(model.parameters())) as meter:
            images, labels = pictures(batch, size, generator)
            meter.reset()
            loss = F.cross_entropy(forward(images), labels)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
        peak = max(peak, meter.peak())
    return Run(losses, peak, {name: value.clone() for name, value in model.state_dict().items()})


def compare(share: float, steps: int, batch: int = 16, size: int = 16) -> tuple[Fitted, int, Run, Run]:
    """The plan for a budget that lies ``share`` of the way from the least feasible bytes to those of keeping all, the
    budget, and both trainings."""
    torch.manual_seed(0)
    model = network()
    sample, _ = pictures(batch, size, torch.Generator().manual_seed(0))
    everything = fit(model, sample, budget_bytes=1 << 60)
    assert everything.profile is not None and everything.predicted is not None
    least = everything.least_bytes()
    budget = round(least + share * (everything.predicted.peak_bytes - least))
    fitted = fit(model, sample, budget_bytes=budget)
    plain = copy.deepcopy(model)
    return fitted, budget, train(plain, plain, steps, batch, size), train(model, fitted, steps, batch, size)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget-share", type=float, default=0.2,
                        help="between the least feasible bytes (0) and those of keeping everything (1)")  # fmt: skip
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args(argv)
    fitted, budget, plain, planned = compare(arguments.budget_share, arguments.steps)
    print(fitted.profile, "", "plan:", fitted, "", sep="\n")
    print(f"{'':10}{'budget':>12}{'peak bytes':>12}{'first loss':>12}{'last loss':>12}")
    for name, limit, run in (("as it is", "none", plain), ("planned", f"{budget:,}", planned)):
        print(f"{name:10}{limit:>12}{run.peak_bytes:>12,}{run.losses[0]:>12.4f}{run.losses[-1]:>12.4f}")
    same = plain.losses == planned.losses and all(torch.equal(v, planned.state[k]) for k, v in plain.state.items())
    print("losses, weights and running statistics are", "equal to the bit" if same else "DIFFERENT")
    return 0 if same and planned.peak_bytes <= budget else 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
