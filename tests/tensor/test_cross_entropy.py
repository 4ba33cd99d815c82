"""Vocabulary-parallel cross entropy against F.cross_entropy over the valid columns."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megackpt.mesh.process_mesh import single_axis
from megackpt.tensor.cross_entropy import vocab_parallel_cross_entropy
from tests.pool import run_distributed
from tests.tensor.probes import collectives, error, random, saved, world_axis

S, B = 4, 2


def _reference(logits: Tensor, targets: Tensor, grad: Tensor, valid: int) -> tuple[Tensor, Tensor]:
    """Loss and gradient of all columns by torch, in the logits' loss type."""
    wide = (
        logits.detach().to(torch.float64 if logits.dtype == torch.float64 else torch.float32).requires_grad_()
    )
    loss = F.cross_entropy(
        wide[..., :valid].reshape(-1, valid), targets.reshape(-1), reduction="none", ignore_index=-100
    ).view(targets.shape)
    loss.backward(grad)
    assert wide.grad is not None
    return loss.detach(), wide.grad


def _case(kind: str, vocab: int, valid: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    logits = random(S, B, vocab, seed=1) * 3
    targets = torch.randint(valid, (S, B), generator=torch.Generator().manual_seed(2))
    edges = (0, min(vocab // 2 - 1, valid - 1), min(vocab // 2, valid - 1), valid - 1)
    targets[:2] = torch.tensor(edges).view(2, 2)
    if kind == "huge":  # VC-05: the largest logit on either side, the target on either side, and equal ones
        logits = logits.sign() * 1e4
        logits[0, :, 0] = 2e4
        logits[1, :, valid - 1] = 2e4
        logits[2] = -1e4
    if kind == "ignored":
        targets[2, 0] = targets[3, 1] = -100
    logits[..., valid:] = float("nan")  # padded columns hold anything and must not be looked at
    return logits.to(dtype), targets, random(S, B, seed=3)


def _split(
    rank: int, world_size: int, kind: str, vocab: int, valid: int, dtype: torch.dtype
) -> dict[str, object]:
    logits, targets, grad = _case(kind, vocab, valid, dtype)
    shard = logits.chunk(world_size, -1)[rank].clone().requires_grad_()
    with collectives() as calls, saved() as kept:
        loss = vocab_parallel_cross_entropy(shard, targets, world_axis(rank, world_size), valid)
    forward = list(calls)
    with collectives() as backward:
        loss.backward(grad.to(loss.dtype))
    assert shard.grad is not None and shard.grad.dtype == dtype and not backward
    return {
        "loss": loss.detach(),
        "grad": shard.grad,
        "calls": forward,
        "kept": [(t.dtype, t.nbytes, tuple(t.shape)) for t in kept],
    }


@pytest.mark.parametrize("kind", ["plain", "huge", "ignored"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("world_size", "vocab", "valid"), [(1, 24, 24), (1, 24, 17), (2, 24, 17), (4, 24, 24), (4, 24, 9)]
)
def test_equals_torch(world_size: int, vocab: int, valid: int, dtype: torch.dtype, kind: str) -> None:
    logits, targets, grad = _case(kind, vocab, valid, dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    loss, gradient = _reference(logits, targets, grad.to(wide), valid)
    results = run_distributed(_split, world_size, kind, vocab, valid, dtype)
    got = torch.cat([result["grad"] for result in results], -1)
    tolerance = 1e-14 if dtype == torch.float64 else 2e-7
    if (
        dtype == torch.bfloat16
    ):  # one rounding at the very end; an element on the edge may round the other way
        torch.testing.assert_close(got, gradient.to(dtype), rtol=2**-8, atol=1e-9)
    else:
        assert error(got, gradient) <= tolerance
    assert not got[..., valid:].any()
    calls = [] if world_size == 1 else [("all_reduce", n * S * B * wide.itemsize) for n in (1, 2)]
    for result in results:
        assert result["loss"].dtype == wide
        assert error(result["loss"], loss) <= tolerance
        assert torch.isfinite(result["loss"]).all()
        assert result["calls"] == calls
        columns = vocab // world_size
        assert result["kept"] == [
            (wide, S * B * columns * wide.itemsize, (S, B, columns)),
            (torch.int64, 8 * S * B, (S, B)),
        ]


def _guard(rank: int, world_size: int) -> Tensor:
    """Vocabulary 50257, padded to 50304 for two ranks: targets at every edge."""
    logits = random(4, 1, 50304, seed=1, dtype=torch.float32)
    targets = torch.tensor([[0], [50304 // 2 - 1], [50304 // 2], [50256]])
    logits[..., 50257:] = 1e4
    shard = logits.chunk(2, -1)[rank]
    return vocab_parallel_cross_entropy(shard, targets, world_axis(rank, world_size), 50257)


def test_targets_at_the_edges_of_a_padded_vocabulary() -> None:  # VC-01
    logits = random(4, 1, 50304, seed=1, dtype=torch.float32)
    targets = torch.tensor([0, 50304 // 2 - 1, 50304 // 2, 50256])
    wanted = F.cross_entropy(logits[:, 0, :50257], targets, reduction="none")
    for loss in run_distributed(_guard, 2):
        torch.testing.assert_close(loss[:, 0], wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_does_not_change_a_bit(dtype: torch.dtype) -> None:
    valid = 1009
    results = []
    for padded in (1009, 1024, 1152):
        logits = F.pad(
            random(S, B, valid, seed=1, dtype=dtype), (0, padded - valid), value=50.0
        ).requires_grad_()
        targets = torch.randint(valid, (S, B), generator=torch.Generator().manual_seed(2))
        loss = vocab_parallel_cross_entropy(logits, targets, single_axis(), valid)
        loss.mean().backward()
        assert logits.grad is not None
        results.append((loss, logits.grad[..., :valid]))
    for loss, grad in results[1:]:
        assert torch.equal(loss, results[0][0]) and torch.equal(grad, results[0][1])


def test_the_logits_are_not_changed_and_backward_may_run_twice() -> None:
    logits = random(S, B, 16, seed=1, dtype=torch.float32).requires_grad_()
    before = logits.detach().clone()
    targets = torch.zeros(B, S, dtype=torch.int64).t()
    loss = vocab_parallel_cross_entropy(logits, targets, single_axis(), 16).sum()
    (first,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (second,) = torch.autograd.grad(loss, logits)
    assert torch.equal(first, second) and torch.equal(logits.detach(), before)


def test_refusals() -> None:
    logits, targets = torch.zeros(S, B, 16), torch.zeros(S, B, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="a target is outside the vocabulary of 12"):
        vocab_parallel_cross_entropy(logits, targets + 12, single_axis(), 12)
    with pytest.raises(ValueError, match="do not fit targets"):
        vocab_parallel_cross_entropy(logits, targets.t(), single_axis(), 12)
    with pytest.raises(ValueError, match="valid vocabulary 17 with 1 shards of 16"):
        vocab_parallel_cross_entropy(logits, targets, single_axis(), 17)
