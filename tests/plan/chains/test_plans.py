"""Plans as trees: lines, text, JSON, groups; and what is refused."""
from __future__ import annotations

import json
from random import Random

import pytest

from megackpt.plan.chains import Chain, ChainPlan, Drop, Keep, Stage, binomial, extra_advances, run, two_level
from megackpt.plan.chains.types import Row
from megackpt.plan.decision import Group
from tests.plan.chains.oracle import all_moves

TREE = ChainPlan((Keep(), Drop(3, (Drop(1, (Keep(),)), Keep(), Keep())), Drop(2, (Keep(), Keep())), Keep()))


def test_a_plan_prints_as_a_tree() -> None:
    assert str(TREE).splitlines() == [
        "keep 0",
        "drop 1 to 3, in its replay:",
        "  drop 1, in its replay:",
        "    keep 1",
        "  keep 2 to 3",
        "drop 4 to 5, in its replay:",
        "  keep 4 to 5",
        "keep 6",
    ]
    assert str(two_level(8, 1, 1, 2.0)).startswith("drop 0 to 4 (input on disk), in its replay:\n")


def test_groups_are_global_and_a_replay_that_keeps_all_is_one_step() -> None:
    inner = (Group(11, 11),)
    assert TREE.to_groups(10) == (Group(11, 13, inner), Group(14, 15))
    live = (Group(11, 13, (Group(11, 11, ()),)), Group(14, 15, ()))
    assert TREE.to_groups(10, merged=False) == live
    assert ChainPlan.keep_all(5).to_groups() == ()


def test_every_small_plan_survives_lines_and_json() -> None:
    for moves in all_moves(5):
        plan = ChainPlan(moves)
        assert ChainPlan.from_rows(list(plan.rows())) == plan
        assert ChainPlan.from_json(json.loads(plan.dumps())) == plan
    tiers = two_level(14, 2, 3, 0.5)
    assert ChainPlan.from_json(json.loads(tiers.dumps())) == tiers


def test_a_tree_as_deep_as_the_chain_is_no_problem() -> None:
    length = 3000
    plan = binomial(length, 1)
    assert max(row.depth for row in plan.rows()) == length - 1
    assert list(ChainPlan.from_json(json.loads(plan.dumps())).rows()) == list(plan.rows())
    (group,) = plan.to_groups()
    depth = 1
    while group.inner:
        (group,), depth = group.inner, depth + 1
    assert depth == length - 1
    shallow = 200
    assert run(Chain.uniform(shallow), binomial(shallow, 1)).extra_forwards == extra_advances(shallow, 1) == 19900


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([Row(1, "keep", 0, 0)], "deeper than the segment"),
        ([Row(0, "keep", 0, 0), Row(0, "keep", 2, 2)], "does not go on"),
        ([Row(0, "drop", 0, 2), Row(1, "keep", 0, 1)], "segment of 3 stages covers 2"),
        ([Row(0, "drop", 0, 0), Row(0, "keep", 1, 1)], "segment of 1 stages covers 0"),
        ([Row(0, "drop", 0, 1), Row(1, "keep", 0, 1), Row(0, "keep", 1, 1)], "does not go on"),
        ([Row(0, "hold", 0, 0)], "neither 'keep' nor 'drop'"),
        ([Row(0, "drop", 0, 0, "tape"), Row(1, "keep", 0, 0)], "tier 'tape' is not one of ram, disk"),
    ],
)
def test_lines_that_are_no_plan(rows: list[Row], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ChainPlan.from_rows(rows)


def test_numbers_that_are_no_stage() -> None:
    with pytest.raises(ValueError, match=r"a tape \(2\) includes the output \(3\)"):
        Stage(3, 2)
    with pytest.raises(ValueError, match="spared_cost 2 is not part of forward_cost 1"):
        Stage(1, 1, forward_cost=1, spared_cost=2)
    with pytest.raises(ValueError, match="at least one stage"):
        Chain(())


def test_other_versions_and_disk_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="this code reads version 1"):
        ChainPlan.from_json({"version": 2, "rows": []})
    with pytest.raises(ValueError, match="groups hold their inputs in ram only"):
        two_level(8, 1, 1, 2.0).to_groups()


def test_random_lines_never_give_a_wrong_plan() -> None:
    """Lines of one plan with one number changed: refused, or another plan that covers what it says."""
    random = Random(3)
    for _ in range(200):
        rows = list(ChainPlan(random.choice(all_moves(5))).rows())
        place = random.randrange(len(rows))
        row = rows[place]
        rows[place] = row._replace(**{random.choice(["depth", "first", "last"]): random.randrange(6)})
        try:
            plan = ChainPlan.from_rows(rows)
        except ValueError:
            continue
        assert next(plan.rows()).first == 0 and len(plan) == rows[-1].last + 1
