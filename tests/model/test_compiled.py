"""What `--compile` compiles has no break in its graph, forward or backward: at a break the compiler would go on with
whatever Python runs next, the hooks of the replay engine among them, once per layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megackpt.model.mlp import _SquaredReLU, _SwiGLU, gelu
from megackpt.model.norm import _RMSNorm
from megackpt.plan import ChunkPlan, SaveSet
from megackpt.plan.decision import REPLAY_ALL
from megackpt.recompute import Tape, at

WEIGHT = torch.linspace(0.5, 2.0, 8).requires_grad_()
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "swiglu": _SwiGLU.apply,
    "squared relu": _SquaredReLU.apply,
    "rms norm": lambda x: _RMSNorm.apply(x, WEIGHT, 1e-5),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_graph_whose_operations_are_the_same(name: str) -> None:
    """Traced, but left to the usual kernels, so that values and gradients are equal to the bit; also as a step that is
    replayed."""
    plain = FUNCTIONS[name]
    traced = torch.compile(plain, dynamic=False, fullgraph=True, backend="aot_eager")
    x = torch.linspace(-3, 3, 48).view(6, 8).requires_grad_()
    found = []
    for fn in (plain, traced, lambda x: at("layers.0")("mlp.act", traced, x)):
        with Tape(ChunkPlan({"layers.0": SaveSet({}, REPLAY_ALL)})):
            y = fn(x.sin())
        found.append((y.detach(), *torch.autograd.grad(y.square().sum(), (x, WEIGHT), materialize_grads=True)))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))
