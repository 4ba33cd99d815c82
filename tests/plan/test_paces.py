"""Measured kernels and overheads: every second of a prediction is one that a machine states, and adds up exactly."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from megackpt.plan.accelerators import MACHINES, Machine
from megackpt.plan.evaluate import Evaluator
from megackpt.plan.evaluation import Evaluation
from megackpt.plan.kept import records
from megackpt.plan.numbers import Layout, ModelNumbers
from megackpt.plan.paces import Company, Kernel, Overheads, Pace, kernel_of
from megackpt.plan.policies import Policy, full_layer, keep_everything, plan_for, selective
from megackpt.plan.profile import profile
from megackpt.plan.seconds import StepClock

CPU = replace(MACHINES["cpu"], latency_s=0.0, node_bytes_per_s=1e30)
MODEL = ModelNumbers.gpt(5, 48, 6, 257, 20)
N = 3


def evaluated(machine: Machine, p: int = 1, policy: Policy | None = None, **rest: Any) -> Evaluation:
    layout = Layout.even(5, p, n=N, micro_batch=2, act_bytes=4, device="cpu", **rest)
    return Evaluator(MODEL, layout, machine)(plan_for(layout.pieces, policy or Policy()))


def in_company(ranks: int, slowdown: float = 1.0, *exchanges: float) -> Machine:
    """Of so many ranks and more; ``exchanges``: message, its latency, collective."""
    return replace(CPU, companies=(Company(ranks, slowdown, *(*exchanges, 0.0, 0.0, 0.0)[:3]),))


def with_overheads(**seconds: float) -> Machine:
    return replace(CPU, overheads=Overheads(**seconds))


def test_one_operation_costs_op_seconds() -> None:
    """A step's time grows by exactly its number of operations."""
    layout = Layout.even(5, micro_batch=2, act_bytes=4, device="cpu")
    slow, fast = (StepClock(replace(CPU, op_seconds=s), 4) for s in (5e-6, 4e-6))
    for step in profile(MODEL, layout).block.steps:
        assert slow.forward(step) - fast.forward(step) == pytest.approx(1e-6 * step.operations, rel=1e-9)
        assert slow.backward(step) - fast.backward(step) == pytest.approx(1e-6 * step.backward_operations, rel=1e-9)


def test_a_kernel_takes_the_place_of_the_roofline() -> None:
    layout = Layout.even(5, micro_batch=2, act_bytes=4, device="cpu")
    kernel = Kernel(Pace(2e-6, 3e-11, 5e-10), Pace(7e-6, 11e-11, 13e-10))
    clock = StepClock(replace(CPU, kernels={"product": kernel}), 4)
    roofline = StepClock(CPU, 4)
    block = profile(MODEL, layout).block
    for step in block.steps:
        if step.kernel != "product":
            assert clock.forward(step) == roofline.forward(step) and clock.backward(step) == roofline.backward(step)
            continue
        moved = step.bytes_moved
        assert clock.forward(step) == step.operations * 2e-6 + step.flops * 3e-11 + moved * 5e-10
        back = step.backward_operations * 7e-6 + step.backward_flops * 11e-11 + moved * 13e-10
        assert clock.backward(step) == back
    products = [step for step in block.steps if step.kernel == "product"]
    assert [step.name for step in products] == ["attn.qkv", "attn.proj", "mlp.up", "mlp.down"]
    put_off = sum(2 * 7e-6 + step.flops * 11e-11 + step.bytes_moved * 13e-10 for step in products)
    assert clock.layer_weights(block) == pytest.approx(put_off, rel=1e-12)


def test_other_formats_by_the_ratio_of_peaks() -> None:
    """Kernels are measured in fp32: a FLOP of another format takes as much longer as its products do."""
    machine = replace(CPU, kernels={"product": Kernel(Pace(0.0, 1e-11), Pace(0.0, 1e-11))})
    for size, kind in ((8, "fp64"), (2, "bf16")):
        layout = Layout.even(5, micro_batch=2, act_bytes=size, device="cpu")
        step = profile(MODEL, layout).block["mlp.up"]
        ratio = machine.peak_flops["fp32"] / machine.peak_flops[kind]
        assert StepClock(machine, size).forward(step) == pytest.approx(step.flops * 1e-11 * ratio, rel=1e-12)


def test_actions_and_reading() -> None:
    """On one stage every micro-batch has a forward and a backward, and is read once; of three stages the middle one
    reads nothing."""
    bare, e = evaluated(CPU), evaluated(with_overheads(action_s=0.25, batch_s=4.0))
    assert e.pipeline_seconds - bare.pipeline_seconds == pytest.approx(N * (2 * 0.25 + 4.0), rel=1e-9)
    stages = evaluated(with_overheads(action_s=0.25, batch_s=4.0), 3).stages
    plain = evaluated(CPU, 3).stages
    added = [a.forward - b.forward for a, b in zip(stages, plain, strict=True)]
    assert added == pytest.approx([4.25, 0.25, 4.25], rel=1e-9)
    assert [a.backward - b.backward for a, b in zip(stages, plain, strict=True)] == pytest.approx([0.25] * 3, rel=1e-9)


def test_a_replay_costs_its_record() -> None:
    """Full: two replays a layer, norm to core and norm to activation.  Neighbours go together, others do not."""
    full = Policy("full")
    bare, e = evaluated(CPU, policy=full), evaluated(with_overheads(span_s=0.5), policy=full)
    assert e.pipeline_seconds - bare.pipeline_seconds == pytest.approx(N * 5 * 2 * 0.5, rel=1e-9)
    assert evaluated(with_overheads(span_s=0.5)).pipeline_seconds == evaluated(CPU).pipeline_seconds
    block = profile(MODEL, Layout.even(5, micro_batch=2, act_bytes=4, device="cpu")).block
    sets = [keep_everything(), full_layer(), selective(), selective(("layernorm", "mlp")), selective(("layernorm",))]
    assert [records(block, save_set) for save_set in sets] == [0, 2, 1, 2, 2]
    assert records(block, selective(("attn.norm", "attn.core", "mlp.up"))) == 3


def test_messages_cost_both_ends() -> None:
    """Of two stages each sends and receives N messages; what the processor does for them delays whoever waits."""
    machine = replace(in_company(2, 1.0, 0.5), overheads=Overheads(message_byte_s=1e-3))
    size = profile(MODEL, Layout.even(5, 2, micro_batch=2, act_bytes=4, device="cpu")).boundary_bytes
    each = 0.5 + size * 1e-3
    line, bare = evaluated(machine, 2).timeline, evaluated(CPU, 2).timeline
    for stage, plain in zip(line.stages, bare.stages, strict=True):
        assert stage.busy_seconds - plain.busy_seconds == pytest.approx(2 * N * each, rel=1e-9)
    assert evaluated(machine).pipeline_seconds == evaluated(CPU).pipeline_seconds
    slow = evaluated(in_company(2, 1.0, 0.0, 100.0), 2)
    assert slow.pipeline_seconds >= 100.0 * 2 and slow.timeline.step_seconds == slow.pipeline_seconds


def test_the_end_of_a_step() -> None:
    machine = with_overheads(step_s=2.0, parameter_s=1e-3)
    (row,) = evaluated(machine).prediction.stages
    assert evaluated(machine).optimizer_seconds == pytest.approx(2.0 + 1e-3 * row.parameters, rel=1e-12)
    shared = evaluated(machine, d=3, sharded_optimizer=True)
    assert shared.optimizer_seconds == pytest.approx(2.0 + 1e-3 * row.parameters / 3, rel=1e-12)


def test_copies_of_the_model_meet_and_tied_weights_are_summed() -> None:
    machine = replace(CPU, latency_s=8.0, per_node=4, tp_bytes_per_s=100.0)
    assert evaluated(machine).reduction_seconds == 0.0
    tied = 257 * 48 * 4 / 100.0
    assert evaluated(machine, 2).reduction_seconds == pytest.approx(2 * 8.0 + 8.0 + tied, rel=1e-12)
    untied = Evaluator(replace(MODEL, tied=False), Layout.even(5, 2, n=N, micro_batch=2, act_bytes=4), machine)
    assert untied(plan_for(untied.layout.pieces, Policy())).reduction_seconds == pytest.approx(16.0, rel=1e-12)


def test_every_kind_of_step() -> None:
    layout = Layout.even(5, micro_batch=2, act_bytes=4, device="cpu")
    made = profile(MODEL, layout)
    assert {step.name: step.kernel for step in (*made.embedding.steps, *made.block.steps, *made.head.steps)} == {
        "embed.lookup": "lookup", "attn.norm": "LayerNorm", "attn.qkv": "product", "attn.core": "core, fused",
        "attn.proj": "product", "attn.residual": "residual", "mlp.norm": "LayerNorm", "mlp.up": "product",
        "mlp.act": "gelu", "mlp.down": "product", "mlp.residual": "residual", "head.norm": "LayerNorm",
        "head.logits": "product", "head.loss": "loss",
    }  # fmt: skip
    other = replace(MODEL, norm="RMSNorm", activation="swiglu", fused_attention=False, hidden_dropout=0.1)
    names = ("attn.core", "attn.norm", "attn.qknorm", "mlp.act", "mlp.residual", "attn.gather", "head.chunk")
    assert [kernel_of(name, other, layout) for name in names] == [
        "core, unfused", "RMSNorm", "RMSNorm, heads", "swiglu", "residual, dropout", "", "",
    ]  # fmt: skip
    drops = replace(MODEL, attention_dropout=0.1)
    assert kernel_of("attn.core", drops, layout) == "core, math"
    assert kernel_of("attn.core", drops, replace(layout, device="cuda")) == "core, fused"


def test_work_takes_longer_in_company() -> None:
    """Of all its ranks, whatever else they share; one alone has none, and what was not measured is as what was."""
    bare, slow = evaluated(CPU, 2), evaluated(in_company(2, 1.5), 2)
    assert slow.pipeline_seconds == pytest.approx(1.5 * bare.pipeline_seconds, rel=1e-12)
    assert slow.optimizer_seconds == pytest.approx(1.5 * bare.optimizer_seconds, rel=1e-12)
    assert evaluated(in_company(2, 1.5)).step_seconds == evaluated(CPU).step_seconds
    crowd = replace(in_company(2, 1.5), shared_rates=(1.0, 0.5))
    assert evaluated(crowd, 2).optimizer_seconds == pytest.approx(3 * bare.optimizer_seconds, rel=1e-12)
    two, four = Company(2, 1.25, 1.0, 2.0, 3.0), Company(4, 1.5, 4.0, 5.0, 6.0)
    host = replace(CPU, latency_s=7.0, companies=(two, four))
    assert [host.company(ranks) for ranks in (2, 3, 4, 16)] == [two, two, four, four]
    assert host.company(1) == Company(1, 1.0, 0.0, 7.0, 7.0) == replace(host, companies=()).company(1)
    assert replace(host, companies=(four,)).company(2) == four
    with pytest.raises(ValueError, match="companies must be in the order of their ranks"):
        replace(host, companies=(four, two))


def test_a_collective_takes_longer_in_company() -> None:
    """Two ranks of a tensor: two all-reduces in every layer, forward and backward, those of both ends, two meetings."""
    model, layout = replace(MODEL, padded_vocab=258), Layout.even(5, t=2, n=N, micro_batch=2, act_bytes=4, device="cpu")
    bare, slow = (
        Evaluator(model, layout, machine)(plan_for(layout.pieces, Policy()))
        for machine in (CPU, in_company(2, 1.0, 0.0, 0.0, 1.0))
    )
    assert slow.reduction_seconds - bare.reduction_seconds == 2.0
    made = profile(model, layout)
    ends = [step for layer in (made.embedding, made.head) for step in layer.steps]
    collectives = 5 * 4 + sum((s.collective is not None) + (s.backward_collective is not None) for s in ends)
    added = slow.pipeline_seconds - bare.pipeline_seconds
    assert added == pytest.approx(N * collectives, rel=1e-5)  # a step that only moves bytes moved them before


def test_machines_of_the_table_know_none_of_this() -> None:
    for machine in MACHINES.values():
        assert machine.kernels == {} and machine.overheads == Overheads() and machine.companies == ()


def test_json_and_back() -> None:
    kernels = {"product": Kernel(Pace(1e-6, 2e-11), Pace(3e-6, 4e-11, 5e-12))}
    machine = replace(CPU, kernels=kernels, overheads=Overheads(action_s=1e-4, message_byte_s=2e-10))
    machine = replace(machine, companies=(Company(2, 1.25, 1e-4, 2e-4, 1e-3), Company(4, 1.5, 2e-4, 1e-3, 1e-3)))
    assert Machine.from_json(json.loads(json.dumps(machine.to_json()))) == machine
    with pytest.raises(ValueError, match="slows down by a factor of 1 and more"):
        Company(2, 0.9, 0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="exchanges take 0 seconds and more"):
        Company(2, 1.0, 0.0, -1e-9, 0.0)
    with pytest.raises(ValueError, match="no negative seconds"):
        Pace(1e-6, -1e-12)
    with pytest.raises(ValueError, match="0 and more"):
        Overheads(span_s=-1.0)
