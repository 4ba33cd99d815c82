"""Cross entropy over logits that stay split along the vocabulary.

Letters: s sequence, b micro-batch, V padded vocabulary, t tensor-parallel size.

    loss = log sum_j exp(z_j - m) - (z_target - m),   m = max_j z_j over all shards

Each rank takes the softmax of its V/t columns and rescales it by its part of the whole sum. What travels is the
maximum and, packed in one tensor, the sum of the exponentials and the target's logit: [s, b] and [2, s, b] numbers.
The maximum is exact over all shards, so exponentials never overflow wherever the largest logit lies. Columns beyond
the valid vocabulary take no part in maximum or sum and get gradient zero, so the result does not depend on how much
the vocabulary was padded.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megackpt.mesh.process_mesh import Axis


class _VocabParallelCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, axis: Axis, valid_vocab: int) -> Tensor:
        first = axis.index * logits.shape[-1]
        valid = max(
            0, min(logits.shape[-1], valid_vocab - first)
        )  # columns of this shard that are not padding
        compute = torch.float64 if logits.dtype == torch.float64 else torch.float32

        probabilities, peak, total = _shard_softmax(logits, valid, compute)
        local, mine = _localise(targets, first, valid)
        target_logit = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).to(compute)
        if axis.size > 1:
            own_peak, own_total = peak.clone(), total
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=axis.group)
            own_total = own_total * (own_peak - peak).exp_()
            parts = torch.stack((own_total, (target_logit - peak).masked_fill_(~mine, 0.0)))  # [2, s, b]
            dist.all_reduce(parts, group=axis.group)
            total, distance = parts.unbind(0)
            probabilities.mul_((own_total / total).unsqueeze(-1))
        else:
            distance = target_logit - peak

        ctx.save_for_backward(probabilities, targets)
        ctx.first, ctx.valid, ctx.dtype = first, valid, logits.dtype
        return (total.log() - distance).masked_fill_(targets < 0, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, targets = ctx.saved_tensors
        grad = grad.masked_fill(targets < 0, 0.0).unsqueeze(-1)  # [s, b, 1]
        local, mine = _localise(targets, ctx.first, ctx.valid)
        index = local.unsqueeze(-1)
        hit = mine.unsqueeze(-1).to(probabilities.dtype)
        at_target = (probabilities.gather(-1, index) - hit) * grad  # [s, b, 1], before any rounding
        grad_logits = torch.empty_like(probabilities, dtype=ctx.dtype)
        torch.mul(probabilities, grad, out=grad_logits)
        return grad_logits.scatter_(-1, index, at_target.to(ctx.dtype)), None, None, None


def _shard_softmax(logits: Tensor, valid: int, compute: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax over the valid columns of this shard alone, zero in the others, [s, b, V/t]; the largest valid logit;
    and the sum of exponentials relative to it, both [s, b].

    One fused kernel instead of four passes.  It does not tell its sum, but the largest probability is exp(0) over it.
    """
    columns = logits.shape[-1]
    if valid == 0:  # a shard of nothing but padding
        peak = logits.new_full(logits.shape[:-1], -torch.inf, dtype=compute)
        return logits.new_zeros(logits.shape, dtype=compute), peak, torch.zeros_like(peak)
    here = logits[..., :valid]
    probabilities = torch.softmax(here, dim=-1, dtype=compute)
    peak, total = here.amax(-1).to(compute), probabilities.amax(-1).reciprocal_()
    if valid < columns:
        probabilities = F.pad(probabilities, (0, columns - valid))
    return probabilities, peak, total


def _localise(targets: Tensor, first: int, valid: int) -> tuple[Tensor, Tensor]:
    """Targets as columns of this shard (0 for foreign ones), and which of them are its own. Both [s, b]."""
    local = targets - first
    mine = (local >= 0) & (local < valid)
    return local.masked_fill_(~mine, 0), mine


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, axis: Axis, valid_vocab: int) -> Tensor:
    """Loss per token, [s, b], in fp32 (fp64 for fp64 logits).

    `logits` [s, b, V/t] are this rank's columns, `targets` [s, b] int64 ids of the whole vocabulary, `valid_vocab` its
    size without padding. A negative target counts as no target: loss and gradient zero. Saves one softmax in the
    loss's type, 4sbV/t bytes, and the targets, 8sb. Two all-reduces if the axis has more than one rank. Raises
    RuntimeError for a target at or beyond `valid_vocab` (on a GPU when the device gets there).
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(f"logits {tuple(logits.shape)} do not fit targets {tuple(targets.shape)}")
    if not 0 < valid_vocab <= logits.shape[-1] * axis.size:
        raise ValueError(
            f"valid vocabulary {valid_vocab} with {axis.size} shards of {logits.shape[-1]} columns"
        )
    torch._assert_async((targets < valid_vocab).all(), f"a target is outside the vocabulary of {valid_vocab}")
    return _VocabParallelCrossEntropy.apply(logits, targets, axis, valid_vocab)
