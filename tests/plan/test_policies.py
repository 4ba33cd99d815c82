"""Named policies as plans, exactly; what the table in design and `--help` says about each."""

from __future__ import annotations

import pytest

from megackpt.plan import ChunkPlan, Decision, Group, Policy, SaveSet, chunk_plan, plan_for
from megackpt.plan.decision import REPLAY_ALL
from megackpt.plan.policies import free_tier, full_layer, keep_everything, selective, steps_of
from megackpt.plan.steps import BLOCK, BLOCK_NAMES, EMBED, GATHERS, HEAD, MODULES

GATHERED = Decision("replay", "keep", "keep")
REDRAWN = Decision("keep", "keep", "replay")
NORM = Decision("replay", "keep", "replay")
BOUNDARY = Decision("keep", "keep", "replay")
LAYERS = range(3, 8)


def decisions(save_set: SaveSet) -> dict[str, Decision]:
    """Of each step of the block."""
    return {name: save_set[name] for name in BLOCK_NAMES}


def changed(base: Decision, **others: Decision) -> dict[str, Decision]:
    return dict.fromkeys(BLOCK_NAMES, base) | {name.replace("_", "."): d for name, d in others.items()}


def test_the_step_table_holds_together() -> None:
    """Every step reads what came before it; gathers and reductions stand where the design draws them."""
    for table in (EMBED, BLOCK, HEAD):
        known = {"input"}
        for step in table:
            assert set(step.reads) <= known, step.name
            known.add(step.name)
    assert GATHERS == ("attn.gather", "mlp.gather", "head.gather")
    assert [s.name for s in BLOCK if s.boundary] == ["attn.residual", "mlp.residual"]
    assert [s.name for s in BLOCK if s.product] == ["attn.qkv", "attn.core", "attn.proj", "mlp.up", "mlp.down"]
    assert [s.name for s in BLOCK if s.collective == "reduce"] == ["attn.reduce", "mlp.reduce"]


def test_none_keeps_everything_but_what_was_gathered() -> None:
    assert decisions(keep_everything()) == changed(Decision(), attn_gather=GATHERED, mlp_gather=GATHERED)


def test_free_tier() -> None:
    """None less both norm outputs, the activation output and the masks; statistics stay."""
    assert decisions(free_tier()) == changed(
        REDRAWN, attn_norm=NORM, mlp_norm=NORM, mlp_act=NORM, attn_gather=GATHERED, mlp_gather=GATHERED
    )


@pytest.mark.parametrize(
    ("modules", "steps"),
    [
        (("core_attn",), ("attn.core",)),
        (("layernorm",), ("attn.norm", "mlp.norm")),
        (("mlp",), ("mlp.gather", "mlp.up", "mlp.act")),
        (("mlp", "mlp.act", "core_attn"), ("mlp.gather", "mlp.up", "mlp.act", "attn.core")),
        (("attn.qkv", "attn.norm"), ("attn.qkv", "attn.norm")),
    ],
)
def test_selective(modules: tuple[str, ...], steps: tuple[str, ...]) -> None:
    assert steps_of(modules) == steps
    gathered = dict.fromkeys(("attn.gather", "mlp.gather"), NORM)
    expected = dict.fromkeys(BLOCK_NAMES, REDRAWN) | gathered | dict.fromkeys(steps, REPLAY_ALL)
    assert decisions(selective(modules)) == expected


def test_selective_refuses_what_is_no_step() -> None:
    with pytest.raises(ValueError, match="'attn.cor' is neither one of .*core_attn.* nor a step"):
        steps_of(("attn.cor",))
    assert all(name in BLOCK_NAMES for steps in MODULES.values() for name in steps)


def test_full_layer() -> None:
    """What only feeds a kept boundary is not dropped: nobody saves it, so it is gone anyway."""
    mlp = {"mlp_down": REDRAWN, "mlp_reduce": REDRAWN}
    both = {"attn_proj": REDRAWN, "attn_reduce": REDRAWN, **mlp}
    assert decisions(full_layer()) == changed(REPLAY_ALL, attn_residual=BOUNDARY, mlp_residual=BOUNDARY, **both)
    assert decisions(full_layer("layer-input")) == changed(REPLAY_ALL, mlp_residual=BOUNDARY, **mlp)
    shard = Decision("shard", "keep", "replay")
    assert decisions(full_layer(boundary="shard")) == changed(
        REPLAY_ALL, attn_residual=shard, mlp_residual=shard, **both
    )
    with pytest.raises(ValueError, match="keep='both' is neither 'boundaries' nor 'layer-input'"):
        full_layer("both")


@pytest.mark.parametrize(
    ("details", "groups", "whole"),
    [
        ({"num_layers": 1}, [], 5),
        ({"num_layers": 2}, [(3, 4), (5, 6), (7, 7)], 5),
        ({"num_layers": 5}, [(3, 7)], 5),
        ({"num_layers": 9}, [(3, 7)], 5),
        ({"method": "block", "num_layers": 1}, [], 1),
        ({"method": "block", "num_layers": 3}, [], 3),
        ({"method": "block", "num_layers": 9}, [], 5),
    ],
)
def test_full(details: dict[str, object], groups: list[tuple[int, int]], whole: int) -> None:
    """Uniform: groups of so many layers, the last one clipped (ME-04).  Block: the first layers of the chunk, counted
    within it and not over the model; the others keep everything, masks as well."""
    chunk = chunk_plan(LAYERS, granularity="full", **details)
    assert chunk.groups == tuple(Group(a, b) for a, b in groups)
    sets = [chunk.save_set(f"layers.{i}") for i in LAYERS]
    assert sets == [full_layer()] * whole + [keep_everything()] * (5 - whole)


def test_ends_follow_the_masks_of_the_layers() -> None:
    """Embedding and head keep what they save; their gathers are replayed, their masks as the layers' are."""
    for granularity in ("none", "free", "selective", "full"):
        chunk = chunk_plan(LAYERS, granularity=granularity)
        for address, table in (("embedding", EMBED), ("head", HEAD)):
            for step in table:
                decision = chunk.save_set(address)[step.name]
                assert decision.output == ("replay" if step.collective == "all_gather" else "keep")
                assert decision.internals == "keep"
        assert chunk.save_set("embedding")["embed.dropout"].masks == ("keep" if granularity == "none" else "replay")


def test_distributed_boundaries_and_chunked_loss() -> None:
    chunk = chunk_plan(LAYERS, granularity="full", num_layers=2, distribute=True)
    assert {g.output for g in chunk.groups} == {"shard"}
    chunk = chunk_plan(LAYERS, granularity="full", distribute=True, chunked_loss=True)
    assert chunk.save_set("layers.3")["attn.residual"].output == "shard"
    assert chunk.save_set("head")["head.chunk"] == Decision(internals="replay")


def test_plan_for_stages() -> None:
    plan = plan_for([[range(0, 3)], [range(3, 5), range(5, 7)]], Policy("full", num_layers=2))
    assert [[c.groups for c in stage] for stage in plan.stages] == [
        [(Group(0, 1), Group(2, 2))],
        [(Group(3, 4),), (Group(5, 6),)],
    ]
    assert isinstance(plan.chunk(1, 1), ChunkPlan) and plan.chunk(1, 1).groups == (Group(5, 6),)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (Policy(), "none"),
        (Policy("free"), "free"),
        (Policy("selective", modules=("core_attn", "mlp")), "selective (core_attn, mlp)"),
        (Policy("full"), "full, uniform 1, boundaries"),
        (Policy("full", num_layers=3), "full, uniform 3, group input"),
        (Policy("full", method="block", num_layers=3, keep="layer-input"), "full, block 3, layer-input"),
    ],
)
def test_names_of_policies(policy: Policy, words: str) -> None:
    assert str(policy) == words and plan_for([[range(2)]], policy).name == words
