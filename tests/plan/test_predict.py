"""Predictions against real steps of the trainer: kept bytes exactly, the live peak closely, on every kind of layout."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from megackpt.plan.accelerators import MACHINES, Machine, machine_named
from megackpt.plan.buffers import ALIGNMENT
from megackpt.plan.decision import ChunkPlan, Plan, SaveSet
from megackpt.plan.numbers import Layout, ModelNumbers
from megackpt.plan.parameters import stage_parameters
from megackpt.plan.policies import Policy, plan_for
from megackpt.plan.predict import STATE, Prediction, StageWalk, predict
from megackpt.plan.profile import profile
from megackpt.plan.schedule import schedule_lists
from tests.layouts import FAMILIES
from tests.layouts import Layout as RunLayout
from tests.plan.live_run import WIDE, run_cases
from tests.plan.test_kept import TREES
from tests.pool import run_distributed

Flags = Mapping[str, object]
POLICIES: dict[str, Flags] = {
    "none": {},
    "free": {"recompute-granularity": "free"},
    "selective": {"recompute-granularity": "selective"},
    "modules": {"recompute-granularity": "selective", "recompute-modules": ["core_attn", "layernorm", "mlp"]},
    "full": {"recompute-granularity": "full"},
    "layer-input": {"recompute-granularity": "full", "recompute-keep": "layer-input"},
    "groups": {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 2},
    "block": {"recompute-granularity": "full", "recompute-method": "block", "recompute-num-layers": 1},
}
DROPOUT: Flags = {"hidden-dropout": 0.1, "attention-dropout": 0.1, "attention-backend": "unfused"}
NO_DROPOUT: Flags = {"hidden-dropout": 0.0, "attention-dropout": 0.0}
LAYOUTS = [RunLayout(), RunLayout(tp=2), RunLayout(tp=2, sp=True), RunLayout(pp=2)]


def check(cases: dict[str, Flags], layout: RunLayout, tolerance: float) -> None:
    results = run_distributed(run_cases, layout.world_size, list(cases.values()), layout, timeout=100)
    for rank, of_rank in enumerate(results):
        for name, (seen, predicted) in zip(cases, of_rank, strict=True):
            where = f"{name} on rank {rank} of {layout}, peak at {predicted.peak_action} {predicted.peak_step}"
            assert predicted.parameters == seen.numel, where
            assert predicted.kept_peak_bytes == seen.kept, where
            error = predicted.activation_bytes / seen.peak - 1
            print(f"{where}: {error:+.3%}")
            assert abs(error) <= tolerance, f"{where}: {error:+.2%} of {seen.peak}"


T0 = [("gpt", layout) for layout in LAYOUTS] + [("llama", LAYOUTS[2])]
MORE = [("llama", layout) for layout in (*LAYOUTS[:2], LAYOUTS[3], RunLayout(tp=2, pp=2, sp=True))]


@pytest.mark.parametrize(
    ("family", "layout"), [*T0, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)], ids=str
)
def test_every_policy_at_t0(family, layout):
    extra = {"global-batch-size": 4} | (DROPOUT if family == "gpt" else {})
    check({name: FAMILIES[family] | extra | flags for name, flags in POLICIES.items()}, layout, 0.03)


@pytest.mark.parametrize(
    "layout", [RunLayout(tp=2, sp=True), RunLayout(pp=2), pytest.param(RunLayout(), marks=pytest.mark.full)], ids=str
)
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_256(family, layout):
    names = ("none", "free", "selective", "full")
    base = FAMILIES[family] | WIDE | {"num-layers": 2, "max-position-embeddings": 64, "global-batch-size": 4}
    check({name: base | POLICIES[name] for name in names}, layout, 0.01)


@pytest.mark.parametrize(
    ("dtype", "layout"), [("bf16", RunLayout()), ("bf16", RunLayout(tp=2)), ("fp64", RunLayout())], ids=str
)
def test_other_formats(dtype, layout):
    """On two ranks only the last one's vocabulary is padded, and the other converts more logits than it has."""
    base = FAMILIES["gpt"] | {"num-layers": 2, "params-dtype": dtype, "global-batch-size": 2}
    cases = {name: base | POLICIES[name] for name in ("none", "full")}
    check(cases | {"loss in parts": base | {"loss-chunk-size": 16, "vocab-size": 4000}}, layout, 0.03)


def test_distributed_saved_activations():
    """Ranks keep parts of boundaries, and each its part until what came back whole is done with."""
    base = FAMILIES["gpt"] | WIDE | {"max-position-embeddings": 64, "global-batch-size": 2, "num-layers": 4}
    shards = base | {"distribute-saved-activations": True} | NO_DROPOUT
    names = ("full", "layer-input", "groups", "block")
    check({name: shards | POLICIES[name] for name in names}, RunLayout(tp=2), 0.001)


def test_trees_of_groups(tmp_path):
    base = FAMILIES["gpt"] | WIDE | DROPOUT | {"max-position-embeddings": 64, "global-batch-size": 2}
    names = ("embedding", "head", *(f"layers.{i}" for i in range(5)))
    cases = {}
    for name, groups in TREES.items():
        path = tmp_path / f"{name}.json"
        path.write_text(Plan(((ChunkPlan(dict.fromkeys(names, SaveSet()), groups),),), name).dumps())
        cases[name] = base | {"num-layers": 5, "recompute-plan": str(path)}
    check(cases, RunLayout(), 0.001)


@pytest.mark.parametrize("layout", [RunLayout(), RunLayout(tp=2, sp=True)], ids=str)
def test_loss_in_chunks(layout):
    """A vocabulary of 4,000 is padded on the last rank, which so needs one softmax more than the others."""
    base = FAMILIES["llama"] | {"num-layers": 2, "loss-chunk-size": 8, "vocab-size": 4000, "global-batch-size": 2}
    check({name: base | POLICIES[name] for name in ("none", "full")}, layout, 0.01)
    wide = base | WIDE | POLICIES["full"] | {"vocab-size": 16000}
    cases = {f"parts of {size}": wide | {"loss-chunk-size": size} for size in (8, 24)}
    check(cases, layout, 0.01)


# -- without a run ---------------------------------------------------------------------------------------------------

MODEL = ModelNumbers.gpt(8, 1024, 16, 32000, 1024, fused_attention=True)


def of(layout: Layout, machine: Machine | None = None, **policy: object) -> Prediction:
    plan = plan_for(layout.pieces, Policy(**policy))  # type: ignore[arg-type]
    return predict(MODEL, layout, plan, machine)


def test_stages_are_predicted_one_by_one():
    """ME-09: the first stage holds most micro-batches, the last the logits; one number for all would be wrong."""
    stages = of(Layout.even(8, 4, n=8)).stages
    kept = [stage.kept_peak_bytes for stage in stages]
    assert kept[0] > kept[1] > kept[2]
    assert stages[3].peak_step.startswith("forward head.loss") or "head" in stages[3].peak_step
    assert stages[3].terms["ends"] > stages[3].terms["activations"]
    assert [stage.in_flight for stage in stages[:3]] == [4, 3, 2]
    assert stages[0].parameters != stages[1].parameters


def test_terms_are_named_and_sum_up():
    machine = MACHINES["a100-80gb"]
    layout = Layout.even(8, 2, t=2, d=2, n=4, sequence_parallel=True)
    for stage in of(layout, machine, granularity="full").stages:
        assert set(stage.terms) == {
            *STATE, "activations", "ends", "messages", "weight_gradients", "transient", "communicators", "context",
            "margin",
        }  # fmt: skip
        assert min(stage.terms.values()) >= 0
        assert stage.total_bytes == sum(stage.terms.values())
        live = sum(stage.terms[name] for name in ("activations", "ends", "messages", "transient"))
        assert live == stage.activation_bytes
        count = stage_parameters(MODEL, layout, stage.stage).total
        assert 18 * count <= stage.state_bytes < 18 * count + 4 * 2 * 3 * ALIGNMENT  # three buckets are filled up


def test_json_has_every_term():
    prediction = of(Layout.even(8, 2, n=4), MACHINES["h100-80gb"])
    data = json.loads(json.dumps(prediction.to_json()))
    assert data["fits"] is True and data["version"] == 1
    assert [s["total_bytes"] for s in data["stages"]] == [s.total_bytes for s in prediction.stages]


def test_fits_or_not():
    layout = Layout.even(8, n=1, micro_batch=128)
    assert of(layout).fits is None
    assert of(layout, MACHINES["a100-40gb"]).fits is False
    assert of(layout, MACHINES["b200-180gb"], granularity="full").fits is True


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1"])
def test_gpipe_holds_all_and_1f1b_what_it_must(name):
    layout = Layout.even(8, 2, n=6, schedule=name)
    stages = of(layout).stages
    most = {"1f1b": [2, 1], "gpipe": [6, 6], "zb-h1": [2, 1]}[name]
    made = profile(MODEL, layout)
    for stage, count in zip(stages, most, strict=True):
        assert stage.kept_peak_bytes == count * stage.kept_by_chunk[0]
        assert bool(stage.terms["weight_gradients"]) == (name == "zb-h1" and stage.stage == 1)  # puts off by its index
    assert made.boundary_bytes == 2 * 1024 * 1024


def test_interleaved_counts_chunks():
    layout = Layout.even(8, 2, 2, n=4)
    first = of(layout).stages[0]
    assert first.in_flight == 5  # 2 (p - 1) + (v - 1) p + 1
    assert len(first.kept_by_chunk) == 2


def test_leaner_policies_are_leaner():
    layout = Layout.even(8, 2, n=4)
    policies = [{"granularity": "none"}, {"granularity": "free"}, {"granularity": "full"}]
    peaks = [of(layout, **policy).stages[0].activation_bytes for policy in policies]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 3


def test_a_list_without_its_backwards_is_refused():
    layout = Layout.even(8, 2, n=2)
    lists = schedule_lists("1f1b", 2, 2)
    walk = StageWalk(profile(MODEL, layout), layout, Plan(plan_for(layout.pieces, Policy()).stages), 0)
    with pytest.raises(ValueError, match="no backward has freed"):
        walk.run(lists[0][:-1])


def test_machines_have_sources_and_go_through_json(tmp_path):
    for machine in MACHINES.values():
        assert machine.sources
        path = tmp_path / f"{machine.name}.json"
        path.write_text(json.dumps(machine.to_json()))
        assert machine_named(str(path)) == machine
        assert machine_named(machine.name) is machine
    assert MACHINES["a100-80gb"].peak_flops["bf16"] == 312e12  # dense: MX-03
    assert MACHINES["h100-80gb"].peak_flops["bf16"] == 989e12
    for name, machine in MACHINES.items():
        bf16, fp32 = machine.peak_flops["bf16"], machine.peak_flops["fp32"]
        sheet = machine.sources.get("peak_flops", "")
        figures = (f"BF16 {bf16 / 1e12:,.0f}", f"FP32 {fp32 / 1e12:g}")
        assert name == "cpu" or "as H100" in sheet or all(figure in sheet for figure in figures)
    with pytest.raises(ValueError, match="neither one of"):
        machine_named("a1000")
