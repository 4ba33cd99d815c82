"""Slots: the lowest free one at a micro-batch's forward, and plans that differ between them."""

from __future__ import annotations

import pytest

from megackpt.plan import ChunkPlan, Plan, Policy, plan_for
from megackpt.plan.accelerators import MACHINES
from megackpt.plan.evaluate import Evaluator
from megackpt.plan.numbers import Layout, ModelNumbers
from megackpt.plan.predict import StageWalk, predict
from megackpt.plan.profile import profile
from megackpt.plan.schedule import in_flight, parse_actions, schedule_lists
from megackpt.plan.slots import slots_of

MODEL = ModelNumbers.gpt(5, 48, 6, 264, 32)


@pytest.mark.parametrize(
    ("actions", "slots"),
    [
        ("F0.0 F1.0 F2.0 B0.0 F3.0 B1.0 F4.0 B2.0 B3.0 B4.0", [0, 1, 2, 0, 1]),
        ("F0.0 B0.0 F1.0 B1.0", [0, 0]),
        ("F0.0 F1.0 B0.0 F2.0 W0.0 B1.0 F3.0 W1.0 B2.0 B3.0 W2.0 W3.0", [0, 1, 0, 1]),
        ("F0.0 F1.0 F2.0 B2.0 B0.0 F3.0 B1.0 B3.0", [0, 1, 2, 0]),
        ("F0.0 F1.0 F2.0", [0, 0, 0]),
    ],
)
def test_the_lowest_free_one(actions: str, slots: list[int]) -> None:
    assert [slot for _, slot in sorted(slots_of(parse_actions(actions)).items())] == slots


def test_chunks_have_slots_of_their_own() -> None:
    slots = slots_of(parse_actions("F0.0 F1.0 F0.1 B0.1 F1.1 F2.0 B1.1 B0.0 F3.0 B1.0 B2.0 B3.0"))
    assert {key: slot for key, slot in slots.items() if key[1]} == {(0, 1): 0, (1, 1): 0}
    assert [slots[m, 0] for m in range(4)] == [0, 1, 2, 0]


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [1, 3, 4, 9])
def test_1f1b_goes_round(p: int, n: int) -> None:
    for stage, actions in enumerate(schedule_lists("1f1b", p, n)):
        held = in_flight(p, stage, n)
        assert slots_of(actions) == {(m, 0): m % held for m in range(n)}


def mixed(layout: Layout) -> tuple[Plan, Plan, Plan]:
    """Everything kept in slot 0 and full replay in the others; both for all slots."""
    rich, lean = (plan_for(layout.pieces, Policy(granularity=name)) for name in ("none", "full"))
    slots: list[list[tuple[ChunkPlan, ...]]] = [
        [(rich.chunk(stage, chunk), lean.chunk(stage, chunk)) for chunk in range(layout.v)] for stage in range(layout.p)
    ]
    return Plan.of_slots(slots, "one slot keeps all"), rich, lean


@pytest.mark.parametrize(("p", "v"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_bytes_of_slots_that_differ(p: int, v: int) -> None:
    """One rich micro-batch of every chunk in flight, the others lean; equal slots change nothing."""
    layout = Layout.even(5, p, v, n=7, micro_batch=2, act_bytes=4, device="cpu")
    plan, rich, lean = mixed(layout)
    alike = Plan.of_slots([[(chunk, chunk) for chunk in stage] for stage in rich.stages], rich.name)
    made = [predict(MODEL, layout, each).stages for each in (plan, rich, lean)]
    assert [s.terms for s in predict(MODEL, layout, alike).stages] == [s.terms for s in made[1]]
    for some, all_, few in zip(*made, strict=True):
        assert few.kept_peak_bytes <= some.kept_peak_bytes <= all_.kept_peak_bytes
        assert [slots[1:] for slots in some.kept_by_slot] == list(few.kept_by_slot)
        assert [slots[:1] for slots in some.kept_by_slot] == list(all_.kept_by_slot)
        if v == 1:
            (kept, less), held = some.kept_by_slot[0], in_flight(p, some.stage, layout.n)
            assert some.kept_peak_bytes == kept + (held - 1) * less and sum(some.terms.values()) == some.total_bytes


def test_a_list_that_frees_nothing_is_refused() -> None:
    layout = Layout.even(5, 1, n=2)
    walk = StageWalk(profile(MODEL, layout), layout, plan_for(layout.pieces, Policy()), 0)
    with pytest.raises(ValueError, match="1 forwards that no backward has freed"):
        walk.run(parse_actions("F0.0 B0.0 F1.0"))


def test_replay_and_work_of_slots_that_differ() -> None:
    """Of 7 micro-batches stage 0 of 2 has 4 in slot 0: 3 of 7 replay; the last stage has one slot and replays none."""
    layout = Layout.even(5, 2, n=7, act_bytes=4, device="cpu")
    evaluator = Evaluator(MODEL, layout, MACHINES["cpu"])
    some, all_, few = (evaluator(plan) for plan in mixed(layout))
    assert some.stages[0].replay == pytest.approx(few.stages[0].replay * 3 / 7, rel=1e-12)
    assert some.stages[1].replay == all_.stages[1].replay < few.stages[1].replay
    assert all_.step_seconds < some.step_seconds < few.step_seconds
    by_stage = [few.replayed_flops - all_.replayed_flops, some.replayed_flops - all_.replayed_flops]
    share = 3 * 3 / (7 * 5)  # of micro-batches and of layers, on stage 0
    assert by_stage[1] == pytest.approx(by_stage[0] * share, rel=1e-12)
    replays = [some.replay_of(0, action) > all_.replay_of(0, action) for action in evaluator.lists[0]]
    lean = [a.kind == "B" and a.micro_batch % 2 == 1 for a in evaluator.lists[0]]
    assert replays == lean
    assert some.timeline.peak_bytes[0] == some.prediction.stages[0].total_bytes
