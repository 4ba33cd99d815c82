"""Cross entropy over logits that stay split along the vocabulary.

Letters: s sequence, b micro-batch, V padded vocabulary, t tensor-parallel size.

    loss = log sum_j exp(z_j - m) - (z_target - m),   m = max_j z_j over all shards

Each rank works on its V/t columns; what travels is the maximum and, packed in one tensor, the sum of the exponentials
and the target's logit: [s, b] and [2, s, b] numbers. The maximum is exact over all shards, so exponentials never
overflow wherever the largest logit lies. Columns beyond the valid vocabulary take no part in maximum or sum and get
gradient zero, so the result does not depend on how much the vocabulary was padded.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
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

        peak = _peak(logits[..., :valid], axis, compute)  # [s, b]
        probabilities = logits - peak.unsqueeze(-1)  # [s, b, V/t], a new tensor in the wider type
        local, mine = _localise(targets, first, valid)
        parts = logits.new_zeros((2, *targets.shape), dtype=compute)  # sum of exponentials, target's logit
        if valid:
            parts[1] = probabilities.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill_(~mine, 0.0)
            torch.sum(probabilities[..., :valid].exp_(), dim=-1, out=parts[0])
        probabilities[..., valid:].zero_()
        if axis.size > 1:
            dist.all_reduce(parts, group=axis.group)
        total, target_logit = parts.unbind(0)
        probabilities.div_(total.unsqueeze(-1))

        ctx.save_for_backward(probabilities, targets)
        ctx.first, ctx.valid, ctx.dtype = first, valid, logits.dtype
        return (total.log() - target_logit).masked_fill_(targets < 0, 0.0)

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


def _peak(logits: Tensor, axis: Axis, compute: torch.dtype) -> Tensor:
    """Largest valid logit of all shards, [s, b]."""
    if logits.shape[-1]:
        peak = logits.amax(-1).to(compute)
    else:  # a shard of nothing but padding
        peak = logits.new_full(logits.shape[:-1], -torch.inf, dtype=compute)
    if axis.size > 1:
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=axis.group)
    return peak


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
