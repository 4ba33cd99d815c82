"""Which steps are replayed, from the table alone.  That the engine does just this: tests/recompute/test_work.py."""

from __future__ import annotations

import pytest

from megackpt.plan import ChunkPlan, Decision, Group, SaveSet, chunk_plan
from megackpt.plan.decision import REPLAY_ALL
from megackpt.plan.demand import present_steps, replayed_by_layer, replayed_steps
from megackpt.plan.flops import ModelShape, replay_share
from megackpt.plan.policies import free_tier, full_layer, keep_everything, selective
from megackpt.plan.steps import BLOCK, BLOCK_NAMES

ONE_RANK = {"attn.gather", "mlp.gather", "attn.reduce", "mlp.reduce", "attn.qknorm", "attn.rope"}
LLAMA_SP = {"attn.qknorm"}
NO_SP = {"attn.gather", "mlp.gather", "attn.qknorm", "attn.rope"}


def drop(*names: str) -> SaveSet:
    return SaveSet({name: REPLAY_ALL for name in names})


def test_absent_steps_are_bridged() -> None:
    """The readers of a step that the model lacks read what it read."""
    steps = {s.name: s.reads for s in present_steps(BLOCK, ONE_RANK)}
    assert steps["attn.qkv"] == ("attn.norm",) and steps["attn.core"] == ("attn.qkv",)
    assert steps["attn.residual"] == ("input", "attn.proj") and steps["mlp.residual"] == ("attn.residual", "mlp.down")
    assert not ONE_RANK & steps.keys() and len(steps) == len(BLOCK) - len(ONE_RANK)


@pytest.mark.parametrize(
    ("save_set", "absent", "steps"),
    [
        (keep_everything(), ONE_RANK, ""),
        (keep_everything(), LLAMA_SP, "attn.gather mlp.gather"),
        (free_tier(), ONE_RANK, "attn.norm mlp.norm mlp.act"),
        (free_tier(), LLAMA_SP, "attn.norm attn.gather mlp.norm mlp.gather mlp.act"),
        (selective(), LLAMA_SP, "attn.gather attn.core mlp.gather"),
        (selective(("layernorm",)), ONE_RANK, "attn.norm mlp.norm"),
        (selective(("mlp",)), LLAMA_SP, "attn.gather mlp.gather mlp.up mlp.act"),
        (full_layer(), ONE_RANK, "attn.norm attn.qkv attn.core mlp.norm mlp.up mlp.act"),
        (
            full_layer(),
            LLAMA_SP,
            "attn.norm attn.gather attn.qkv attn.rope attn.core mlp.norm mlp.gather mlp.up mlp.act",
        ),
        (
            full_layer("layer-input"),
            NO_SP,
            "attn.norm attn.qkv attn.core attn.proj attn.reduce attn.residual mlp.norm mlp.up mlp.act",
        ),
    ],
)
def test_policies(save_set: SaveSet, absent: set[str], steps: str) -> None:
    assert replayed_steps(save_set, absent) == tuple(steps.split())


@pytest.mark.parametrize(
    ("save_set", "steps"),
    [
        (drop("attn.proj", "mlp.down", "attn.reduce", "mlp.reduce"), ""),  # nobody saved what depends on them
        (drop("attn.qkv"), "attn.qkv"),  # the core saves it
        (SaveSet({"attn.qkv": Decision("keep", "replay")}), ""),  # a linear has no internals
        (SaveSet({"attn.norm": Decision("keep", "replay")}), "attn.norm"),  # statistics
        (SaveSet({"attn.core": Decision("keep", "replay")}), "attn.core"),
        (drop("attn.qkv", "attn.proj"), "attn.qkv"),
        (drop("attn.residual", "attn.proj"), "attn.proj attn.residual"),  # the norm saves its input: the residual
        (drop("attn.residual"), "attn.residual"),
        (drop("mlp.act", "mlp.down", "mlp.residual"), "mlp.act"),  # who reads the layer's output is another layer
    ],
)
def test_single_decisions(save_set: SaveSet, steps: str) -> None:
    assert replayed_steps(save_set, ONE_RANK) == tuple(steps.split())


def test_groups_re_run_everything_but_the_last_consumer() -> None:
    plan = chunk_plan(range(4, 9), granularity="full", num_layers=2)
    whole = tuple(name for name in BLOCK_NAMES if name not in ONE_RANK)
    short = whole[: whole.index("mlp.down")]
    assert replayed_by_layer(plan, range(4, 9), ONE_RANK) == [whole, short, whole, short, short]


def test_layers_outside_of_groups_follow_their_save_sets() -> None:
    plan = ChunkPlan({"layers.3": drop("attn.core")}, (Group(1, 2),))
    found = replayed_by_layer(plan, range(0, 5), ONE_RANK)
    assert found[0] == () and found[3] == ("attn.core",) and found[4] == ()
    assert "mlp.down" in found[1] and "mlp.down" not in found[2]


def test_each_group_of_a_tree_re_runs_its_layers() -> None:
    """Layers 0 to 3 as a group that replays live; in it a merged pair, then a layer of its own save-set."""
    tree = Group(0, 3, (Group(0, 1), Group(2, 3, ())))
    plan = ChunkPlan({f"layers.{i}": drop("attn.core") for i in range(5)}, (tree,))
    whole = tuple(name for name in BLOCK_NAMES if name not in ONE_RANK)
    short, core = whole[: whole.index("mlp.down")], ("attn.core",)
    found = replayed_by_layer(plan, range(5), ONE_RANK)
    assert found == [whole + whole, whole + short, whole + whole + core, short + short + core, core]


def test_a_kept_log_sum_exp_keeps_the_fused_core() -> None:
    only_output = SaveSet({"attn.core": Decision(output="replay")})
    assert replayed_steps(only_output, ONE_RANK) == ("attn.core",)
    assert replayed_steps(only_output, ONE_RANK, {"attn.core"}) == ()
    assert replayed_steps(drop("attn.core"), ONE_RANK, {"attn.core"}) == ("attn.core",)


@pytest.mark.parametrize(
    ("policy", "share"),
    [
        # GPT-3 175B, s = 2048, h = 12288: (14 + 4s/h)/(72 + 12s/h), (16 + 4s/h)/(72 + 12s/h); facts: 19.8 %, 22.5 %
        ({"granularity": "full"}, (14 + 4 / 6) / 74),
        ({"granularity": "full", "keep": "layer-input"}, (16 + 4 / 6) / 74),
        ({"granularity": "full", "num_layers": 2}, (24 * 2 - 8 + 4 * 2 / 6) / (2 * 74)),
        ({"granularity": "full", "num_layers": 4}, (24 * 4 - 8 + 4 * 4 / 6) / (4 * 74)),
        ({"granularity": "full", "method": "block", "num_layers": 24}, (14 + 4 / 6) / 74 / 4),
        ({"granularity": "selective"}, (4 / 6) / 74),
        ({"granularity": "free"}, 0.0),
    ],
)
def test_shares_of_gpt3(policy: dict[str, object], share: float) -> None:
    shape = ModelShape(
        layers=96, hidden=12288, heads=96, kv_heads=96, head_size=128, ffn=4 * 12288, gated=False, seq=2048,
        padded_vocab=51200, causal=False,
    )  # fmt: skip
    steps = replayed_by_layer(chunk_plan(range(96), **policy), range(96), {"attn.qknorm", "attn.rope"})
    assert replay_share(shape, steps) == pytest.approx(share, rel=1e-12)
    if policy == {"granularity": "full"}:
        assert round(100 * share, 1) == 19.8
