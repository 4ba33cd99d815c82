"""After a step nothing of it is alive: not after a backward, a dropped graph, or a failure half way."""
from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megackpt.plan import ChunkPlan, Decision, SaveSet
from megackpt.recompute import KeptBytes, Tape, apply, checkpoint, fit, is_replaying, save_nothing, step
from megackpt.recompute.handle import Box, Cell, Internal, Kept, View
from megackpt.recompute.producer import Producer
from megackpt.recompute.trace import Names
from megackpt.recompute.watch import Watch

ENGINE = (Box, Cell, Internal, Kept, View, Producer, Watch, Tape)
DROP = ChunkPlan({"": SaveSet({}, Decision("keep", "replay"))})


def alive() -> int:
    """Objects of the engine made since the collector was stopped: they are all in its youngest generation."""
    return sum(issubclass(type(o), ENGINE) for o in gc.get_objects(0))


@pytest.fixture(autouse=True)
def _without_collector() -> Iterator[None]:
    """Reference counts alone must free everything: a cycle would hold activations until some later collection."""
    with Names([]):
        torch.ones(1) * 1  # the first use of a dispatch mode loads the compiler, which holds the frames around it
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def in_checkpoint(net: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(net, x)


def in_detail(net: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(net, x, early_stop=False, determinism_check=lambda t: t.shape)


def with_debug(net: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(net, x, debug=True)


def selective(net: nn.Module, x: Tensor) -> Tensor:
    ops = [torch.ops.aten.addmm.default]
    return checkpoint(net, x, context_fn=lambda: torch.utils.checkpoint.create_selective_checkpoint_contexts(ops))


def nested(net: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(lambda t: checkpoint(net, t).sin(), x)


def verified(net: nn.Module, x: Tensor) -> Tensor:
    with Tape(DROP, verify=True):
        return step("a", net, x)


def accounted(net: nn.Module, x: Tensor) -> Tensor:
    with Tape(DROP, account=KeptBytes()):
        return step("b", net, checkpoint(net, x))


def in_chain(net: nn.Module, x: Tensor) -> Tensor:
    return fit([net, net, net], x, segments=3)(x)


def applied(net: nn.Module, x: Tensor) -> Tensor:
    model = nn.Sequential(net)
    with apply(save_nothing(), model):
        return model(x)


WAYS = [in_checkpoint, in_detail, with_debug, selective, nested, verified, accounted, in_chain, applied]


class Fails(nn.Module):
    """Fails in a forward or in a replay, if told to, after it has saved something."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.when = ""

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x * 1)
        if self.when == ("replay" if is_replaying() else "forward"):
            raise KeyError("as told")
        return y.exp() * 1


@pytest.mark.parametrize("end", ["backward", "dropped", "failing forward", "failing replay", "no second backward"])
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_left(way: Callable[[nn.Module, Tensor], Tensor], end: str) -> None:
    net, x = Fails(), torch.randn(4, 8, requires_grad=True)
    before = alive()
    watched: list[weakref.ref[Any]] = []

    def run() -> None:
        h = x * 2
        watched.append(weakref.ref(h.untyped_storage()))
        net.when = end.removeprefix("failing ") if "failing" in end else ""
        loss = way(net, h).sum()
        if end != "dropped":
            loss.backward(retain_graph=end == "no second backward")

    for _ in range(3):
        if "failing" in end:
            try:
                run()
                failed = False
            except (KeyError, RuntimeError) as error:
                failed = True
                del error
            assert failed
        else:
            run()
    assert alive() == before
    assert all(ref() is None for ref in watched)


def test_a_thousand_steps() -> None:
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4, requires_grad=True)
    for _ in range(10):
        checkpoint(net, checkpoint(net, x)).sum().backward()
    before, objects = alive(), len(gc.get_objects(0))
    for _ in range(1000):
        checkpoint(net, checkpoint(net, x)).sum().backward()
    assert alive() == before and len(gc.get_objects(0)) < objects + 50
