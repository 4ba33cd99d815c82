"""Core attention: causal softmax(q k') v, fused or not.

s sequence, b micro-batch, a heads, g key/value heads, r = a/g, d head size, t tensor-parallel size.  The input is
queries, keys and values in one storage: side by side, ``[s, b, (a + 2g)/t, d]``, or where each query head has its own
key and value also packed as the projection made them, ``[s, b, g/t, 3, d]``.  The output is ``[s, b, a d / t]``.

What is saved besides that one storage:

* fused: the output and a log-sum-exp, 4abs/t bytes.  Replaying it frees almost nothing and costs a forward.
* unfused: softmax 2as²b/t, its dropped-out copy 2as²b/t and the mask as²b/t (16-bit; without dropout the softmax
  alone).  This is the 5as²b of Korthikanti et al. 2022, and what selective recompute was made for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megackpt.mesh.device import reads_freely
from megackpt.model.documents import Documents
from megackpt.recompute import MaskSource, Stream, keep_scale


def _views(x: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of queries ``[b, a, s, d]``, keys and values ``[b, g, s, d]``."""
    if x.dim() == 5:
        q, k, v = x.permute(1, 2, 0, 3, 4).unbind(3)
    else:
        q, k, v = x.permute(1, 2, 0, 3).split((x.shape[2] - 2 * groups, groups, groups), dim=1)
    return q, k, v


class _Split(torch.autograd.Function):
    """:func:`_views` whose backward writes each gradient once, where the projection wants it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
        ctx.groups, ctx.shape = groups, x.shape
        return _views(x, groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        out = grads[0].new_empty(ctx.shape)
        for part, grad in zip(_views(out, ctx.groups), grads, strict=True):
            part.copy_(grad)
        return out, None


def fused_core(
    packed: Tensor, groups: int, p: float, stream: Stream | None, documents: Documents | None = None
) -> Tensor:
    """One kernel; the ``[s, b, a d / t]`` result is a view of the kernel's own output where its layout allows.

    With ``documents`` there is one kernel for each of them: no mask is stored, and no product is computed that a mask
    would hide.  The kernel draws dropout from torch's default generator, which the stream stands in for meanwhile.
    """
    q, k, v = _Split.apply(packed, groups)
    grouped = q.shape[1] != groups
    attend = partial(F.scaled_dot_product_attention, dropout_p=p, is_causal=True, enable_gqa=grouped)
    with nullcontext() if stream is None else stream.lend_default():
        if documents is None:
            return attend(q, k, v).permute(2, 0, 1, 3).flatten(2)
        # Splits, not slices: the backward of a slice would write a whole gradient of zeros for each document.
        samples = zip(*(part.split(1) for part in (q, k, v)), documents.lengths, strict=True)
        return torch.cat([_each_document(attend, sample, lengths) for *sample, lengths in samples], dim=1)


def _each_document(attend: Callable[..., Tensor], sample: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    """Queries, keys and values of one sample, [1, a, s, d], to its output, [s, 1, a d]."""
    parts = zip(*(part.split(list(lengths), dim=2) for part in sample), strict=True)
    return torch.cat([attend(*part).permute(2, 0, 1, 3).flatten(2) for part in parts])


class _UnfusedCore(torch.autograd.Function):
    """Saves its input storage, the softmax in the input's type and, with dropout, its dropped-out copy and mask."""

    @staticmethod
    def forward(
        ctx: Any,
        packed: Tensor,
        groups: int,
        softmax_in_fp32: bool,
        source: MaskSource | None,
        documents: Documents | None,
    ) -> Tensor:
        ctx.groups, ctx.source = groups, source
        mask = None if source is None else source.first()
        sure = not reads_freely(packed)
        saved, out = _attend(packed, groups, softmax_in_fp32, mask, source, documents, sure)
        # A key to come with an infinite score has made NaN of rows that must not see it.  Asking the result costs next
        # to nothing, while writing the mask is a pass over all scores; so that is done where asking is dear.
        if not sure and not bool(out.sum().isfinite()):
            saved, out = _attend(packed, groups, softmax_in_fp32, mask, source, documents, True)
        ctx.save_for_backward(packed, *saved, *((mask,) if source is not None and source.keep else ()))
        return _merged(out, packed.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        packed, weights, *rest = ctx.saved_tensors
        source: MaskSource | None = ctx.source
        groups, s, d = ctx.groups, packed.shape[0], packed.shape[-1]
        q, k, v = _grouped(packed, groups)
        heads = groups * q.shape[2] // s
        dropped = rest[0] if source is not None else weights
        grad_out = grad.view(s, -1, heads, d).permute(1, 2, 0, 3).reshape(-1, groups, heads // groups * s, d)
        grad_packed = torch.empty_like(packed)
        grad_q, grad_k, grad_v = _views(grad_packed, groups)
        grad_v.copy_(torch.matmul(dropped.flatten(2, 3).transpose(-1, -2), grad_out))
        grad_weights = torch.matmul(grad_out, v.transpose(-1, -2)).view(weights.shape)
        if source is not None:
            mask = (rest[1] if source.keep else source.again()).view(weights.shape)
            grad_weights.mul_(mask).mul_(keep_scale(source.p))
        grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
        grad_scores = grad_scores.mul_(1.0 / math.sqrt(d)).flatten(2, 3)
        grad_q.copy_(torch.matmul(grad_scores, k).view(-1, heads, s, d))
        grad_k.copy_(torch.matmul(grad_scores.transpose(-1, -2), q))
        return grad_packed, None, None, None, None


def _attend(
    packed: Tensor,
    groups: int,
    softmax_in_fp32: bool,
    mask: Tensor | None,
    source: MaskSource | None,
    documents: Documents | None,
    sure: bool,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """What is saved (softmax, with dropout its dropped-out copy too) and the result ``[b, g, r s, d]``.

    Scale and mask cost no pass of their own: the kernel adds the product to the mask.  That takes away every score but
    an infinite one or a NaN; ``sure``: write the mask once more, over the scores.
    """
    q, k, v = _grouped(packed, groups)  # [b, g, r s, d], [b, g, s, d] twice
    s, (b, rows) = packed.shape[0], (q.shape[0], q.shape[2])
    scores = torch.baddbmm(
        _causal(q, rows // s), q.flatten(0, 1), k.flatten(0, 1).mT, alpha=1.0 / math.sqrt(packed.shape[-1])
    ).view(b, groups, -1, s, s)
    if documents is not None:
        scores.masked_fill_(documents.apart()[:, None, None], -torch.inf)
    if sure:
        scores.masked_fill_(_hidden(scores), -torch.inf)
    if softmax_in_fp32 and scores.dtype not in (torch.float32, torch.float64):
        scores = scores.float()
    weights = torch.softmax(scores, dim=-1).to(packed.dtype)
    if mask is None or source is None:
        return (weights,), torch.matmul(weights.flatten(2, 3), v)
    dropped = (weights * mask.view(weights.shape)).mul_(keep_scale(source.p))
    return (weights, dropped), torch.matmul(dropped.flatten(2, 3), v)


def _grouped(packed: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of one group stacked along the sequence, ``[b, g, r s, d]``: one product serves a whole group."""
    q, k, v = _views(packed, groups)
    b, heads, s, d = q.shape
    return q.reshape(b, groups, heads // groups * s, d), k, v


def _causal(q: Tensor, r: int) -> Tensor:
    """What is added to the scores of r stacked query heads, ``[r s, s]``: minus infinity for keys to come, else 0."""
    s = q.shape[2] // r
    return q.new_full((s, s), -torch.inf).triu_(1).repeat(r, 1)


def _hidden(scores: Tensor) -> Tensor:
    """True for keys to come, ``[s, s]``."""
    return scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu_(1)


def _merged(out: Tensor, s: int) -> Tensor:  # [b, g, r s, d] -> [s, b, a d]
    b, _, _, d = out.shape
    return out.view(b, -1, s, d).permute(2, 0, 1, 3).flatten(2)


def unfused_core(
    packed: Tensor,
    groups: int,
    softmax_in_fp32: bool,
    p: float,
    stream: Stream | None,
    documents: Documents | None = None,
) -> Tensor:
    """Plain products with a softmax of our own that stores what the fused kernel would not.  ``documents`` store
    nothing more: the softmax is 0 where they hide a token."""
    source = None
    if p > 0.0:
        assert stream is not None
        b, heads, s, _ = _views(packed, groups)[0].shape
        source = MaskSource(torch.Size((b, heads, s, s)), p, stream)
    return _UnfusedCore.apply(packed, groups, softmax_in_fp32, source, documents)
