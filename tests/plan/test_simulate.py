"""The event simulator: exact clocks and bytes on schedules whose answer is known, and every small layout."""

from __future__ import annotations

import itertools

import pytest

from megackpt.plan.machine import ScheduleError, check_schedule
from megackpt.plan.schedule import Action, most_in_flight, parse_actions, schedule_lists
from megackpt.plan.simulate import Cost, Order, Timeline, simulate
from megackpt.plan.split import split_layers


def run(name: str, p: int, n: int, v: int = 1, *, f: float = 1, b: float = 2, w: float = 0, **more: object) -> Timeline:
    """Equal stages; every forward keeps one byte until it is let go."""
    lists = schedule_lists(name, p, n, v)
    leaves = "W" if name == "zb-h1" else "B"
    seconds = {"F": f, "B": b, "W": w}

    def cost(stage: int, action: Action) -> Cost:
        return Cost(seconds[action.kind], 1 if action.kind == "F" else -1 if action.kind == leaves else 0)

    return simulate(lists, cost, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("p", "n"), [(1, 1), (1, 5), (4, 1), (4, 3), (4, 8), (7, 20)])
def test_step_and_bubble_of_equal_stages(p: int, n: int) -> None:
    for name in ("gpipe", "1f1b"):
        line = run(name, p, n)
        assert line.step_seconds == 3 * (n + p - 1)
        assert line.bubble_share == pytest.approx((p - 1) / n)
        assert line.idle_seconds == (3 * (p - 1),) * p


@pytest.mark.parametrize(("p", "n", "v"), [(2, 4, 2), (4, 8, 2), (4, 4, 3), (3, 9, 4)])
def test_chunks_divide_the_bubble(p: int, n: int, v: int) -> None:
    line = run("interleaved", p, n, v, f=1, b=2)
    assert line.step_seconds == 3 * n * v + 3 * (p - 1)
    assert line.bubble_share == pytest.approx((p - 1) / (n * v))


@pytest.mark.parametrize(("p", "n"), [(2, 4), (4, 8), (6, 12), (8, 16)])
def test_zero_bubble_leaves_a_third(p: int, n: int) -> None:
    whole, halves = run("1f1b", p, n, f=1, b=2), run("zb-h1", p, n, f=1, b=1, w=1)
    assert whole.step_seconds - 3 * n == 3 * (p - 1)
    assert halves.step_seconds - 3 * n == p - 1
    assert halves.peak_bytes == (min(p, n),) * p


def layers_run(layers: int, p: int, v: int, n: int) -> list[tuple[str, int, int]]:
    """(kind, micro-batch, layer) of everything that the lists run, by the trainer's division."""
    pieces = split_layers(layers, p * v)
    name = "1f1b" if v == 1 else "interleaved"
    lists = schedule_lists(name, p, n, v)
    Order(lists)
    return [
        (action.kind, action.micro_batch, layer)
        for stage, actions in enumerate(lists)
        for action in actions
        for layer in pieces[action.chunk * p + stage]
    ]


def test_every_small_layout_runs_each_layer_once_or_is_refused() -> None:
    for p, v, n in itertools.product(range(1, 5), range(1, 4), range(1, 10)):
        for layers in range(1, 13):
            if layers < p * v:
                with pytest.raises(ValueError, match="cannot fill"):
                    layers_run(layers, p, v, n)
                continue
            done = layers_run(layers, p, v, n)
            assert sorted(done) == sorted(itertools.product("BF", range(n), range(layers)))


def test_no_small_layout_deadlocks_and_all_hold_what_the_formula_says() -> None:
    """Up to 4 stages of 3 chunks with any small number of micro-batches, and 8 stages with those of the grid."""
    grid = [*itertools.product(range(1, 5), range(1, 4), range(1, 10))]
    grid += itertools.product((8,), range(1, 4), (1, 7, 8, 9, 17))
    for p, v, n in grid:
        for name in ("1f1b", "gpipe", "zb-h1") if v == 1 else ("interleaved",):
            lists = schedule_lists(name, p, n, v)
            expected = [most_in_flight(name, p, stage, n, v) for stage in range(p)]
            held = check_schedule(lists)
            assert held == check_schedule(lists, overlap=True) == list(run(name, p, n, v).peak_bytes)
            if v == 1 or n % p == 0:
                assert held == expected
            else:
                assert all(a <= b for a, b in zip(held, expected, strict=True))


def test_interleaved_in_flight_counts() -> None:
    assert [most_in_flight("interleaved", 4, r, 8, 3) for r in range(4)] == [15, 13, 11, 9]
    assert most_in_flight("interleaved", 4, 0, 2, 3) == 6
    assert check_schedule(schedule_lists("interleaved", 4, 8, 3)) == [15, 13, 11, 9]


def test_the_slowest_stage_sets_the_pace() -> None:
    def cost(stage: int, action: Action) -> Cost:
        return Cost(2.0 if stage == 1 else 1.0)

    line = simulate(schedule_lists("1f1b", 3, 10), cost)
    assert line.step_seconds == 1 + 10 * 4 + 1  # the first forward before it, the last backward after it
    assert line.stages[1].busy_seconds == 40


def test_bytes_over_time_are_exact() -> None:
    def cost(stage: int, action: Action) -> Cost:
        return Cost(1.0, 10, 13) if action.kind == "F" else Cost(2.0, -10, 4)

    line = simulate(schedule_lists("1f1b", 2, 2), cost, held_bytes=[100, 200])
    assert line.stages[0].curve() == [
        (0.0, 100), (0.0, 113), (1.0, 110), (1.0, 123), (2.0, 120), (4.0, 124), (6.0, 110), (7.0, 114), (9.0, 100),
    ]  # fmt: skip
    assert line.peak_bytes == (124, 214)
    assert (str(line.stages[0].peak_action), str(line.stages[1].peak_action)) == ("B0.0", "B0.0")


def test_a_message_takes_its_time_but_not_its_senders() -> None:
    assert run("1f1b", 3, 1, transfer_seconds=0.5).step_seconds == 9 + 4 * 0.5
    assert run("interleaved", 1, 2, 2, transfer_seconds=0.5).step_seconds == 12


def test_what_waits_for_ever_is_named() -> None:
    lists = [parse_actions("F0.0 B0.0 F1.0 B1.0"), parse_actions("F0.0 F1.0 B0.0 B1.0")]
    with pytest.raises(ScheduleError, match=r"deadlock: stage 0 at B0\.0, stage 1 at F1\.0"):
        Order(lists)


def test_events_are_those_of_a_real_run() -> None:
    line = run("1f1b", 2, 2, received_bytes=64)
    events = line.events()
    assert [e.end_s for e in events] == sorted(e.end_s for e in events)
    by_stage = [[e for e in events if e.stage == stage] for stage in (0, 1)]
    assert [str(e.action) for e in by_stage[0]] == ["F0.0", "F1.0", "B0.0", "B1.0"]
    assert [e.wait_s for e in by_stage[0]] == [0, 0, 2, 1]
    assert [(e.received_bytes, e.sent_bytes) for e in by_stage[1]] == [(64, 0), (0, 64), (64, 0), (0, 64)]
    assert [e.saved_bytes for e in by_stage[0]] == [1, 2, 1, 0]


def test_names_and_chunks_are_checked() -> None:
    with pytest.raises(ValueError, match="schedule 'dualpipe' is none of 1f1b, gpipe, interleaved, zb-h1"):
        schedule_lists("dualpipe", 2, 2)
    with pytest.raises(ValueError, match="gpipe has one chunk per stage, got 2"):
        schedule_lists("gpipe", 2, 2, 2)
    with pytest.raises(ValueError, match="at least 1 chunk, got 0"):
        schedule_lists("1f1b", 2, 2, 0)
