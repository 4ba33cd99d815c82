"""The two random streams of a rank, and what the other values follow from."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from megackpt.mesh.layout import MeshShape
from megackpt.mesh.process_mesh import Axis, ProcessMesh, single_axis
from megackpt.mesh.sink import AutogradSink
from megackpt.recompute import RngLedger
from megackpt.tensor.context import TensorParallel, seed_of

SHAPE = MeshShape(tp=2, dp=2, pp=2)


def _create(rank: int, shape: MeshShape = SHAPE, sequence_parallel: bool = True) -> TensorParallel:
    def axis(*names: str) -> Axis:
        ranks = shape.group_of(rank, *names)
        group = object() if len(ranks) > 1 else None  # nothing here communicates
        return Axis(len(ranks), ranks.index(rank), ranks, group)  # type: ignore[arg-type]

    one = single_axis(rank)
    mesh = ProcessMesh(
        shape, rank, shape.coordinates(rank), axis("tp"), one, axis("dp"), axis("pp"), *[one] * 7
    )
    return TensorParallel.create(
        mesh,
        sequence_parallel=sequence_parallel,
        ledger=RngLedger(),
        sink=AutogradSink(),
        dtype=torch.float32,
        device=torch.device("cpu"),
        seed=1234,
    )


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_who_draws_the_same_numbers(sequence_parallel: bool) -> None:
    contexts = [_create(rank, sequence_parallel=sequence_parallel) for rank in range(8)]
    hidden = [torch.rand(4, generator=context.hidden_stream.draw()) for context in contexts]
    attention = [torch.rand(4, generator=context.attention_stream.draw()) for context in contexts]
    places = [SHAPE.coordinates(rank) for rank in range(8)]
    for a, b in product(range(8), range(8)):
        same_group = (places[a].dp, places[a].pp) == (places[b].dp, places[b].pp)
        assert torch.equal(attention[a], attention[b]) == (a == b)
        assert torch.equal(hidden[a], hidden[b]) == (a == b if sequence_parallel else same_group)
    assert contexts[0].ledger.state_dict() == (
        {"replicated": 0, "tensor": 2} if sequence_parallel else {"replicated": 1, "tensor": 1}
    )


def test_who_reduces_the_input_gradient() -> None:
    assert _create(0, sequence_parallel=True).input_gradient_axis is None
    plain = _create(0, sequence_parallel=False)
    assert plain.input_gradient_axis is plain.axis
    alone = _create(0, MeshShape(), sequence_parallel=True)
    assert alone.input_gradient_axis is None and not alone.sequence_parallel


def test_seeds_are_the_same_in_every_process() -> None:
    assert seed_of(1234, "layers.0.attn.qkv.weight", "0") == seed_of(1234, "layers.0.attn.qkv.weight", "0")
    assert seed_of(0, "a") == 70371372590122459
    assert len({seed_of(seed, word) for seed, word in product(range(10), "abcdef")}) == 60
