"""Steps in steps: depth, live decisions inside, groups of layers as trees, binomial (revolve) schedules."""

from __future__ import annotations

import itertools
import random
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megackpt.plan import ChunkPlan, Decision, Group, SaveSet
from megackpt.plan.decision import REPLAY_ALL
from megackpt.recompute import KeptBytes, RngLedger, Stream, Tape, at, chain, dropout, step
from tests.recompute.harness import (
    DROP_ALL,
    KEPT_OUTPUT,
    ONLY_OUTPUT,
    Calls,
    assert_equal,
    assert_same,
    drop,
    gradients,
    numbers,
    plan,
)
from tests.recompute.probes import Census

X, W = numbers(6, 8), numbers(8, 8, seed=2)
SEED = 5


def streams() -> RngLedger:
    ledger = RngLedger(defaults=False)
    ledger.register(Stream("s", SEED))
    return ledger


class Deep:
    """Three levels of steps with dropout on each, drawn from the stream of the current ledger."""

    def __init__(self) -> None:
        self.stream = Stream("s", SEED)

    def ledger(self) -> RngLedger:
        ledger = RngLedger(defaults=False)
        self.stream = ledger.register(Stream("s", SEED))
        return ledger

    def third(self, x: Tensor, w: Tensor) -> Tensor:
        y = step("c1", lambda x, w: dropout(F.linear(x, w), 0.3, self.stream).sin(), x, w)
        return step("c2", lambda y: y * y.exp(), y)

    def second(self, x: Tensor, w: Tensor) -> Tensor:
        y = step("b1", self.third, x, w)
        y = step("b2", lambda y: dropout(y.tanh(), 0.2, self.stream), y)
        return step("b3", self.third, y, w)

    def __call__(self, x: Tensor, w: Tensor) -> Tensor:
        y = step("a1", self.second, x, w)
        z = step("a2", lambda y: dropout(y, 0.1, self.stream).sigmoid(), y)
        return step("a3", self.second, z, w)


NAMES = ("a1", "a2", "a3", "b1", "b2", "b3", "c1", "c2")


def test_three_levels_under_random_decisions() -> None:
    deep, rng = Deep(), random.Random(0)
    deep.ledger()
    plain = gradients(deep, [X, W], None)
    choices = [Decision(o, i, m) for o, i, m in itertools.product(("keep", "replay"), repeat=3)]
    for number in range(60):
        chunk = DROP_ALL if number == 0 else plan(**{name: rng.choice(choices) for name in NAMES})
        found = gradients(deep, [X, W], chunk, deep.ledger())
        assert_equal(found, plain)
        assert deep.stream.position == 7  # every draw once in forward; replays put the stream back


def test_inner_random_numbers_when_the_outer_replay_stops_early() -> None:
    """The outer replay ends at the inner step's last saved tensor, in the middle of it; what the inner step saved so
    far is rebuilt by the inner step, which must then see the numbers that it saw."""
    ledger = streams()
    stream = ledger.stream("s")

    def core(x: Tensor) -> Tensor:
        y = dropout(x, 0.5, stream)
        return y * y

    def run(chunk: ChunkPlan) -> tuple[Tensor, int]:
        ledger.load_state_dict({"s": 0})
        x = X.clone().requires_grad_()
        with Tape(chunk, ledger):
            result = step("outer", lambda x: step("inner", core, x), x)
        stream.draw()  # the next micro-batch goes on in between
        result.sum().backward()
        assert x.grad is not None
        return x.grad, stream.position

    for chunk in (drop("outer", "inner"), drop("inner"), drop("outer"), plan(outer=REPLAY_ALL, inner=KEPT_OUTPUT)):
        plain = run(plan())
        found = run(chunk)
        assert torch.equal(found[0], plain[0]) and found[1] == plain[1] == 2


def test_inner_decisions_are_followed_in_the_replay() -> None:
    """A dropped outer step with a dropped inner one: in the replay of the outer the inner's internals are dropped
    again, and it runs a third time for them.  With the inner kept it runs twice."""
    for inner, runs in ((Decision(), 2), (REPLAY_ALL, 3)):
        calls = Calls()

        def outer(x: Tensor) -> Tensor:
            y = step("inner", calls("inner", lambda x: x.sin().exp()), x)  # noqa: B023 - used at once
            return step("last", torch.tanh, y)

        x = X.clone().requires_grad_()
        with Tape(plan(outer=REPLAY_ALL, inner=inner)):
            result = step("outer", outer, x)
        result.sum().backward()
        assert calls.count == {"inner": runs}


def test_a_tape_inside_a_dropped_step() -> None:
    """It is transparent while packs are counted, and live in the replay."""

    def body(x: Tensor, w: Tensor) -> Tensor:
        def region(x: Tensor) -> Tensor:
            with Tape(DROP_ALL):
                y = step("i1", lambda x: F.dropout(x @ w, 0.3).sin(), x)
                return step("i2", lambda y: y * y, y)

        y = step("outer", region, x)
        return step("after", lambda y, w: F.linear(y, w), y, w)

    assert_same(body, [X, W], {"outer": drop("outer"), "kept": plan(after=REPLAY_ALL), "all": DROP_ALL})


def test_nested_tapes_keep_their_own_plans() -> None:
    calls = Calls()
    x = X.clone().requires_grad_()
    with Tape(drop("a"), account=KeptBytes()) as outer:
        y = step("a", calls("outer a", torch.sin), x)
        with Tape(drop("b"), account=KeptBytes()) as inner:
            z = step("b", calls("inner b", torch.exp), step("a", calls("inner a", torch.tanh), y))
        result = step("b", calls("outer b", torch.sigmoid), z)
        del y, z
    result.sum().backward()
    assert calls.count == {"outer a": 1, "inner a": 1, "inner b": 2, "outer b": 1}
    assert outer.report().keys() == {"a", "b"} and inner.report().keys() == {"a"}


# -- chains and groups -----------------------------------------------------------------------------------------------


class Chain:
    """Layers whose forwards are counted; each has a step of its own with dropout inside."""

    def __init__(self, length: int, rows: int = 6) -> None:
        self.input = numbers(rows, 8)
        self.weights = [torch.nn.Parameter(numbers(8, 8, seed=10 + i) * 0.5) for i in range(length)]
        self.executed: list[int] = []
        self.stream = Stream("s", SEED)

    def ledger(self) -> RngLedger:
        ledger = RngLedger(defaults=False)
        self.stream = ledger.register(Stream("s", SEED))
        return ledger

    def layer(self, number: int, x: Tensor) -> Tensor:
        self.executed.append(number)
        scope = at(f"layers.{number}")
        y = scope("mix", lambda x: dropout(F.linear(x, self.weights[number]), 0.2, self.stream).tanh(), x)
        return scope("add", torch.add, x, y)

    def run(self, chunk: ChunkPlan | None) -> list[Tensor]:
        for weight in self.weights:
            weight.grad = None
        self.executed.clear()
        x = self.input.clone().requires_grad_()
        ledger = self.ledger()
        modules = [(i, lambda x, i=i: self.layer(i, x)) for i in range(len(self.weights))]
        if chunk is None:
            y = chain(modules, x)
        else:
            with Tape(chunk, ledger):
                y = chain(modules, x)
        value = y.detach().clone()
        loss = y.sum()
        del y
        loss.backward()
        assert self.stream.position == len(self.weights)
        grads = [w.grad for w in self.weights]
        assert all(g is not None for g in grads)
        return [value, x.grad, *grads]  # type: ignore[list-item]


def test_uniform_groups_run_each_layer_twice() -> None:
    layers = Chain(7)
    plain = layers.run(None)
    for k in (1, 2, 3, 7):
        groups = tuple(Group(i, min(i + k, 7) - 1) for i in range(0, 7, k))
        assert_equal(layers.run(ChunkPlan(groups=groups)), plain)
        assert sorted(layers.executed) == sorted([*range(7), *range(7)])


def test_group_of_part_of_the_layers() -> None:
    layers = Chain(7)
    plain = layers.run(None)
    assert_equal(layers.run(ChunkPlan(groups=(Group(2, 4),))), plain)
    assert sorted(layers.executed) == sorted([*range(7), 2, 3, 4])


def test_group_whose_replay_follows_the_layers_own_save_sets() -> None:
    """Inner () and save-sets that drop the mix: once for the forward, once for the group, once for the layer."""
    layers = Chain(4)
    plain = layers.run(None)
    mix = {f"layers.{i}": SaveSet({"mix": REPLAY_ALL}) for i in range(4)}
    for inner, runs in ((None, 2), ((), 2)):
        assert_equal(layers.run(ChunkPlan(mix, (Group(0, 3, inner),))), plain)
        assert sorted(layers.executed) == sorted([*range(4)] * runs)
    whole = {f"layers.{i}": SaveSet({"mix": ONLY_OUTPUT, "add": ONLY_OUTPUT}) for i in range(3)}
    assert_equal(layers.run(ChunkPlan(whole, (Group(0, 3, ()),))), plain)


@cache
def extra_forwards(length: int, slots: int) -> int:
    """Griewank & Walther 2000: fewest forwards beyond the first sweep with `slots` checkpoints, the input's included.

    t(l, s) = min over m of m + t(m, s) + t(l - m, s - 1): of a segment whose input is kept, run m layers to a new
    checkpoint and reverse the rest with one slot less; then run the m layers once more and reverse them with all
    slots.  t(1, s) = 0; with one slot only the last layer is ready each time, t(l, 1) = l(l - 1)/2.
    """
    return 0 if length == 1 else split(length, slots)[0]


def split(length: int, slots: int) -> tuple[int, int]:
    """The number and where to put the next checkpoint."""
    if slots == 1:
        return length - 1 + extra_forwards(length - 1, 1), length - 1
    options = [(m + extra_forwards(m, slots) + extra_forwards(length - m, slots - 1), m) for m in range(1, length)]
    return min(options)


def revolve(first: int, length: int, slots: int) -> tuple[Group, ...]:
    """The schedule as a tree of groups: the m layers are one dropped step whose replay follows the tree again."""
    if length == 1:
        return ()
    _, m = split(length, slots)
    rest = () if slots == 1 else revolve(first + m, length - m, slots - 1)
    return (Group(first, first + m - 1, revolve(first, m, slots)), *rest)


@pytest.mark.parametrize(("slots", "executed"), [(1, 300), (2, 112), (3, 85), (4, 75), (5, 68), (6, 64), (8, 62)])
def test_binomial_schedule_of_24_layers(slots: int, executed: int) -> None:
    """Executed layer forwards are 24 + t(24, s), exactly; the last layer is never run again."""
    layers = Chain(24)
    plain = layers.run(None)
    assert_equal(layers.run(ChunkPlan(groups=revolve(0, 24, slots))), plain)
    assert len(layers.executed) == executed == 24 + extra_forwards(24, slots)
    assert layers.executed.count(23) == 1


def test_a_tree_may_be_deeper_than_the_stack() -> None:
    layers, depth = Chain(3), 700
    plain = layers.run(None)
    tree = Group(0, 1, ())
    for _ in range(depth - 1):
        tree = Group(0, 1, (tree,))
    assert_equal(layers.run(ChunkPlan(groups=(tree,))), plain)
    assert layers.executed.count(0) == layers.executed.count(1) == 1 + depth and layers.executed.count(2) == 1


def peak_units(layers: Chain, groups: tuple[Group, ...]) -> float:
    """Most bytes alive at once, in layer inputs."""
    for weight in layers.weights:
        weight.grad = None
    with Census() as census:
        layers.run(ChunkPlan(groups=groups))
    return census.peak / layers.input.nbytes


def test_memory_of_binomial_schedules() -> None:
    """One layer input more per slot, and nothing else: what a replay rebuilt is gone when it has been used.

    A layer keeps two units (its input and tanh's result), so plain autograd peaks near 2L; weight gradients are small.
    """
    layers = Chain(24, rows=1024)
    one = peak_units(layers, revolve(0, 24, 1))
    assert one < 7  # two kept inputs, a layer's two units, two gradients, one operand
    for slots in (2, 4, 8):
        assert peak_units(layers, revolve(0, 24, slots)) == pytest.approx(one + slots - 1, abs=0.1)
    assert peak_units(layers, ()) > 2 * 24
