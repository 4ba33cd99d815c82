"""Bytes kept, from numbers alone: the paper's table, its named exceptions, and the rules of the engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megackpt.plan.chunk import ChunkModel
from megackpt.plan.decision import OFFLOAD_HOST, REPLAY, SHARD, ChunkPlan, Decision, Group, SaveSet
from megackpt.plan.demand import replayed_steps
from megackpt.plan.kept import keep_layer, kept_bytes, replay
from megackpt.plan.numbers import Layout, ModelNumbers
from megackpt.plan.policies import chunk_plan, free_tier, full_layer, keep_everything, selective
from megackpt.plan.profile import absent_steps, profile
from megackpt.plan.schedule import most_in_flight

PAPER = json.loads((Path(__file__).parent.parent / "data" / "paper_memory.json").read_text())
S, T = 2048, 8
# the paper keeps the core's output and all other masks; our policy rebuilds the one and draws the others again
PAPERS_SELECTIVE = SaveSet({**keep_everything().decisions, "attn.core": Decision("keep", REPLAY, REPLAY)})
FORMS = {
    "tp": (False, keep_everything()),
    "tp_sp": (True, keep_everything()),
    "tp_selective": (False, PAPERS_SELECTIVE),
    "tp_sp_selective": (True, PAPERS_SELECTIVE),
    "full": (False, full_layer("layer-input")),
    "full_sp": (True, full_layer("layer-input")),
}


def paper_model(name: str, **rest: object) -> ModelNumbers:
    row = PAPER["configurations"][name]
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "fused_attention": False}
    return ModelNumbers.gpt(row["layers"], row["hidden"], row["heads"], 51200, S, **{**dropout, **rest})


def paper_layout(name: str, *, sp: bool) -> Layout:
    row = PAPER["configurations"][name]
    return Layout.even(
        row["layers"], row["p"], row["v"], t=T, n=512, micro_batch=row["micro_batch"], sequence_parallel=sp
    )


@pytest.mark.parametrize("name", PAPER["configurations"])
@pytest.mark.parametrize("form", FORMS)
def test_first_stage_to_the_printed_digits(name, form):
    sp, save_set = FORMS[form]
    layout = paper_layout(name, sp=sp)
    layer = kept_bytes(profile(paper_model(name), layout).block, save_set)
    pairs = most_in_flight("1f1b", layout.p, 0, layout.n, layout.v)
    stage = layer * len(layout.pieces[0][0]) * pairs
    assert round(stage / 1e9, 1) == PAPER["first_stage"][name][form]


@pytest.mark.parametrize("sp", [False, True])
def test_table_2_exactly_with_what_it_leaves_out(sp):
    model, layout = paper_model("22B"), paper_layout("22B", sp=sp)
    block = profile(model, layout).block
    b, h, a = layout.micro_batch, model.hidden, model.heads
    sbh, core, statistics = S * b * h, 5 * a * S * S * b // T, 2 * 8 * S * b // (T if sp else 1)
    split = 34 * sbh // T if sp else 10 * sbh + 24 * sbh // T
    assert kept_bytes(block, keep_everything()) == split + core + statistics
    assert kept_bytes(block, PAPERS_SELECTIVE) == split + statistics
    masks, output = 2 * sbh // (T if sp else 1), 2 * sbh // T
    assert kept_bytes(block, selective()) == split + statistics - masks - output
    assert kept_bytes(block, full_layer()) == 4 * sbh // (T if sp else 1)
    assert kept_bytes(block, full_layer("layer-input")) == 2 * sbh // (T if sp else 1)


def test_fused_core_leaves_nothing_to_selective_recompute():
    """ME-01: with a fused kernel core_attn frees its output and the log-sum-exp, not the 5as²b of the paper."""
    fused = profile(paper_model("175B", fused_attention=True), paper_layout("175B", sp=True)).block
    unfused = profile(paper_model("175B"), paper_layout("175B", sp=True)).block
    sbh, heads = S * 12288 // T, 96 // T
    masks = 2 * sbh
    assert kept_bytes(fused, keep_everything()) - kept_bytes(fused, selective()) - masks == 2 * sbh + 4 * heads * S
    saved = kept_bytes(unfused, keep_everything()) - kept_bytes(unfused, selective()) - masks
    assert saved == 5 * heads * S * S + 2 * sbh

def test_free_tier_is_20_sbh():
    model = ModelNumbers.gpt(2, 1024, 8, 1024, 512)
    layout = Layout.even(2)
    sbh, statistics = 512 * 1024, 2 * 8 * 512 + 4 * 8 * 512
    block = profile(model, layout).block
    assert kept_bytes(block, keep_everything()) == 32 * sbh + statistics
    assert kept_bytes(block, free_tier()) == 20 * sbh + statistics


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_replayed_steps_agree_with_the_step_table(sp, fused):
    model = paper_model("22B", fused_attention=fused)
    layout = paper_layout("22B", sp=sp)
    block, absent = profile(model, layout).block, absent_steps(model, layout)
    for save_set in (keep_everything(), free_tier(), selective(), full_layer(), full_layer("layer-input")):
        assert replay(block, save_set).steps == replayed_steps(save_set, absent)


def test_boundaries_replay_no_reduction():
    block = profile(paper_model("22B"), paper_layout("22B", sp=True)).block
    kinds = [kind for kind, _ in replay(block, full_layer()).collectives]
    assert kinds == ["all_gather", "all_gather"]
    kinds = [kind for kind, _ in replay(block, full_layer("layer-input")).collectives]
    assert kinds == ["all_gather", "reduce_scatter", "all_gather"]


def test_a_kept_gather_costs_the_whole_sequence_and_frees_the_norm():
    layout = paper_layout("22B", sp=True)
    block = profile(paper_model("22B"), layout).block
    kept = SaveSet({"mlp.gather": Decision(), "attn.gather": Decision(output=REPLAY)})
    whole = 2 * S * layout.micro_batch * 6144
    assert kept_bytes(block, kept) - kept_bytes(block, keep_everything()) == whole - whole // T


def test_tiers_leave_nothing_or_a_share_on_the_device():
    block = profile(paper_model("22B"), paper_layout("22B", sp=False)).block
    sbh = S * 4 * 6144
    away, shared = (
        SaveSet({**full_layer().decisions, "attn.residual": Decision(tier, REPLAY, REPLAY)}, full_layer().default)
        for tier in (OFFLOAD_HOST, SHARD)
    )
    assert kept_bytes(block, away, t=T) == 2 * sbh
    assert kept_bytes(block, shared, t=T) == 2 * sbh + 2 * sbh // T
    assert kept_bytes(block, shared, input_choice=SHARD, t=T) == 4 * sbh // T


def test_an_input_that_nobody_gives_back_is_refused():
    block = profile(paper_model("22B"), paper_layout("22B", sp=False)).block
    with pytest.raises(ValueError, match="must stay"):
        kept_bytes(block, keep_everything(), input_choice=REPLAY)


def test_the_decision_for_masks_counts_for_masks_alone():
    """A kept mask is a byte per element whatever happens to the internals, and no reason to run the residual again."""
    block = profile(paper_model("22B"), paper_layout("22B", sp=True)).block
    kept = keep_layer(block, SaveSet({"mlp.residual": Decision("keep", REPLAY, "keep")}))
    assert "mlp.residual" not in kept.replayed and "mlp.reduce" not in kept.storages
    assert kept.storages["mlp.residual masks"] == 2048 * 4 * 6144 // 8


def test_groups_keep_their_input_alone():
    model, layout = paper_model("22B"), paper_layout("22B", sp=True)
    made = profile(model, layout)
    plan = chunk_plan(range(6), granularity="full", num_layers=4)
    chunk = ChunkModel(made, plan, range(6), False, False, T)
    assert chunk.kept() == 2 * made.boundary_bytes
    nested = ChunkPlan(plan.save_sets, (Group(0, 5, (Group(0, 2), Group(3, 5))),))
    assert ChunkModel(made, nested, range(6), False, False, T).kept() == made.boundary_bytes


@pytest.mark.parametrize("policy", [
    {"granularity": "none"}, {"granularity": "free"}, {"granularity": "selective"}, {"granularity": "full"},
    {"granularity": "full", "keep": "layer-input"}, {"granularity": "full", "num_layers": 3},
    {"granularity": "full", "method": "block", "num_layers": 2}, {"granularity": "full", "distribute": True},
    {"granularity": "full", "distribute": True, "num_layers": 2},
])  # fmt: skip
@pytest.mark.parametrize("sp", [False, True])
def test_a_chunk_gives_back_what_it_took(policy, sp):
    made = profile(paper_model("22B"), paper_layout("22B", sp=sp))
    for first, last in ((True, True), (True, False), (False, True), (False, False)):
        chunk = ChunkModel(made, chunk_plan(range(5), **policy), range(5), first, last, T)
        forward, backward = chunk.forward(), chunk.backward()
        output = 0 if last else made.boundary_bytes
        assert forward.change == chunk.kept() + output + (chunk.tail_bytes if last else 0)
        returned = 0 if first else made.boundary_bytes
        assert backward.change == returned - chunk.kept() - (chunk.tail_bytes if last else 0)
        assert forward.peak >= forward.change and backward.peak >= 0


TREES = {
    "beside each other": (Group(0, 4, (Group(0, 1), Group(2, 4))),),
    "nothing inside": (Group(0, 4, ()),),
    "from the first on": (Group(0, 4, (Group(0, 3, (Group(0, 2),)),)),),
    "from the last on": (Group(0, 4, (Group(2, 4, (Group(3, 4),)),)),),
    "for one slot": (Group(0, 4, (Group(0, 3, (Group(0, 2, (Group(0, 1, (Group(0, 0),)),)),)),)),),
}


@pytest.mark.parametrize("groups", TREES.values(), ids=TREES)
def test_a_tree_of_groups_gives_back_what_it_took(groups):
    made = profile(paper_model("22B"), paper_layout("22B", sp=True))
    chunk = ChunkModel(made, ChunkPlan({}, groups), range(5), False, False, T)
    assert chunk.kept() == made.boundary_bytes and chunk.forward().change == 2 * made.boundary_bytes
    assert chunk.backward().change == 0


def test_a_tree_as_deep_as_a_chain_is_long():
    """A thousand layers for one slot: no recursion, and no drift of the bytes alive from one replay to the next."""
    made, deep = profile(paper_model("22B"), paper_layout("22B", sp=True)), Group(0, 0)
    for last in range(1, 1000):
        deep = Group(0, last, (deep,))
    chunk = ChunkModel(made, ChunkPlan({}, (deep,)), range(1000), False, False, T)
    five = ChunkModel(made, ChunkPlan({}, TREES["for one slot"]), range(5), False, False, T)
    assert chunk.backward().change == 0 and chunk.backward().peak == five.backward().peak
