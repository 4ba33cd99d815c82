"""The split embedding against F.embedding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megackpt.mesh.parameter import gather_full, record_of
from megackpt.mesh.process_mesh import single_axis
from megackpt.tensor.collectives import reduce_from_tp
from megackpt.tensor.embedding import VocabEmbedding
from tests.pool import run_distributed
from tests.tensor.probes import random, saved, tensor_parallel, world_axis

V, VALID, H = 16, 13, 6


def _ids(transposed: bool) -> Tensor:
    ids = torch.randint(VALID, (3, 5), generator=torch.Generator().manual_seed(3))
    ids[0] = torch.tensor([0, V // 2 - 1, V // 2, VALID - 1, 0])  # both sides of every cut, one id twice
    return ids.t() if transposed else ids


def _embed(rank: int, world_size: int, transposed: bool) -> tuple[Tensor, Tensor, list[int]]:
    axis = world_axis(rank, world_size)
    module = VocabEmbedding(tensor_parallel(axis), V, H, name="embedding.word", std=1.0, valid_vocab=VALID)
    ids = _ids(transposed)
    with saved() as kept:
        partial = module(ids)
    out = reduce_from_tp(partial, axis)
    out.backward(random(*ids.shape, H, seed=4))
    assert kept[0].untyped_storage().data_ptr() == ids.untyped_storage().data_ptr()
    assert module.weight.grad is not None
    record = record_of(module.weight, "embedding.word.weight")
    return out.detach(), gather_full(module.weight.grad, record, axis), [t.nbytes for t in kept]


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_equals_torch_and_saves_the_ids(world_size: int, transposed: bool) -> None:
    weight = VocabEmbedding(
        tensor_parallel(single_axis()), V, H, name="embedding.word", std=1.0, valid_vocab=VALID
    ).weight
    ids = _ids(transposed)
    wanted = F.embedding(ids, weight)
    wanted.backward(random(*ids.shape, H, seed=4))
    for out, grad, kept in run_distributed(_embed, world_size, transposed):
        assert torch.equal(out, wanted)
        torch.testing.assert_close(grad, weight.grad, rtol=1e-14, atol=1e-14)
        assert not grad[VALID:].any()
        assert kept == [8 * 15]


@pytest.mark.parametrize("bad", [VALID, V, -1])
def test_an_id_outside_the_vocabulary_is_an_error(bad: int) -> None:
    module = VocabEmbedding(tensor_parallel(single_axis()), V, H, name="e", std=1.0, valid_vocab=VALID)
    with pytest.raises(RuntimeError, match="an id is outside the vocabulary of 13"):
        module(torch.tensor([0, bad]))
