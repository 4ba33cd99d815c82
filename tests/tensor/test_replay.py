"""Our layers under the replay engine: what a dropped step runs again, and that the gradients are the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megackpt.mesh.process_mesh import single_axis
from megackpt.plan import ChunkPlan, SaveSet
from megackpt.plan.decision import REPLAY_ALL
from megackpt.recompute import Tape, at
from megackpt.tensor.cross_entropy import vocab_parallel_cross_entropy
from megackpt.tensor.embedding import VocabEmbedding
from megackpt.tensor.linear import ColumnLinear, RowLinear
from tests.tensor.probes import random, tensor_parallel


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("dropped", "replayed"),
    [
        ((), 0),
        (("up", "act"), 1),  # the wanted outputs are rebuilt: up for act's gradient, act for down's
        (("down",), 0),  # nothing is saved inside it but its input and weight
        (("mlp",), 1),  # one step around all three: up again, down (whose result nobody wants) not
    ],
)
def test_products_in_a_replay(dropped: tuple[str, ...], replayed: int) -> None:
    tp = tensor_parallel(single_axis(), dtype=torch.float32)
    up = ColumnLinear(tp, 8, 32, name="mlp.up", std=0.2)
    down = RowLinear(tp, 32, 8, name="mlp.down", std=0.2)

    def run(*steps: str) -> tuple[int, list[Tensor]]:
        x = random(4, 2, 8, seed=1, dtype=torch.float32).requires_grad_()
        up.zero_grad()
        down.zero_grad()
        step = at("layers.0")
        plan = ChunkPlan({"layers.0": SaveSet({name: REPLAY_ALL for name in steps})})
        with Tape(plan):
            if "mlp" in steps:
                y = step("mlp", lambda x: down(F.gelu(up(x))), x)
            else:
                y = step("down", down, step("act", F.gelu, step("up", up, x)))
        with Products() as products:
            (y + x).sum().backward()
        gradients = [x.grad, *(p.grad for p in (*up.parameters(), down.weight))]
        assert all(gradient is not None for gradient in gradients)
        return products.count, gradients  # type: ignore[return-value]

    count, gradients = run(*dropped)
    plain_count, plain = run()
    assert count == plain_count + replayed == 4 + replayed
    assert all(torch.equal(a, b) for a, b in zip(gradients, plain, strict=True))


def test_embedding_and_loss_in_dropped_steps() -> None:
    tp = tensor_parallel(single_axis(), dtype=torch.float32)
    embedding = VocabEmbedding(tp, 32, 8, name="embedding.word", std=1.0, valid_vocab=30)
    head = ColumnLinear(tp, 8, 32, name="head", std=1.0, bias=False, valid=30)
    ids = torch.randint(30, (4, 2))

    def loss(hidden: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(head(hidden), ids, single_axis(), 30)

    results = []
    for decision in ({}, {"lookup": REPLAY_ALL, "loss": REPLAY_ALL}):
        embedding.zero_grad()
        head.zero_grad()
        with Tape(ChunkPlan({"ends": SaveSet(decision)})):
            step = at("ends")
            step("loss", loss, step("lookup", embedding, ids)).mean().backward()
        results.append([embedding.weight.grad, head.weight.grad])
    for a, b in zip(*results, strict=True):
        assert a is not None and b is not None and torch.equal(a, b) and a.any()
        assert not a[30:].any()
