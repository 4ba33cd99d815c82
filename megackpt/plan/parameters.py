"""Exact parameter counts of every piece, and the bytes of the state that hangs on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megackpt.plan.buffers import ALIGNMENT, BufferLayout, Member, default_bucket_size, lay_out
from megackpt.plan.numbers import Layout, ModelNumbers


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of one rank: split over tp, and whole on each of its ranks."""

    sharded: int = 0
    replicated: int = 0

    @property
    def total(self) -> int:
        return self.sharded + self.replicated

    def __add__(self, other: ParameterCount) -> ParameterCount:
        return ParameterCount(self.sharded + other.sharded, self.replicated + other.replicated)

    def times(self, count: int) -> ParameterCount:
        return ParameterCount(self.sharded * count, self.replicated * count)


@dataclass(frozen=True)
class StateBytes:
    """What one rank holds for its parameters, whatever runs."""

    weights: int
    gradients: int
    masters: int
    moments: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.masters + self.moments


def norm_parameters(model: ModelNumbers) -> ParameterCount:
    return ParameterCount(0, model.hidden * (2 if model.norm == "LayerNorm" else 1))


def layer_parameters(model: ModelNumbers, t: int) -> ParameterCount:
    """One transformer layer on one of t ranks.  Biases of row-parallel products are whole on each."""
    queries = model.heads * model.head_size // t
    packed = (model.heads + 2 * model.kv_heads) * model.head_size // t
    up = model.ffn * (2 if model.gated else 1) // t
    weights = model.hidden * (packed + queries + up + model.ffn // t)
    column, row = (packed + up, 2 * model.hidden) if model.biases else (0, 0)
    heads = sum(member.numel for member in _head_norm_members(model))
    return ParameterCount(weights + column, row + heads) + norm_parameters(model).times(2)


def embedding_parameters(model: ModelNumbers, t: int) -> ParameterCount:
    rows = model.max_positions if model.positions == "learned_absolute" else 0
    return ParameterCount(model.padded_vocab // t * model.hidden, rows * model.hidden)


def head_parameters(model: ModelNumbers, t: int, *, own_matrix: bool) -> ParameterCount:
    """The final norm, and the output matrix where the piece does not share one with its own embedding."""
    return norm_parameters(model) + ParameterCount(model.padded_vocab // t * model.hidden if own_matrix else 0)


def parameters(model: ModelNumbers, layout: Layout, stage: int, chunk: int = 0) -> ParameterCount:
    """Parameters of one piece on one rank, exactly as the trainer makes them: a tied output matrix is a second copy
    where first and last piece are not the same."""
    first, last = layout.is_first(stage, chunk), layout.is_last(stage, chunk)
    count = layer_parameters(model, layout.t).times(len(layout.pieces[stage][chunk]))
    if first:
        count += embedding_parameters(model, layout.t)
    if last:
        count += head_parameters(model, layout.t, own_matrix=not (model.tied and first))
    return count


def stage_parameters(model: ModelNumbers, layout: Layout, stage: int) -> ParameterCount:
    """All pieces of a stage."""
    count = ParameterCount()
    for chunk in range(layout.v):
        count += parameters(model, layout, stage, chunk)
    return count


def stage_members(model: ModelNumbers, layout: Layout, stage: int) -> list[Member]:
    """The parameters of a stage as the trainer's buffers get them: chunk after chunk in the order of the modules."""
    members: list[Member] = []
    for chunk, layers in enumerate(layout.pieces[stage]):
        first, last = layout.is_first(stage, chunk), layout.is_last(stage, chunk)
        table = model.padded_vocab // layout.t * model.hidden
        apart = model.tied and first != last  # the two ends lie in different pieces
        if first or (last and model.tied):
            members.append(Member(table, tied=apart, early=not first))
        if first and model.positions == "learned_absolute":
            members.append(Member(model.max_positions * model.hidden, partial=True))
        members += [member for _ in layers for member in _layer_members(model, layout.t)]
        if last:
            members += [Member(table)] * (not model.tied) + _norm_members(model)
    return members


def _norm_members(model: ModelNumbers) -> list[Member]:
    return [Member(model.hidden, partial=True)] * (2 if model.norm == "LayerNorm" else 1)


def _layer_members(model: ModelNumbers, t: int) -> list[Member]:
    queries = model.heads * model.head_size // t
    packed = (model.heads + 2 * model.kv_heads) * model.head_size // t
    ffn, up = model.ffn // t, model.ffn * (2 if model.gated else 1) // t

    def column(outputs: int) -> list[Member]:
        return [Member(outputs * model.hidden)] + [Member(outputs)] * model.biases

    def row(inputs: int) -> list[Member]:
        return [Member(inputs * model.hidden)] + [Member(model.hidden, partial=True)] * model.biases

    norm, heads = _norm_members(model), _head_norm_members(model)
    return [*norm, *column(packed), *heads, *row(queries), *norm, *column(up), *row(ffn)]


def _head_norm_members(model: ModelNumbers) -> list[Member]:
    """Of queries and of keys."""
    each = 2 if model.norm == "LayerNorm" else 1
    return [Member(model.head_size, partial=True, always=True)] * (2 * each * model.qk_norm)


def stage_state(model: ModelNumbers, layout: Layout, stage: int) -> StateBytes:
    """What one rank of a stage holds: `state_bytes` to the byte, with what fills the buckets up, and the optimizer's
    state on the data-parallel rank that has most of it."""
    members, ranks = stage_members(model, layout, stage), layout.d * layout.c
    places = lay_out(members, layout.bucket_size or default_bucket_size(ranks), ranks)
    count = sum(member.numel for member in members)
    weights, owned = count, count
    if layout.sharded_optimizer:
        weights = places.total
        owned = max(_owned(places, members, rank) for rank in range(ranks))
    wide = layout.wide_bytes
    return StateBytes(
        weights=weights * layout.act_bytes,
        gradients=places.total * layout.grad_bytes,
        masters=owned * wide if layout.has_masters else 0,
        moments=2 * owned * wide,
    )


def _owned(places: BufferLayout, members: Sequence[Member], rank: int) -> int:
    parts = (
        places.part(i, members[i].numel, bucket, rank) for bucket, group in enumerate(places.buckets) for i in group
    )
    return sum(part[1] - part[0] for part in parts if part is not None)


def filling_bytes(model: ModelNumbers, layout: Layout) -> int:
    """What the buffers of all stages together are filled up by, in gradients and weights: above that of any stage,
    however the layers are split."""
    ranks, filling = layout.d * layout.c, 0
    for stage in range(layout.p):
        members = stage_members(model, layout, stage)
        places = lay_out(members, layout.bucket_size or default_bucket_size(ranks), ranks)
        filling += places.total - sum(member.numel for member in members) + ALIGNMENT * ranks
    return filling * (layout.grad_bytes + layout.act_bytes)


def state_bytes(count: int, layout: Layout) -> StateBytes:
    """18 bytes a parameter in bf16: 2 weight, 4 gradient, 4 master, 8 Adam; with a sharded optimizer 6 + 12/d.
    fp32 and fp64 parameters are their own masters."""
    wide = layout.wide_bytes
    share = layout.d * layout.c if layout.sharded_optimizer else 1
    masters = count * wide if layout.has_masters else 0
    return StateBytes(
        weights=count * layout.act_bytes,
        gradients=count * layout.grad_bytes,
        masters=-(-masters // share),
        moments=-(-2 * wide * count // share),
    )
