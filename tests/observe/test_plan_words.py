"""A plan in a few lines."""

from __future__ import annotations

from dataclasses import replace

from megackpt.observe.plan_words import MOST_LINES, plan_lines
from megackpt.plan import ChunkPlan, Decision, Group, Plan, Policy, SaveSet, plan_for

ABSENT = ("attn.gather", "mlp.gather", "attn.qknorm", "attn.rope", "attn.reduce", "mlp.reduce")
FULL = "replay attn.norm attn.qkv attn.core mlp.norm mlp.up mlp.act"


def chunk(layers: range, granularity: str) -> ChunkPlan:
    return plan_for([[layers]], Policy(granularity=granularity)).chunk(0)


def test_stages_that_are_alike_stand_together() -> None:
    plan = plan_for([[range(0, 2)], [range(2, 4)], [range(4, 7)]], Policy(granularity="full"))
    assert plan_lines(plan, ABSENT) == [f"stage 0 to stage 1: 2 layers {FULL}", f"stage 2: 3 layers {FULL}"]
    assert plan_lines(plan_for([[range(1)]], Policy()), ABSENT) == ["stage 0: 1 layer replays nothing"]


def test_layers_chunks_and_slots_that_differ() -> None:
    mixed = ChunkPlan({**chunk(range(0, 1), "full").save_sets, **chunk(range(1, 3), "free").save_sets})
    rich = chunk(range(3, 5), "none")
    plan = Plan.of_slots([[(mixed,), (rich, rich, chunk(range(3, 5), "free"))]])
    first, second = plan_lines(plan, ABSENT)
    free = "attn.norm mlp.norm mlp.act"
    assert first == f"stage 0 chunk 0: 1 layer {FULL.replace('replay', 'replays')}, 2 layers replay {free}"
    assert second == f"stage 0 chunk 1: slots 0 to 1: 2 layers replay nothing | slots 2 on: 2 layers replay {free}"


def test_what_goes_ahead_of_the_gradient() -> None:
    def said(**ahead: int) -> str:
        (line,) = plan_lines(Plan(((replace(chunk(range(3, 6), "full"), **ahead),),)), ABSENT)
        return line.removeprefix(f"stage 0: 3 layers {FULL}")

    assert said() == ""
    assert said(ahead=1) == "; the last ahead of the gradient"
    assert said(ahead=2) == "; the last 2 ahead of the gradient"
    assert said(ahead=3, ahead_within=1) == "; all ahead of the gradient while at most 1 forward is in flight"
    assert said(ahead=7, ahead_within=4) == "; all ahead of the gradient while at most 4 forwards are in flight"


def test_groups_and_host_memory() -> None:
    grouped = replace(chunk(range(0, 2), "none"), groups=(Group(0, 1),))
    away = SaveSet({}, Decision("offload_host", "offload_host"))
    plan = Plan(((grouped,), (ChunkPlan({"layers.2": away}),)))
    assert plan_lines(plan, ABSENT) == [
        "stage 0: 2 layers replay whole, as a group",
        "stage 1: 1 layer replays nothing, the rest in host memory",
    ]


def test_a_long_list_is_cut_in_the_middle() -> None:
    names = ["none", "free"] * 10
    stages = tuple((chunk(range(k, k + 1), name),) for k, name in enumerate(names))
    lines = plan_lines(Plan(stages), ABSENT)
    assert len(lines) == MOST_LINES + 1 and lines[MOST_LINES // 2] == "(8 lines like these)"
    assert lines[0].startswith("stage 0: ") and lines[-1].startswith("stage 19: ")
