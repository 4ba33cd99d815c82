"""Weights of which there are several copies: tied ones on two stages, replicated ones on tensor-parallel ranks, all of
them on data-parallel ranks.  Copies stay equal to the bit, and count once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.layouts import (
    GPT,
    LLAMA,
    Distance,
    Flags,
    Layout,
    Trace,
    built,
    distance,
    relative,
    steps,
    whole_weights,
)
from tests.pool import run_distributed

WORD = "embedding.word.weight"


def _local_word(rank: int, world_size: int, flags: Flags, layout: Layout, count: int) -> tuple[Trace, Tensor | None]:
    trainer = built(flags, layout)
    trace = steps(trainer, count)
    local = {record.name: parameter.detach().clone() for parameter, record in trainer.parameters}
    return trace, local.get(WORD)


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(tp=2, pp=2, sp=True), Layout(pp=2, dp=2)], ids=str)
def test_tied_copies_stay_equal_for_ten_steps(layout: Layout) -> None:  # TE-02
    flags = GPT | {"params-dtype": "fp64", "train-iters": 10}
    ((r0, whole),) = run_distributed(_local_word, 1, flags, Layout(), 10)
    found = run_distributed(_local_word, layout.world_size, flags, layout, 10)
    half = layout.world_size // 2  # pp is the slowest axis: ranks of the first stage, then of the last
    for (trace, first), (_, last) in zip(found[:half], found[half:], strict=True):
        assert torch.equal(first, last)
        assert max(map(relative, trace.losses, r0.losses)) <= 1e-12
    whole_again = torch.cat([word for _, word in found[: layout.tp]])
    rows = 509  # of the vocabulary; the rest is padding
    assert float((whole_again[:rows] - whole[:rows]).norm() / whole[:rows].norm()) <= 1e-12
    assert not whole_again[rows:].any()


def _norms(rank: int, world_size: int, flags: Flags, layout: Layout) -> list[float]:
    return steps(built(flags, layout), 2).norms


def test_a_tied_weight_counts_once_in_the_norm() -> None:  # TE-03
    for dtype, tolerance in (("fp64", 1e-12), ("fp32", 1e-6)):
        flags = GPT | {"params-dtype": dtype, "lr": 3e-4}
        expected = run_distributed(_norms, 1, flags, Layout())[0]
        for norms in run_distributed(_norms, 2, flags, Layout(pp=2)):
            assert max(map(relative, norms, expected)) <= tolerance


@pytest.mark.parametrize("flags", [GPT, LLAMA], ids=["gpt", "llama"])
def test_replicated_weights_count_once_in_the_norm_without_clipping(flags: Flags) -> None:  # TE-04
    flags = flags | {"params-dtype": "fp64", "clip-grad": 0.0, "global-batch-size": 2}
    expected = run_distributed(_norms, 1, flags, Layout())[0]
    for layout in (Layout(tp=2), Layout(tp=2, sp=True), Layout(tp=4, sp=True)):
        for norms in run_distributed(_norms, layout.tp, flags, layout):
            assert max(map(relative, norms, expected)) <= 1e-12


def _replicated(
    rank: int, world_size: int, flags: Flags, layout: Layout
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Finished gradients of one step and weights after three, of parameters that every rank has whole."""
    trainer = built(flags, layout)
    first = steps(trainer, 1, gradients_of=1).grads[0]
    steps(trainer, 2)
    names = {record.name for _, record in trainer.parameters if record.shard_dim is None}
    return (
        {name: grad for name, grad in first.items() if name in names},
        {name: weight for name, weight in whole_weights(trainer).items() if name in names},
    )


@pytest.mark.parametrize("flags", [GPT, LLAMA], ids=["gpt", "llama"])
def test_gradients_that_each_rank_has_a_part_of_are_summed(flags: Flags) -> None:  # TP-01
    flags = flags | {"params-dtype": "fp64"}
    ((expected, _),) = run_distributed(_whole_first, 1, flags)
    (grads, weights), *others = run_distributed(_replicated, 2, flags, Layout(tp=2, sp=True))
    kinds = {name.split(".", 2)[-1] for name in grads}
    assert kinds >= {"attn.norm.weight", "mlp.norm.weight"}, "the norms of every layer are replicated"
    for other_grads, other_weights in others:
        assert all(torch.equal(grads[name], other_grads[name]) for name in grads)
        assert all(torch.equal(weights[name], other_weights[name]) for name in weights)
    for name, grad in grads.items():
        assert float((grad - expected[name]).norm() / expected[name].norm()) <= 1e-12, name


def _whole_first(rank: int, world_size: int, flags: Flags) -> tuple[dict[str, Tensor], None]:
    return steps(built(flags), 1, gradients_of=1).grads[0], None


def _positions_unused(
    rank: int, world_size: int, flags: Flags, layout: Layout, path: Path, without_positions: bool
) -> Distance | None:
    trainer = built(flags, layout)
    if without_positions:
        assert trainer.chunks[0].embedding is not None
        trainer.chunks[0].embedding.position = None  # type: ignore[assignment]  # the weight stays among the parameters, and no forward uses it
    trace = steps(trainer, 3, gradients_of=3)
    if world_size == 1:
        trace.save(path)
        return None
    if without_positions:
        assert not any(grads.pop("embedding.position.weight").any() for grads in trace.grads)
    return distance(trace, Trace.read(path))


@pytest.mark.parametrize("without_positions", [False, True], ids=["all used", "one unused"])
def test_full_recompute_with_data_parallel_and_tied_weights(without_positions: bool, tmp_path: Path) -> None:  # AR-09
    flags = GPT | {"params-dtype": "fp64"}
    recompute = {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
    path = tmp_path / "r0.pt"
    run_distributed(_positions_unused, 1, flags, Layout(), path, without_positions)
    for found in run_distributed(_positions_unused, 2, flags | recompute, Layout(dp=2), path, without_positions):
        found.check(loss=1e-12, norm=1e-12, gradient=1e-12)
