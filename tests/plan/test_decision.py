"""Decisions, save-sets, groups and plans: frozen values that survive JSON."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from megackpt.plan import ChunkPlan, Decision, Group, Plan, Policy, SaveSet, group_at, plan_for
from megackpt.plan.decision import KEEP_ALL, REPLAY_ALL, groups_from_rows, groups_to_rows

TREE = Group(0, 5, (Group(0, 2, (Group(0, 0), Group(1, 2, ()))), Group(4, 5)), "offload_host")
PLAN = Plan(
    (
        (ChunkPlan({"embedding": SaveSet({}, REPLAY_ALL), "layers.0": SaveSet({"attn.core": REPLAY_ALL})}, (TREE,)),),
        (
            ChunkPlan({"layers.6": SaveSet({"attn.core": REPLAY_ALL}), "head": SaveSet()}),
            ChunkPlan({"layers.7": SaveSet({"mlp.act": Decision("offload_host", "offload_disk")}, KEEP_ALL)}),
        ),
    ),
    "by hand",
)


def test_importing_the_room_needs_no_torch() -> None:
    code = (
        "import sys, megackpt.plan, megackpt.plan.policies, megackpt.plan.demand, megackpt.plan.flops\n"
        "assert not {'torch'} & set(sys.modules), 'torch'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_slots_of_a_chunk() -> None:
    rich, lean = ChunkPlan({"layers.0": SaveSet()}), ChunkPlan({"layers.0": SaveSet({}, REPLAY_ALL)})
    other = ChunkPlan({"layers.1": SaveSet()})
    plan = Plan.of_slots([[(rich, rich, lean)], [(other,)]], "slots")
    assert [plan.chunk(0, 0, slot) for slot in range(4)] == [rich, rich, lean, lean]
    assert plan.chunk(1) == plan.chunk(1, 0, 3) == other and plan.stages == ((rich,), (other,))
    again = Plan.from_json(json.loads(plan.dumps()))
    assert again == plan and again.slots(0) == (rich, rich, lean)
    alike = Plan.of_slots([[(rich,)], [(other,)]], "slots")
    assert alike == Plan(((rich,), (other,)), "slots") and alike.digest() != plan.digest()
    with pytest.raises(ValueError, match="other stages and chunks"):
        Plan(((rich,), (other,)), "", (((lean,),),))


def test_values_are_frozen_and_equal_by_content() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        REPLAY_ALL.output = "keep"  # type: ignore[misc]
    a = SaveSet({"attn.norm": REPLAY_ALL, "mlp.up": KEEP_ALL})
    b = SaveSet({"mlp.up": KEEP_ALL, "attn.norm": REPLAY_ALL})
    assert a == b and hash(a) == hash(b) and a != SaveSet({"attn.norm": REPLAY_ALL})


def test_a_default_stands_for_every_step_not_named() -> None:
    save_set = SaveSet({"attn.norm": KEEP_ALL}, REPLAY_ALL)
    assert save_set["attn.norm"] == KEEP_ALL and save_set["mlp.down"] == REPLAY_ALL
    assert ChunkPlan({"layers.1": save_set}).save_set("layers.2")["anything"] == KEEP_ALL


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"output": "drop"}, "output='drop' is not one of keep, replay, offload_host, offload_disk, shard"),
        ({"internals": "shard"}, "internals='shard' is not one of keep, replay, offload_host, offload_disk"),
        ({"masks": "offload_host"}, "masks='offload_host' is not one of keep, replay"),
    ],
)
def test_unknown_choices(values: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Decision(**values)


def test_what_keeps_everything() -> None:
    """Masks that are drawn again drop no tensor, so a tape with nothing else to do stays out of the way."""
    assert Decision(masks="replay").keeps_all and SaveSet({}, Decision(masks="replay")).keeps_all
    assert not Decision("replay").keeps_all and not Decision("keep", "replay").keeps_all
    assert not Decision("shard").keeps_all
    assert ChunkPlan().keeps_all and not ChunkPlan(groups=(Group(0, 0),)).keeps_all
    assert not ChunkPlan({"head": SaveSet({"head.norm": Decision("replay")})}).keeps_all


def test_groups() -> None:
    assert group_at((Group(0, 2), Group(3, 3)), 3) == Group(3, 3)
    assert group_at((Group(0, 2), Group(3, 3)), 1) is None
    with pytest.raises(ValueError, match="from a first to a last layer, got 3 to 2"):
        Group(3, 2)
    with pytest.raises(ValueError, match="group 2 to 4 is not inside 0 to 3"):
        Group(0, 3, (Group(0, 1), Group(2, 4)))


def test_choices_name_the_tiers_a_run_needs() -> None:
    assert PLAN.chunk(0).choices() == {"keep", "replay", "offload_host"}
    assert PLAN.chunk(1, 1).choices() == {"keep", "offload_host", "offload_disk"}
    assert ChunkPlan(groups=(Group(0, 1, output="shard"),)).choices() == {"shard"}
    assert ChunkPlan(groups=(Group(0, 2, (Group(0, 1, output="offload_disk"),)),)).choices() == {"keep", "offload_disk"}


def test_a_tree_may_be_as_deep_as_a_chain_is_long() -> None:
    tree = Group(2999, 3000, ())
    for first in range(2998, -1, -1):
        tree = Group(first, 3000, (tree,))
    plan = Plan(((ChunkPlan(groups=(tree,)),),))
    again = Plan.from_json(json.loads(plan.dumps()))
    assert again.digest() == plan.digest()
    rows = groups_to_rows(again.chunk(0).groups)
    assert len(rows) == 3000 and rows[0] == [0, 3000, 0, False, "keep"]
    assert rows[-1] == [2999, 3000, 2999, False, "keep"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[0, 3, 0, True, "keep"], [1, 2, 1, True, "keep"]], "group 0 to 3 is merged and yet has groups inside"),
        ([[0, 3, 0, False, "keep"], [1, 2, 2, True, "keep"]], "a group stands inside of none"),
    ],
)
def test_rows_that_are_no_tree(rows: list[list[object]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        groups_from_rows(rows)


@pytest.mark.parametrize(
    "plan",
    [PLAN, plan_for([[range(3)], [range(3, 7)]], Policy("full", num_layers=2)), Plan(())],
    ids=["tree", "policy", "empty"],
)
def test_json_round_trip(plan: Plan) -> None:
    again = Plan.from_json(json.loads(plan.dumps()))
    assert again == plan and again.dumps() == plan.dumps() and again.digest() == plan.digest()


def test_equal_save_sets_are_written_once() -> None:
    data = plan_for([[range(50)]], Policy("selective")).to_json()
    assert len(data["sets"]) == 2  # type: ignore[arg-type]  # ends and layers
    (stage,) = data["stages"]  # type: ignore[misc]
    assert len(stage[0][0]["save_sets"]) == 52


def test_digest_sees_every_difference() -> None:
    """Ranks of one group with different plans would wait for each other for ever."""
    chunk = PLAN.chunk(0)
    variants = [
        PLAN,
        Plan(PLAN.stages[:1], PLAN.name),
        Plan(PLAN.stages, "by another hand"),
        Plan(((ChunkPlan(chunk.save_sets, ()),), *PLAN.stages[1:]), PLAN.name),
        Plan(((ChunkPlan(chunk.save_sets, (dataclasses.replace(TREE, output="keep"),)),), *PLAN.stages[1:]), PLAN.name),
        Plan(((ChunkPlan(chunk.save_sets, (dataclasses.replace(TREE, inner=None),)),), *PLAN.stages[1:]), PLAN.name),
        Plan(((ChunkPlan(chunk.save_sets, (dataclasses.replace(TREE, inner=()),)),), *PLAN.stages[1:]), PLAN.name),
        Plan(
            ((ChunkPlan(dict(chunk.save_sets) | {"layers.0": SaveSet()}, (TREE,)),), *PLAN.stages[1:]), PLAN.name
        ),
    ]
    assert len({plan.digest() for plan in variants}) == len(variants)


def test_another_version_is_refused() -> None:
    data = PLAN.to_json() | {"version": 1}
    with pytest.raises(ValueError, match="plan version 1; this code reads version 2"):
        Plan.from_json(data)
