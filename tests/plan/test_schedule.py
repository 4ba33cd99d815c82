"""Schedules: exact orders, the words they are written in, and every one of them on the abstract machine."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from megackpt.plan.machine import ScheduleError, _Machine, check_schedule, clock_table, needed_before
from megackpt.plan.schedule import (
    Action,
    destination,
    format_actions,
    forward_part,
    gpipe,
    in_flight,
    interleaved,
    one_f_one_b,
    parse_actions,
    schedule_lists,
    source,
    zero_bubble,
)


def words(text: str) -> list[Action]:
    """``F0 B1`` on chunk 0."""
    return parse_actions(" ".join(f"{word}.0" for word in text.split()))


@pytest.mark.parametrize(
    ("stages", "stage", "micro_batches", "order"),
    [
        (1, 0, 3, "F0 B0 F1 B1 F2 B2"),
        (4, 0, 1, "F0 B0"),
        (4, 0, 3, "F0 F1 F2 B0 B1 B2"),
        (4, 1, 3, "F0 F1 F2 B0 B1 B2"),
        (4, 2, 3, "F0 F1 B0 F2 B1 B2"),
        (4, 3, 3, "F0 B0 F1 B1 F2 B2"),
        (4, 0, 4, "F0 F1 F2 F3 B0 B1 B2 B3"),
        (4, 0, 6, "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5"),
        (4, 1, 6, "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5"),
    ],
)
def test_order_of_1f1b(stages: int, stage: int, micro_batches: int, order: str) -> None:
    assert one_f_one_b(stages, stage, micro_batches) == words(order)


def test_order_of_gpipe_is_one_on_all_stages() -> None:
    assert [gpipe(3, stage, 2) for stage in range(3)] == [words("F0 F1 B0 B1")] * 3


def test_evaluation_runs_the_forwards_in_order() -> None:
    assert forward_part(one_f_one_b(2, 0, 3)) == words("F0 F1 F2")


@pytest.mark.parametrize("generator", [gpipe, one_f_one_b])
def test_every_schedule_runs_and_holds_what_it_should(generator: object) -> None:
    for stages in range(1, 9):
        for micro_batches in range(1, 10):
            lists = [generator(stages, stage, micro_batches) for stage in range(stages)]  # type: ignore[operator]
            expected = [in_flight(stages, stage, micro_batches) for stage in range(stages)]
            if generator is gpipe:
                expected = [micro_batches] * stages
            for overlap in (False, True):
                assert check_schedule(lists, overlap) == expected
            assert check_schedule([forward_part(actions) for actions in lists]) == [0] * stages


def test_a_receive_is_posted_no_sooner_than_its_message_can_exist() -> None:
    """Stage 0 of three: stage 1 makes its gradients after its second, third and
    fourth forward, and the last when it has no forward left to do."""
    lists = schedule_lists("1f1b", 3, 4)
    assert needed_before(lists, 0) == dict(zip(words("B0 B1 B2 B3"), (2, 3, 5, 5), strict=True))
    assert needed_before(lists, 1) == dict(
        zip(words("F0 F1 F2 F3 B0 B1 B2 B3"), (0, 0, 0, 3, 1, 2, 4, 6), strict=True)
    )
    assert needed_before(schedule_lists("gpipe", 2, 3), 0) == dict.fromkeys(words("B0 B1 B2"), 3)


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("interleaved", 2)])
def test_a_message_needs_what_it_needs_and_no_more(name: str, chunks: int) -> None:
    """On the machine, which knows messages and order only: a stage that stops where it posts for a message gets it,
    however long sends wait for their receivers; one that stops an action sooner than needed never does."""

    def run(machine: _Machine, stage: int, stopped: bool) -> None:
        while any(machine._advance(index) for index in range(len(machine.stages)) if not (stopped and index == stage)):
            pass

    def arrives(lists: list[list[Action]], stage: int, over: int, wanted: Action, taken: Action | None) -> bool:
        machine = _Machine(lists, True)
        machine.stages[stage].actions = lists[stage][:over]
        run(machine, stage, False)
        if taken is not None:
            machine.stages[stage].actions = lists[stage]
            assert machine._receive(stage, taken)
            run(machine, stage, True)
        into = [c for (kind, _, to), c in machine.channels.items() if (kind, to) == (wanted.kind, stage)]
        return any(wanted in channel.sent for channel in into)

    for stages, micro_batches in itertools.product((2, 3, 4), (1, 2, 3, 5)):
        lists = schedule_lists(name, stages, micro_batches, chunks)
        for stage, actions in enumerate(lists):
            last: dict[str, Action] = {}  # taken, of each kind: one receive is posted after the other
            for message, needed in needed_before(lists, stage).items():
                before = last.get(message.kind)
                place = -1 if before is None else actions.index(before)
                over, taken = (needed, None) if place < needed else (place, before)
                assert over <= actions.index(message)
                assert arrives(lists, stage, over, message, taken)
                assert needed == 0 or not arrives(lists, stage, needed - 1, message, None)
                last[message.kind] = message


@pytest.mark.parametrize("generator", [gpipe, one_f_one_b])
def test_the_clock_table_in_the_docstring_is_what_the_generator_makes(generator: object) -> None:
    drawn = [line.strip() for line in (generator.__doc__ or "").splitlines() if line.strip().startswith("stage ")]
    made = clock_table([generator(3, stage, 4) for stage in range(3)])  # type: ignore[operator]
    assert drawn == made.splitlines()


def test_the_clock_tables_of_chunks_and_split_backwards_too() -> None:
    for generator, lists in (
        (interleaved, [interleaved(2, stage, 4, 2) for stage in range(2)]),
        (zero_bubble, [zero_bubble(3, stage, 4) for stage in range(3)]),
    ):
        drawn = [line.strip() for line in (generator.__doc__ or "").splitlines() if line.strip().startswith("stage ")]
        assert [line for line in drawn if "|" in line] == clock_table(lists).splitlines()


def test_order_of_interleaved_groups() -> None:
    assert format_actions(interleaved(2, 1, 3, 2)) == (
        "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 B1.0 F2.1 B2.1 B2.0"
    )
    assert interleaved(3, 1, 5) == one_f_one_b(3, 1, 5)


def test_actions_are_written_and_read_back() -> None:
    actions = [Action("F", 3, 1), Action("B", 12), Action("W", 0, 10)]
    assert format_actions(actions) == "F3.1 B12.0 W0.10"
    assert parse_actions("F3.1  B12.0\nW0.10") == actions


@pytest.mark.parametrize("text", ["F3", "X1.0", "F-1.0", "F1.0.0", "f1.0", ""])
def test_what_is_no_action_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="is not an action") as caught:
        Action.parse(text)
    assert repr(text) in str(caught.value)


def test_senseless_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 micro-batch, got 0"):
        one_f_one_b(2, 0, 0)
    with pytest.raises(ValueError, match="stage 2 does not exist among 2"):
        gpipe(2, 2, 1)
    with pytest.raises(ValueError, match="'G' is none of F, B, W"):
        Action("G", 0)


def test_messages_follow_from_the_action() -> None:
    assert source(Action("F", 2), 1, 4) == (0, Action("F", 2))
    assert source(Action("B", 2), 1, 4) == (2, Action("B", 2))
    assert source(Action("F", 2), 0, 4) is None and source(Action("B", 2), 3, 4) is None
    assert source(Action("F", 2, 1), 0, 4, chunks=2) == (3, Action("F", 2, 0))
    assert destination(Action("F", 2, 0), 3, 4, chunks=2) == (0, Action("F", 2, 1))
    assert destination(Action("B", 2, 1), 0, 4, chunks=2) == (3, Action("B", 2, 0))
    assert source(Action("W", 0), 1, 4) is None and destination(Action("W", 0), 1, 4) is None


def test_the_machine_runs_chunks_and_split_backwards() -> None:
    lists = [parse_actions("F0.0 F1.0 F0.1 F1.1 B0.1 B1.1 B0.0 W0.1 B1.0 W1.1 W0.0 W1.0")] * 2
    assert check_schedule(lists) == [4, 4]
    single = [parse_actions("F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 B1.0")]
    assert check_schedule(single) == [2]


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (["F0 B0", "F0"], r"stage 1 lacks B0\.0 \(1 missing\)"),
        (["F0 B0 F1 B1", "F0 B0"], r"stage 1 lacks B1\.0 \(2 missing\)"),
        (["F0 F0 B0", "F0 B0"], r"stage 0 has F0\.0 more than once"),
        (["F0 F2 B0 B2", "F0 F2 B0 B2"], r"stage 0 lacks B1\.0"),
        (["B0 F0", "F0 B0"], r"stage 0 has B0\.0 before its F"),
        (["F0 F1 B0 B1", "F1 F0 B0 B1"], r"stage 1 at F1\.0: the next message on its channel is for F0\.0"),
        (
            ["F0 B0 F1 B1", "F0 F1 B0 B1"],
            r"deadlock: stage 0 at B0\.0 waits for a message of stage 1; stage 1 at F1",
        ),
        (["", ""], "the schedule is empty"),
    ],
)
def test_the_machine_refuses_what_is_no_schedule(lists: list[str], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check_schedule([words(text) for text in lists])


def test_the_machine_knows_that_a_message_needs_a_posted_receive() -> None:
    """Stage 0 takes no gradient before all its forwards are sent; stage 1 goes on only when its gradients are taken."""

    def mixed(micro_batches: int) -> list[list[Action]]:
        return [gpipe(2, 0, micro_batches), one_f_one_b(2, 1, micro_batches)]

    assert check_schedule(mixed(5)) == [5, 1]
    with pytest.raises(ScheduleError, match="deadlock: stage 0 at F5.0 waits until its last message is taken; stage 1"):
        check_schedule(mixed(6))
    assert check_schedule(mixed(6), overlap=True) == [6, 1]


def test_plan_needs_no_torch() -> None:
    modules = "schedule, machine, split, events"
    code = f"import sys; from megackpt.plan import {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
