"""Who asks for what: chains, diamonds and random graphs of dropped steps; each runs once more, and is freed at once."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from megackpt.recompute import Tape, step
from tests.recompute.harness import DROP_ALL, Calls, numbers
from tests.recompute.probes import Census, alive

pytestmark = pytest.mark.usefixtures("no_collector")

X = numbers(6, 8)


@pytest.mark.parametrize("length", [1000])
def test_a_long_chain_of_dropped_steps(length: int) -> None:
    """Resolved by a work list: no recursion, neither in the replay nor when it is all freed; each step runs twice."""
    calls = Calls()
    x = X.clone().requires_grad_()
    one = calls("step", lambda x: x * 1.0009765625)
    last = calls("last", torch.sin)
    with Tape(DROP_ALL):
        y = x
        for _ in range(length):
            y = step("a", one, y)
        loss = step("last", last, y).sum()
        del y
    loss.backward()
    assert calls.count == {"step": 2 * length, "last": 1}
    expected = X.clone()
    for _ in range(length):
        expected = expected * 1.0009765625
    gradient = expected.cos()
    for _ in range(length):
        gradient = gradient * 1.0009765625
    assert torch.equal(x.grad, gradient) and alive() == {}
    with Tape(DROP_ALL):
        y = x
        for _ in range(20 * length):
            y = step("a", lambda x: x * 1.0, y)
        result = step("last", torch.sin, y)
        del y
    del result  # a chain that nobody ever replays is freed without recursion as well
    assert alive() == {}


def test_a_diamond_is_replayed_once_per_step() -> None:
    """Two readers of one dropped output, one of which the other needs first."""
    calls = Calls()
    x = X.clone().requires_grad_()
    with Tape(DROP_ALL):
        top = step("top", calls("top", lambda x: x + 2.0), x)
        left = step("left", calls("left", lambda t: t + 1.0), top)
        right = step("right", calls("right", torch.cos), left)
        joined = step("joined", calls("joined", lambda a, b: a * b), left, right)
        loss = step("end", calls("end", lambda j: j * j), joined).sum()
        del top, left, right, joined
    loss.backward()
    assert calls.count == {"top": 2, "left": 2, "right": 2, "joined": 2, "end": 1}
    t = X + 2.0 + 1.0
    assert torch.equal(x.grad, gradient_of_diamond(t))


def gradient_of_diamond(t: Tensor) -> Tensor:
    t = t.clone().requires_grad_()
    joined = t * t.cos()
    (joined * joined).sum().backward()
    assert t.grad is not None
    return t.grad


def test_each_step_at_most_once_in_random_graphs() -> None:
    """Random graphs of dropped steps that read one to three earlier results, some of which need nothing saved."""
    rng = random.Random(1)
    functions = [torch.sin, torch.exp, lambda *a: sum(a) + 1.0, lambda *a: torch.stack(a).prod(0).tanh()]
    for _ in range(60):
        calls = Calls()
        recipe = [(rng.randrange(4), [rng.randrange(i + 1) for _ in range(rng.randint(1, 3))]) for i in range(12)]

        def build(x: Tensor) -> Tensor:
            values = [x]
            for number, (kind, reads) in enumerate(recipe):  # noqa: B023 - used at once
                reads = reads if kind > 1 else reads[:1]
                fn = calls(str(number), functions[kind])  # noqa: B023
                values.append(step(str(number), fn, *(values[i] for i in reads)))
            return torch.stack(values[1:]).tanh().sum()

        results = []
        for chunk in (None, DROP_ALL):
            calls.count.clear()
            x = (X * 0.1).requires_grad_()
            with Tape(chunk) if chunk is not None else torch.enable_grad():
                loss = build(x)
            loss.backward()
            results.append(x.grad)
        assert torch.equal(results[0], results[1]) and max(calls.count.values()) <= 2
    del loss
    assert alive() == {}


def test_inspecting_a_graph_outside_of_a_backward() -> None:
    """`grad_fn._saved_self` replays where no callback can be queued; the value goes with the node."""
    calls = Calls()
    x = X.clone().requires_grad_()
    with Tape(DROP_ALL):
        y = step("a", calls("a", lambda x: x * 2.0), x)
        result = step("b", torch.sin, y)
        del y
    assert torch.equal(result.grad_fn._saved_self, X * 2.0)
    result.sum().backward()
    assert calls.count == {"a": 2} and torch.equal(x.grad, (X * 2.0).cos() * 2.0)
    del result
    assert alive() == {}


def test_a_rebuilt_input_goes_when_its_reader_has_run() -> None:
    """A chain of dropped steps of which only the last output is saved: while it is replayed, one step's input and
    output are alive, not the whole chain."""
    x = X.clone().requires_grad_()
    with Tape(DROP_ALL):
        y = x
        for _ in range(30):
            y = step("a", lambda x: x + 1.0, y)
        loss = step("last", torch.sin, y).sum()
        del y
    with Census() as census:
        loss.backward()
    assert census.peak <= 3 * X.nbytes + loss.nbytes  # with the gradient
