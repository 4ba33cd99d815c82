"""Exact parameter counts of every piece, and the bytes of the state that hangs on them."""

from __future__ import annotations

from dataclasses import dataclass

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
    return ParameterCount(weights + column, row) + norm_parameters(model).times(2)


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
