"""Running statistics are written once, however often a step runs; user code can tell a replay (case RC-05)."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megackpt.plan import ChunkPlan, Decision, Group, SaveSet
from megackpt.recompute import Tape, chain, checkpoint, is_replaying, step
from megackpt.recompute.batchnorm import training_norms

DROP = ChunkPlan({"": SaveSet({}, Decision("keep", "replay"))})


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = norm
        self.second = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)).relu()).sin()


def statistics(block: nn.Module) -> list[Tensor]:
    return [b.clone() for b in block.buffers()]


def train(block: Block, call: Callable[[Block, Tensor], Tensor], steps: int = 3) -> list[Tensor]:
    """Statistics and gradients after some steps."""
    torch.manual_seed(5)
    for _ in range(steps):
        block.zero_grad()
        call(block, torch.randn(7, 6)).pow(2).sum().backward()
    return statistics(block) + [p.grad.clone() for p in block.parameters() if p.grad is not None]


def in_closure(block: Block, x: Tensor) -> Tensor:
    with Tape(DROP):
        return step("a", lambda t: block(t), x)


def in_partial(block: Block, x: Tensor) -> Tensor:
    with Tape(DROP):
        return step("a", functools.partial(lambda m, t: m(t), block), x)


def in_method(block: Block, x: Tensor) -> Tensor:
    with Tape(DROP):
        return step("a", block.forward, x)


def in_list(block: Block, x: Tensor) -> Tensor:
    blocks = {"only": [block]}
    with Tape(DROP):
        return step("a", lambda t: blocks["only"][0](t), x)


def as_module(block: Block, x: Tensor) -> Tensor:
    return checkpoint(block, x)


def nested(block: Block, x: Tensor) -> Tensor:
    return checkpoint(lambda t: checkpoint(block, t) * 1, x)


def in_object(block: Block, x: Tensor) -> Tensor:
    class Runner:
        def __init__(self) -> None:
            self.block = block

        def go(self, t: Tensor) -> Tensor:
            return self.block(t)

    return checkpoint(Runner().go, x)


WAYS = [in_closure, in_partial, in_method, in_list, as_module, nested, in_object]


@pytest.mark.parametrize("way", WAYS)
def test_statistics_are_those_of_one_run(way: Callable[[Block, Tensor], Tensor]) -> None:
    torch.manual_seed(1)
    state = Block(nn.BatchNorm1d(6)).state_dict()
    results = []
    for call in (lambda m, t: m(t), way):
        block = Block(nn.BatchNorm1d(6))
        block.load_state_dict(state)
        results.append(train(block, call))
    assert results[0][2] == 3  # num_batches_tracked
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("norm", [lambda: nn.BatchNorm1d(6, momentum=None), lambda: nn.BatchNorm1d(6, affine=False),
                                  lambda: nn.BatchNorm1d(6, track_running_stats=False)])  # fmt: skip
def test_every_kind(norm: Callable[[], nn.Module]) -> None:
    torch.manual_seed(1)
    state = Block(norm()).state_dict()
    results = []
    for call in (lambda m, t: m(t), as_module):
        block = Block(norm())
        block.load_state_dict(state)
        results.append(train(block, call))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_groups_of_layers() -> None:
    results = []
    for groups in ((), (Group(0, 2, (Group(1, 2),)),)):
        torch.manual_seed(1)
        blocks = nn.ModuleList(Block(nn.BatchNorm1d(6)) for _ in range(3))
        with Tape(ChunkPlan(groups=groups)):
            loss = chain(list(enumerate(blocks)), torch.randn(7, 6)).pow(2).sum()
        loss.backward()
        results.append(statistics(blocks) + [p.grad for p in blocks.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_evaluation_mode_uses_and_keeps_them() -> None:
    block = Block(nn.BatchNorm1d(6)).eval()
    assert training_norms(block) == []
    before = statistics(block)
    checkpoint(block, torch.randn(7, 6)).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(before, statistics(block), strict=True))


def test_statistics_survive_a_replay_that_fails() -> None:
    block = Block(nn.BatchNorm1d(6))

    def fn(x: Tensor) -> Tensor:
        out = block(x).sin()
        if is_replaying():
            raise RuntimeError("no")
        return out

    loss = checkpoint(fn, torch.randn(7, 6), early_stop=False).sum()
    before = statistics(block)
    with pytest.raises(RuntimeError, match="no"):
        loss.backward()
    assert all(torch.equal(a, b) for a, b in zip(before, statistics(block), strict=True))


def test_what_is_searched() -> None:
    norm = nn.BatchNorm1d(6)

    def fn(x: Tensor) -> Tensor:
        return norm(x)

    def recursive(x: Tensor) -> Any:
        return recursive

    assert training_norms(fn) == [norm]
    assert training_norms(torch.sin) == []
    assert training_norms(recursive) == []
    assert training_norms(nn.Sequential(norm, nn.Sequential(norm))) == [norm]


class Scaled(nn.Module):
    """RC-05: a block whose state changes once a step, as scaled-precision layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 6))
        self.register_buffer("largest", torch.zeros(()))
        self.updates = 0

    def forward(self, x: Tensor) -> Tensor:
        if not is_replaying():
            self.updates += 1
            self.largest = torch.maximum(self.largest, x.detach().abs().max())
        return (x * self.weight).sin().exp()


@pytest.mark.parametrize("way", [lambda m, t: m(t), as_module, nested])
def test_a_stateful_block_of_the_user(way: Callable[[Any, Tensor], Tensor]) -> None:
    block = Scaled()
    gradients = train(block, way)  # type: ignore[arg-type]
    assert block.updates == 3
    plain = Scaled()
    assert all(torch.equal(a, b) for a, b in zip(gradients, train(plain, lambda m, t: m(t)), strict=True))  # type: ignore[arg-type]
