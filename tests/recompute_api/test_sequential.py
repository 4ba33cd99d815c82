"""`sequential` gives the chain's own results and keeps its live peak under the budget."""
from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from megackpt.observe.memory_tracker import MemoryTracker
from megackpt.plan import ChunkPlan
from megackpt.plan.chains import InfeasibleBudget
from megackpt.recompute import RngLedger, Stream, Tape, checkpoint, dropout, fit, sequential


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def conv(into: int, out: int, stride: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(into, out, 3, stride, padding=1), nn.BatchNorm2d(out), nn.ReLU())


def chains() -> dict[str, tuple[list[nn.Module], tuple[int, ...]]]:
    """Five chains: equal layers, cheap ones, a widening and narrowing one, a medley, a convolutional pyramid."""
    torch.manual_seed(1)
    widths = (32, 128, 16, 96, 24, 64, 160, 32, 8)
    return {
        "equal": ([Residual(32) for _ in range(10)], (64, 32)),
        "cheap": ([nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(12)], (64, 32)),
        "uneven": ([nn.Sequential(nn.Linear(a, b), nn.GELU(), nn.LayerNorm(b)) for a, b in pairwise(widths)],
                   (64, 32)),
        "medley": ([nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32), nn.Dropout(0.2), Residual(32),
                    nn.Tanh(), nn.Linear(32, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 16), nn.Sigmoid()],
                   (64, 32)),
        "pyramid": ([conv(3, 8, 2), conv(8, 8, 1), conv(8, 16, 2), conv(16, 16, 1), conv(16, 32, 2), nn.Flatten()],
                    (4, 3, 16, 16)),
    }  # fmt: skip


def least(modules: list[nn.Module], x: Tensor) -> int:
    with pytest.raises(InfeasibleBudget) as error:
        fit(modules, x, budget_bytes=1)
    assert f"{error.value.least:,} bytes" in str(error.value)
    return int(error.value.least)


@pytest.mark.parametrize("name", list(chains()))
def test_the_peak_stays_under_the_budget(name: str) -> None:
    modules, shape = chains()[name]
    net = nn.Sequential(*modules)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)  # parameters and their gradients are not activations
    x = torch.randn(shape)
    lowest, highest = least(modules, x), fit(modules, x, budget_bytes=1 << 40).predicted.peak_bytes  # type: ignore[union-attr]
    assert lowest < 0.7 * highest
    statistics = sum(b.nbytes for b in net.buffers())
    peaks, extras = [], []
    for share in (1.0, 0.6, 0.3, 0.1, 0.0):
        budget = round(lowest + share * (highest - lowest))
        with MemoryTracker() as tracker:
            x = torch.randn(shape)
            fitted = fit(modules, x, budget_bytes=budget)
            out = fitted(x)
            loss = out.sum()
            del out
            loss.backward()
        assert fitted.predicted is not None
        assert tracker.peak_bytes <= fitted.predicted.peak_bytes <= budget
        if name == "pyramid":  # each module reads its input, so nothing is counted that is not there
            assert fitted.predicted.peak_bytes - tracker.peak_bytes <= 8 + statistics
        peaks.append(tracker.peak_bytes)
        extras.append(fitted.predicted.extra_forwards)
    assert extras == sorted(extras) and extras[0] == 0 and peaks == sorted(peaks, reverse=True)
    with pytest.raises(InfeasibleBudget, match=f"least feasible budget is {lowest:,} bytes"):
        sequential(modules, x, budget_bytes=lowest - 1)


@pytest.mark.parametrize("name", list(chains()))
@pytest.mark.parametrize("how", ["tight", "segments"])
def test_results_are_those_of_the_chain(name: str, how: str) -> None:
    modules, shape = chains()[name]
    net = nn.Sequential(*modules)
    torch.manual_seed(2)
    x = torch.randn(shape, requires_grad=True)
    options = {"budget_bytes": least(modules, x)} if how == "tight" else {"segments": 3}
    results = []
    state = {k: v.clone() for k, v in net.state_dict().items()}
    for run in (net, lambda t: sequential(net, t, **options)):
        net.load_state_dict(state)
        torch.manual_seed(3)
        gradients = torch.autograd.grad(run(x).pow(2).sum(), [x, *net.parameters()])
        results.append([*gradients, *(b.clone() for b in net.buffers()), torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_executions_are_those_predicted() -> None:
    counts = [0] * 6

    class Counted(nn.Module):
        def __init__(self, place: int) -> None:
            super().__init__()
            self.place = place
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            counts[self.place] += 1
            return self.linear(x).sin()

    modules = [Counted(i) for i in range(6)]
    x = torch.randn(8, 16)
    fitted = fit(modules, x, budget_bytes=least(modules, x))
    counts[:] = [0] * 6
    fitted(x).sum().backward()
    assert fitted.predicted is not None and tuple(counts) == fitted.predicted.forwards
    assert max(counts) > 2


def test_segments_are_torchs() -> None:
    """As `checkpoint_sequential`: all segments but the last are run again."""
    seen: list[int] = []
    modules = [nn.Linear(4, 4) for _ in range(7)]
    for place, module in enumerate(modules):
        module.register_forward_hook(lambda *_, place=place: seen.append(place))
    sequential(modules, torch.randn(2, 4), segments=3).sum().backward()
    assert seen[:7] == list(range(7)) and sorted(seen[7:]) == [0, 2]  # the last layer of a segment is spared


def test_inside_others() -> None:
    ledger = RngLedger()
    stream = ledger.register(Stream("tensor", 3))
    modules = [nn.Linear(8, 8), lambda t: dropout(t.sin(), 0.5, stream), nn.Linear(8, 8)]
    x = torch.randn(4, 8, requires_grad=True)

    def run(fn: object) -> tuple[Tensor, int]:
        stream.position = 0
        with Tape(ChunkPlan(), ledger):
            out = fn(x)  # type: ignore[operator]
        return torch.autograd.grad(out.sum(), x)[0], stream.position

    def plain(t: Tensor) -> Tensor:
        for module in modules:
            t = module(t)
        return t

    expected = run(plain)
    for fn in (lambda t: sequential(modules, t, segments=1), lambda t: sequential(modules, t, segments=3),
               lambda t: checkpoint(lambda u: sequential(modules, u, segments=2), t)):  # fmt: skip
        gradient, position = run(fn)
        assert torch.equal(gradient, expected[0]) and position == expected[1]
    with torch.no_grad():
        assert not sequential(modules, x, segments=2).requires_grad


def test_what_is_asked_for_must_be_one_thing() -> None:
    for options in ({}, {"budget_bytes": 1, "segments": 1}):
        with pytest.raises(ValueError, match="one of budget_bytes and segments"):
            sequential([nn.Tanh()], torch.randn(2), **options)
    with pytest.raises(ValueError, match="4 groups of 1 layers"):
        sequential([nn.Tanh()], torch.randn(2), segments=4)
    for options in ({"budget_bytes": 1000}, {"segments": 1}):
        with pytest.raises(ValueError, match="a chain of no modules"):
            sequential([], torch.randn(2), **options)


def test_the_plan_can_be_read() -> None:
    modules, shape = chains()["equal"]
    x = torch.randn(shape)
    fitted = fit(modules, x, budget_bytes=least(modules, x))
    text = str(fitted)
    assert text.startswith("drop 0") and f"peak {fitted.predicted.peak_bytes:,} bytes" in text  # type: ignore[union-attr]
