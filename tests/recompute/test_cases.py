"""Faults that users of other trainers met with recomputation, tried on ours; each test names its case."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megackpt.config.errors import UsageError
from megackpt.config.flags import FLAGS
from megackpt.config.recompute import RecomputeConfig
from megackpt.pipeline import Executor, StageResult, TensorSpec
from megackpt.plan import ChunkPlan, Group, SaveSet, chunk_plan
from megackpt.plan.policies import selective
from megackpt.recompute import RngLedger, Tape, dropout, step
from tests.config.base import run as parse
from tests.layouts import GPT, LLAMA, Flags, Layout, Trace, built, distance, steps
from tests.pipeline.chain import boundary_specs, pipeline_mesh
from tests.pool import run_distributed
from tests.recompute.harness import DROP_ALL, numbers
from tests.recompute.models import L, Outcome, Subject, plan_of, shape
from tests.recompute.probes import Recorder

ALONE = Layout()
NONE: Flags = {"recompute-granularity": "none"}
DROPOUT: Flags = {"hidden-dropout": 0.1, "attention-dropout": 0.1}


def full(**details: object) -> Flags:
    return {"recompute-granularity": "full"} | {f"recompute-{k.replace('_', '-')}": v for k, v in details.items()}


def _losses(rank: int, world_size: int, runs: list[Flags], layout: Layout, count: int, gradients: int) -> list[Trace]:
    return [steps(built(flags, layout), count, gradients_of=gradients) for flags in runs]


def traces(runs: list[Flags], count: int, gradients: int, layout: Layout = ALONE) -> list[list[Trace]]:
    """By rank, then by run."""
    return run_distributed(_losses, layout.world_size, runs, layout, count, gradients, timeout=110)


def assert_equal(trace: Trace, expected: Trace) -> None:
    assert trace.losses == expected.losses and trace.norms == expected.norms
    for grads, others in zip(trace.grads, expected.grads, strict=True):
        assert grads.keys() == others.keys()
        assert [name for name, g in grads.items() if not torch.equal(g, others[name])] == []


def test_rc_01_groups_of_several_layers() -> None:
    """Uniform groups of 2, 3 and 4 over 4 layers: each layer of a group gets its predecessor's output, not the group's
    input.  Losses of 5 steps and every gradient of each, bitwise."""
    base = GPT | {"global-batch-size": 4}
    groups = [base | full(method="uniform", num_layers=k) for k in (2, 3, 4)]
    (found,) = traces([base | NONE, *groups], 5, 5)
    for trace in found[1:]:
        assert_equal(trace, found[0])
    assert len(set(found[0].losses)) == 5


RN_01 = [
    NONE,
    {"recompute-granularity": "selective"},
    full(),
    full(method="block", num_layers=2, keep="layer-input"),
]


def rn_01(count: int) -> None:
    base = GPT | DROPOUT | {"global-batch-size": 4, "train-iters": count}
    (found,) = traces([base | policy for policy in RN_01], count, 0)
    for trace in found[1:]:
        assert trace.losses == found[0].losses and trace.norms == found[0].norms
    (plain,) = traces([base | NONE | {"hidden-dropout": 0.0, "attention-dropout": 0.0}], count, 0)
    assert plain[0].losses != found[0].losses  # dropout was on


def test_rn_01_dropout_over_some_steps() -> None:
    rn_01(6)


@pytest.mark.full
def test_rn_01_dropout_over_100_steps() -> None:
    rn_01(100)


def test_rn_02_no_option_leaves_random_streams_out_of_a_replay() -> None:
    """The right values cost nothing, so nothing turns them off: no flag, no field, no dropout without a stream."""
    assert {flag.name for flag in FLAGS if "rng" in flag.name} == {"--no-save-rng", "--no-load-rng"}
    assert not [f.name for f in fields(RecomputeConfig) if "rng" in f.name or "random" in f.name]
    with pytest.raises(ValueError, match="dropout of 0.1 needs a random stream"):
        dropout(numbers(2, 2), 0.1, None)
    with pytest.raises(UsageError, match="--no-preserve-rng-state"):
        parse("--recompute-granularity full --hidden-dropout 0.1 --no-preserve-rng-state")


def test_rn_06_the_next_numbers_are_those_of_a_run_without() -> None:
    """After forward and backward: states of the default generator and of both streams, and what they draw next."""
    subject = Subject(shape("gpt", hidden_dropout=0.1, attention_dropout=0.1))
    after = []
    for policy in (None, "core", "full", "uniform-2"):
        outcome = subject.run(None if policy is None else plan_of(policy))
        drawn = [torch.rand(4, generator=subject.ledger.stream(name).draw()) for name in ("replicated", "tensor")]
        after.append([outcome.default_generator, torch.rand(4), *drawn])
        assert outcome.streams == {"replicated": 1 + 2 * L, "tensor": L}
    for found in after[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found, after[0], strict=True))


def test_rn_06_generators_of_the_user() -> None:
    """A generator that only torch knows is part of the default ledger; numbers drawn between forward and backward, as
    by the next micro-batch, are not disturbed."""
    x = numbers(6, 8).requires_grad_()
    drawn = []
    for plan in (None, DROP_ALL):
        torch.manual_seed(5)
        with Tape(plan, RngLedger()) if plan is not None else torch.enable_grad():
            loss = step("a", lambda x: F.dropout(x, 0.5).exp(), x).sum()
        between = torch.rand(3)
        loss.backward()
        drawn.append((between, torch.rand(3), x.grad))
        x.grad = None
    assert all(torch.equal(a, b) for a, b in zip(*drawn, strict=True))


# -- AR-06 across a pipeline boundary --------------------------------------------------------------------------------

MIXED = (
    TensorSpec((5, 7), torch.float32),
    TensorSpec((5, 7), torch.bool, requires_grad=False),
    TensorSpec((5,), torch.int64, requires_grad=False),
)


def _first(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = step("a", lambda x, w: (x * w).sin(), x, w)
    return step("b", lambda y: (F.dropout(y, 0.2).exp(), y < 0, y.argmax(-1)), y)  # type: ignore[no-any-return]


def _last(h: Tensor, mask: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    y = step("c", lambda h, mask, w: h.masked_fill(mask, 0.5) * w, h, mask, w)
    return step("d", lambda y, ids: (y * y).gather(1, ids[:, None]).tanh(), y, ids).sum()


def _mixed_stage(rank: int, stages: int, planned: bool) -> tuple[Tensor, list[dict[str, Tensor]]]:
    weight = torch.nn.Parameter(numbers(5, 7, seed=rank))
    torch.manual_seed(3)

    def forward(chunk: int, micro_batch: int, received: tuple[Tensor, ...]) -> Any:
        if rank == 0:
            return _first(numbers(5, 7, seed=10 + micro_batch), weight)
        loss = _last(*received, weight)
        return StageResult(loss, {"loss": loss})

    plan = DROP_ALL if planned else ChunkPlan()
    specs = boundary_specs(rank, stages, MIXED)
    executor = Executor(pipeline_mesh(stages), forward, specs, open_tape=lambda c, m: Tape(plan), timeout_s=20)
    reports = executor.run(4)
    assert weight.grad is not None
    return weight.grad, reports


def test_ar_06_masks_and_ids_beside_activations_across_stages() -> None:
    """Dropped steps give (float, bool, int64), which cross a pipeline boundary; only the float has a gradient."""
    plain = run_distributed(_mixed_stage, 2, False)
    found = run_distributed(_mixed_stage, 2, True)
    for (grad, reports), (other, others) in zip(found, plain, strict=True):
        assert torch.equal(grad, other) and grad.abs().sum() > 0
        assert [r["loss"] for r in reports] == [r["loss"] for r in others]


# -- AR-10 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
def test_ar_10_selective_inside_full(fused: bool) -> None:
    """Whole layers dropped, and in their replay the attention core dropped again: gradients as without; the core runs
    once in forward, once when its layer is replayed, once for its own backward.  With the layer's replay keeping
    everything it runs twice; selective alone twice; a layer's other steps twice in both."""
    subject = Subject(shape("gpt", fused_attention=fused, hidden_dropout=0.1, attention_dropout=0.1))
    plain: Outcome = subject.run(None)
    sets: dict[str, SaveSet] = {f"layers.{i}": selective() for i in range(L)}
    each = tuple(range(L))
    for groups, cores, products in (
        ((), 2, 1),
        (tuple(Group(i, i) for i in each), 2, 2),
        (tuple(Group(i, i, ()) for i in each), 3, 2),
        ((Group(0, 1, (Group(0, 0, ()), Group(1, 1, ()))), Group(2, 4, ())), None, None),
    ):
        recorders = []
        for block in subject.chunk.layers.values():
            block.step = Recorder(getattr(block.step, "scope", block.step))
            recorders.append(block.step)
        assert subject.run(ChunkPlan(sets, groups)).differences(plain) == []
        counts = [Counter(r.forward + r.replayed) for r in recorders]
        if cores is not None:
            assert {c["attn.core"] for c in counts} == {cores}
            assert {c["attn.qkv"] for c in counts} == {products}
        else:  # a tree of depth two: its layers are replayed once more
            assert [c["attn.core"] for c in counts] == [4, 4, 3, 3, 3]


# -- ME-04, ME-05 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2)], ids=str)
def test_me_04_last_group_is_clipped(layout: Layout) -> None:
    """7 layers in groups of 3 (3 + 3 + 1; on two stages 4 + 3 layers: 3 + 1 and 3), and block of 5 where a stage has
    fewer: bitwise as without recompute there; R0 within tolerance."""
    base = GPT | DROPOUT | {"num-layers": 7, "global-batch-size": 4}
    runs = [base | NONE, base | full(method="uniform", num_layers=3), base | full(method="block", num_layers=5)]
    for found in traces(runs, 2, 2, layout):
        for trace in found[1:]:
            assert_equal(trace, found[0])
    calm = base | {"hidden-dropout": 0.0, "attention-dropout": 0.0, "params-dtype": "fp64"}
    (r0,) = traces([calm | NONE], 2, 2)
    for found in traces([calm | full(method="uniform", num_layers=3)], 2, 2, layout):
        distance(found[0], r0[0]).check(loss=1e-12, norm=1e-12, gradient=1e-12)


def test_me_04_plans_of_clipped_groups() -> None:
    def groups(layers: range, k: int) -> list[tuple[int, int]]:
        return [(g.first, g.last) for g in chunk_plan(layers, granularity="full", num_layers=k).groups]

    assert groups(range(7), 3) == [(0, 2), (3, 5), (6, 6)]
    assert groups(range(4), 3) == [(0, 2), (3, 3)] and groups(range(4, 7), 3) == [(4, 6)]
    assert groups(range(3), 9) == [(0, 2)] and groups(range(3), 1) == [] and groups(range(0), 2) == []


def test_me_05_method_left_out_or_given_in_vain() -> None:
    """Full without a method is uniform with groups of one layer; selective with a method is refused, naming both."""
    found = parse("--recompute-granularity full").recompute
    assert (found.method, found.num_layers, found.keep) == ("uniform", 1, "boundaries")
    assert parse("--recompute-granularity full --recompute-num-layers 3").recompute.method == "uniform"
    for method in ("uniform", "block"):
        with pytest.raises(UsageError) as caught:
            parse(f"--recompute-granularity selective --recompute-method {method} --recompute-num-layers 2")
        assert "--recompute-method" in str(caught.value) and "--recompute-granularity selective" in str(caught.value)


def test_uneven_llama_over_two_stages_with_every_kind_of_plan() -> None:
    """5 layers as 3 + 2, five micro-batches, grouped queries: pipeline, dropout and recompute together, 2 steps."""
    base = LLAMA | DROPOUT | {"global-batch-size": 10, "attention-backend": "unfused"}
    runs = [base | NONE, base | full(method="uniform", num_layers=2), base | {"recompute-granularity": "free"}]
    for found in traces(runs, 2, 2, Layout(pp=2)):
        for trace in found[1:]:
            assert_equal(trace, found[0])
