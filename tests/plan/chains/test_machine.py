"""The abstract machine: counts worked out by hand, and what it refuses."""
from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from megackpt.plan.chains import Chain, ChainPlan, Drop, Keep, MachineError, Stage, execute, run, schedule, two_level
from megackpt.plan.chains.machine import Action


def parse(text: str) -> list[Action]:
    """``T0 S1@disk turn`` as actions."""
    actions = []
    for word in text.split():
        match = re.fullmatch(r"([A-Z])(\d+)(?:@(\w+))?", word)
        actions.append(Action(match[1], int(match[2]), match[3] or "ram") if match else Action("turn", 0))
    return actions


def written(plan: ChainPlan) -> str:
    return " ".join(map(str, schedule(plan)))


def test_a_plan_written_out() -> None:
    plan = ChainPlan((Drop(2, (Drop(1, (Keep(),)), Keep())), Keep(), Keep()))
    assert written(plan) == "S0 F0 F1 T2 T3 turn B3 B2 L0 F0 E1 B1 L0 D0 E0 B0"
    assert written(ChainPlan.keep_all(2)) == "T0 T1 turn B1 B0"
    assert written(ChainPlan((Keep(), Drop(1, (Keep(),))))) == "T0 S1 F1 turn L1 D1 E1 B1 B0"


def test_a_plan_on_two_tiers_written_out() -> None:
    plan = ChainPlan((Drop(3, (Drop(1, (Keep(),)), Keep(), Keep()), "disk"), Keep()))
    # read for its replay, the state moves to a RAM slot, and the disk slot is free
    assert written(plan) == "S0@disk F0 F1 F2 T3 turn B3 L0@disk D0@disk S0 F0 T1 E2 B2 B1 L0 D0 E0 B0"
    report = run(Chain.uniform(4), plan, write_cost=3.0, read_cost=5.0)
    assert (report.writes, report.reads, report.slots, report.disk_slots) == (1, 1, 1, 1)
    assert (report.forward_cost, report.backward_cost, report.transfer_cost, report.cost) == (8.0, 8.0, 8.0, 24.0)


def test_bytes_by_hand() -> None:
    """Input 1; stages with output, tape = 2,10 / 4,7 / 8,9.  State bytes 1, 2, 4, 8."""
    chain = Chain((Stage(2, 10), Stage(4, 7), Stage(8, 9)), input_bytes=1)
    kept = run(chain, ChainPlan.keep_all(3))
    assert (kept.peak_bytes, kept.held_bytes, kept.forwards, kept.extra_forwards) == (27, 27, (1, 1, 1), 0)
    # forward: 1, 1+2, 2+4 beside the input; then state 2 and tape 2: 1+4+9 = 14 held; replay: tapes 0 and 1: 18
    dropped = run(chain, ChainPlan((Drop(2, (Keep(), Keep())), Keep())))
    assert (dropped.forward_peak_bytes, dropped.held_bytes, dropped.backward_peak_bytes) == (14, 14, 18)
    assert (dropped.forwards, dropped.replays, dropped.slots) == ((2, 2, 1), 1, 1)
    # one at a time: state 2 and tape 2 = 14, state 1 and tape 1 = 10, tape 0 = 11, running 1 -> 2: 7
    lean = run(chain, ChainPlan((Drop(2, (Drop(1, (Keep(),)), Keep())), Keep())))
    assert (lean.peak_bytes, lean.forwards) == (14, (3, 2, 1))


def test_gradients_transients_and_outputs_that_nobody_reads() -> None:
    stage = Stage(4, 10, gradient_bytes=4, reads_output=False, tape_transient=3, backward_transient=5)
    one = run(Chain((stage,), input_bytes=2, input_gradient_bytes=2), ChainPlan.keep_all(1))
    assert one.forward_peak_bytes == 2 + 10 + 3
    # the loss has the output (10) and makes its gradient (4); in backward the output (4) is gone, both gradients there
    assert one.backward_peak_bytes == max(2 + 10 + 4, 2 + 6 + 4 + 2 + 5)
    assert one.held_bytes == 2 + 10
    two = Chain((Stage(4, 4, forward_transient=7), stage), input_bytes=2)
    replayed = run(two, ChainPlan((Drop(1, (Keep(),)), Keep())))
    assert replayed.forward_peak_bytes == max(2 + 4 + 7, 2 + 4 + 10 + 3)


def test_a_replay_ends_at_the_last_tensor_that_is_saved() -> None:
    stage = Stage(4, 10, forward_cost=3.0, spared_cost=2.0, reads_output=False)
    report = run(Chain((stage,) * 2), ChainPlan((Drop(1, (Keep(),)), Keep())))
    assert report.forward_cost == 3.0 + 3.0 + (3.0 - 2.0)
    assert report.backward_peak_bytes == 4 + 10  # of the replayed tape only 6 exist, less than state 1 and tape 1


WRONG: dict[str, tuple[str, str]] = {
    "state lost": ("F0 F1 T2 turn B2 B1", "stage 1 has no tape"),
    "not the working state": ("T0 T1 F1", "state 1 is not the working one (2)"),
    "no such stage": ("T0 T1 T2 T3", "there is no stage 3"),
    "backward out of order": ("T0 T1 T2 turn B1", "the next backward is that of stage 2"),
    "backward twice": ("T0 T1 T2 turn B2 B2", "the next backward is that of stage 1"),
    "backward before the loss": ("T0 T1 T2 B2", "the loss is not computed yet"),
    "loss too early": ("T0 T1 turn", "the chain's output is not the working state (2)"),
    "two losses": ("T0 T1 T2 turn turn", "the loss is computed already"),
    "load of nothing": ("F0 F1 T2 turn B2 L0", "state 0 is not held in ram"),
    "load from the wrong tier": ("S0@disk F0 L0", "state 0 is not held in ram"),
    "drop of nothing": ("D0", "state 0 is not held in ram"),
    "held twice": ("S0 S0", "state 0 is held in ram already"),
    "store of another state": ("F0 S0", "state 0 is not the working one (1)"),
    "taped twice": ("S0 T0 L0 T0", "its tape is there already"),
    "output of a tail": ("S0 F0 F1 T2 turn B2 L0 E0 T1", "state 1 is not the working one (None)"),
    "undone": ("T0 T1 T2 turn B2 B1", "the backward of stage 0 was never run"),
    "nothing": ("", "the backward of stage 2 was never run"),
    "slot left behind": ("S0 S0@disk T0 T1 T2 turn B2 B1 B0", "left behind: state 0 in ram, state 0 in disk"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_refusals(fault: str) -> None:
    actions, words = WRONG[fault]
    with pytest.raises(MachineError, match=re.escape(words)):
        execute(Chain.uniform(3), parse(actions))


def test_a_plan_of_another_length_is_refused() -> None:
    with pytest.raises(MachineError, match="covers 2 stages, the chain has 3"):
        run(Chain.uniform(3), ChainPlan.keep_all(2))


PLANNERS: list[Callable[[], ChainPlan]] = [lambda: two_level(14, 2, 3, 0.5), lambda: two_level(10, 1, 2, 2)]


@pytest.mark.parametrize("make", PLANNERS)
def test_an_action_left_out_is_noticed(make: Callable[[], ChainPlan]) -> None:
    """Every action of a schedule is needed: without it the machine refuses."""
    actions = list(schedule(make()))
    for place in range(len(actions)):
        with pytest.raises(MachineError):
            execute(Chain.uniform(len(make())), actions[:place] + actions[place + 1 :])
