"""--qk-layernorm: queries and keys normed by head, by weights that every tensor-parallel rank uses for its heads."""

from __future__ import annotations

import itertools
import zlib

import pytest
import torch

from megackpt.observe.numbers import model_numbers
from megackpt.plan.buffers import default_bucket_size, lay_out
from megackpt.plan.parameters import stage_members
from megackpt.train.build import Trainer
from tests import reference
from tests.layouts import (
    FAMILIES,
    SHAPES,
    SMALL_GPT,
    SMALL_LLAMA,
    TOLERANCES,
    Distance,
    Flags,
    Layout,
    Trace,
    batches_of,
    built,
    distance,
    steps,
    whole_weights,
)
from tests.plan.live_run import layout_of, run_cases
from tests.pool import run_distributed

MORE: Flags = {"qk-layernorm": True, "params-dtype": "fp64"}
GROUPED: Flags = {"group-query-attention": True, "num-query-groups": 2}
MODELS: dict[str, Flags] = {
    "gpt": SMALL_GPT | MORE,  # LayerNorm, packed
    "grouped": SMALL_GPT | MORE | GROUPED | {"num-attention-heads": 8},  # ... laid side by side after the norm
    "llama": SMALL_LLAMA | MORE,  # RMSNorm, then rope
}
PARTIAL = {"layers.0.attn.q_norm.weight", "layers.1.attn.k_norm.weight"}


def _random_norms(trainer: Trainer) -> None:
    """Weights that are not all alike, the same on all ranks."""
    with torch.no_grad():
        for parameter, record in trainer.parameters:
            if "_norm." in record.name:
                generator = torch.Generator().manual_seed(zlib.crc32(record.name.encode()))
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def _checked(trace: Trace) -> Trace:
    """Without the gradients of what all keys of a head have in common, which softmax takes away: they are zero."""
    for grads, norm in zip(trace.grads, trace.norms, strict=True):
        for name in [name for name in grads if name.endswith("k_norm.bias")]:
            assert float(grads.pop(name).norm()) <= 1e-15 * norm
    return trace


def _beside_plain_loop(rank: int, world_size: int, family: str) -> Distance:
    trainer = built(FAMILIES[family] | MORE)
    _random_norms(trainer)
    weights, batches = whole_weights(trainer), list(itertools.islice(batches_of(trainer), 2))
    plain = reference.train(weights, batches, SHAPES[family], reference.AdamW(trainer.config.optimizer.lr))
    expected = Trace([s.loss for s in plain], [s.norm for s in plain], [], [s.grads for s in plain])
    return distance(_checked(steps(trainer, 2, gradients_of=2)), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_equals_a_plain_loop(family: str) -> None:
    (found,) = run_distributed(_beside_plain_loop, 1, family)
    assert set(found.names) > PARTIAL
    found.check(**TOLERANCES["fp64"])


def _traced(rank: int, world_size: int, flags: Flags, layout: Layout) -> Trace:
    trainer = built(flags, layout)
    _random_norms(trainer)
    numbers = layout_of(trainer)
    members = stage_members(model_numbers(trainer.config, trainer.vocab), numbers, trainer.mesh.pp.index)
    assert lay_out(members, default_bucket_size(layout.dp), layout.dp) == trainer.buffer.layout
    return steps(trainer, 3, gradients_of=3)


SHARDED: Flags = {"use-distributed-optimizer": True, "overlap-grad-reduce": True, "overlap-param-gather": True}
LAYOUTS: list[tuple[Layout, Flags]] = [
    (Layout(tp=2), {}),
    (Layout(tp=2, sp=True), {}),
    (Layout(tp=2, dp=2), SHARDED),
    (Layout(tp=2, dp=2, sp=True), SHARDED),
    (Layout(pp=2), {}),
    (Layout(tp=2, pp=2), {"recompute-granularity": "full", "pipeline-schedule": "zb-h1"}),
]


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_shared_head_weights_are_those_of_one_rank(name: str) -> None:  # TP-03
    """Each rank norms its own heads: the gradient is a sum over ranks, with sequence parallelism and without it."""
    (alone,) = map(_checked, run_distributed(_traced, 1, MODELS[name], Layout()))
    for layout, more in LAYOUTS:
        seen = set()
        for trace in run_distributed(_traced, layout.world_size, MODELS[name] | more, layout):
            distance(_checked(trace), alone).check(**TOLERANCES["fp64"])
            seen |= set(trace.grads[0])
        assert seen == set(alone.grads[0]) and seen > PARTIAL


POLICIES: dict[str, Flags] = {
    "free": {"recompute-granularity": "free"},
    "qknorm": {"recompute-granularity": "selective", "recompute-modules": ["attn.qknorm", "attn.core"]},
    "full": {"recompute-granularity": "full", "verify-replay": True},
    "layer-input": {"recompute-granularity": "full", "recompute-keep": "layer-input"},
}


@pytest.mark.parametrize("name", MODELS)
def test_replay_is_bitwise(name: str) -> None:
    for layout, dtype in ((Layout(), "bf16"), (Layout(tp=2, sp=True), "fp32")):
        flags = MODELS[name] | {"params-dtype": dtype, "hidden-dropout": 0.1}
        plain = run_distributed(_traced, layout.world_size, flags, layout)
        for policy in POLICIES.values() if dtype == "bf16" else (POLICIES["qknorm"], POLICIES["full"]):
            replayed = run_distributed(_traced, layout.world_size, flags | policy, layout)
            for one, other in zip(replayed, plain, strict=True):
                assert (one.losses, one.norms) == (other.losses, other.norms)
                for a, b in zip(one.grads, other.grads, strict=True):
                    assert all(torch.equal(a[key], b[key]) for key in b)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        (Layout(), "fp32"),
        pytest.param(Layout(), "bf16", marks=pytest.mark.full),
        pytest.param(Layout(tp=2, sp=True), "bf16", marks=pytest.mark.full),
    ],
    ids=str,
)
def test_bytes_are_those_of_the_plan(layout: Layout, dtype: str) -> None:
    """Kept to the byte; the peak, where a small vocabulary and a small MLP leave it to the norm, to a thousandth."""
    narrow = {"vocab-size": 64, "make-vocab-size-divisible-by": 1, "ffn-hidden-size": 48, "params-dtype": dtype}
    plans = [{}, *POLICIES.values()] if layout.tp == 1 else [POLICIES["qknorm"], POLICIES["full"]]
    cases = [flags | narrow | plan for flags in MODELS.values() for plan in plans]
    seen_here = False
    for of_rank in run_distributed(run_cases, layout.world_size, cases, layout):
        for flags, (seen, predicted) in zip(cases, of_rank, strict=True):
            assert (predicted.parameters, predicted.kept_peak_bytes) == (seen.numel, seen.kept), flags
            here = "backward attn.qknorm" in predicted.peak_step
            assert abs(predicted.activation_bytes / seen.peak - 1) <= (1e-3 if here and layout.tp == 1 else 1e-2), flags
            seen_here = seen_here or here
    assert seen_here
