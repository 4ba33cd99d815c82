"""The whole choice: the figures reproduced, never above the budget, never worse than a global policy, monotone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megackpt.plan.choose.choose import DEFAULTS, Choice, Options, choose
from megackpt.plan.choose.flags import applied, best_mixture, best_policy, flag_policies
from megackpt.plan.choose.pareto import layer_items
from megackpt.plan.choose.problem import DoesNotFit, End, Problem
from megackpt.plan.choose.split import imbalance
from megackpt.plan.decision import OFFLOAD_HOST, Plan
from megackpt.plan.demand import replayed_by_layer
from tests.plan.choose.layer import FIGURES, small_problem
from tools.bench_planner import COLUMNS, Case, case_of, cells

ALL = Options(split=True, slots=True)
WIDE = 100_000


def overheads(row: dict[str, object], shared: bool) -> list[tuple[Case, dict[str, float | None]]]:
    cases = [case_of(FIGURES, row, gib, shared) for gib in row["gib"]]  # type: ignore[attr-defined]
    return [(case, cells(case)) for case in cases]


@pytest.mark.parametrize("row", FIGURES["cases"], ids=lambda row: row["name"])
def test_the_table_of_the_figures(row: dict[str, object]) -> None:
    """Within one point without shared gathers; with them nothing gets worse; every column beats the one before."""
    for place, (case, made) in enumerate(overheads(row, False)):
        for column in COLUMNS:
            if column in row:
                assert made[column] == pytest.approx(row[column][place], abs=1.0), column  # type: ignore[index]
        shared = case_of(FIGURES, row, row["gib"][place], True)  # type: ignore[index]
        mixture, exact = best_mixture(shared.problem, shared.items), choose(shared.problem, Options(), shared.items)
        assert mixture is not None and shared.baseline == case.baseline
        assert shared.overhead(mixture.step_seconds) <= made["mixture"] + 1e-9  # type: ignore[operator]
        assert shared.overhead(exact.step_seconds) <= made["exact"] + 1e-9  # type: ignore[operator]
        assert exact.step_seconds <= mixture.step_seconds + 1e-12
        order = [made[name] for name in ("slots", "split", "exact", "mixture", "uniform", "flags")]
        known = [value for value in order[1:] if value is not None]
        assert known == sorted(known)
        assert made["slots"] is None or made["slots"] <= made["exact"]  # type: ignore[operator]


layouts = st.fixed_dictionaries(
    {
        "layers": st.integers(12, 20),
        "stages": st.integers(1, 4),
        "chunks": st.integers(1, 3),
        "micro_batches": st.integers(1, 9),
        "base_bytes": st.integers(0, 50),
        "layer_state_bytes": st.integers(0, 40),
        "transfer_seconds": st.sampled_from([0.0, 1e-4]),
        "schedule": st.sampled_from(["1f1b", "gpipe", "zb-h1"]),
    }
)


def problem_of(numbers: dict[str, object], budget: int) -> Problem:
    chunks = numbers["chunks"] if numbers["schedule"] == "1f1b" else 1
    return small_problem(budget, **(numbers | {"chunks": chunks}))


def tried(problem: Problem, options: Options = DEFAULTS) -> Choice | None:
    try:
        return choose(problem, options)
    except DoesNotFit:
        return None


@settings(max_examples=12, deadline=None, derandomize=True)
@given(layouts, st.integers(200, 6000), st.booleans())
def test_never_above_the_budget_never_worse_than_flags(numbers: dict[str, object], budget: int, free: bool) -> None:
    problem = problem_of(numbers, budget)
    choice = tried(problem, ALL if free else Options())
    largest = max(map(max, problem.division))
    flags = best_policy(problem, flag_policies(problem.pricing, largest))
    if choice is None:
        assert flags is None
        return
    assert max(choice.timeline.peak_bytes) <= budget
    assert sum(map(sum, choice.counts)) == problem.layers
    if flags is not None:
        assert choice.step_seconds <= flags.step_seconds + 1e-12
    assert choice == tried(problem, ALL if free else Options())
    assert Plan.from_json(choice.plan.to_json()) == choice.plan


@settings(max_examples=10, deadline=None, derandomize=True)
@given(layouts, st.lists(st.integers(200, 6000), min_size=2, max_size=4))
def test_more_memory_is_never_slower(numbers: dict[str, object], budgets: list[int]) -> None:
    before = float("inf")
    for budget in sorted(budgets):
        choice = tried(problem_of(numbers, budget))
        assert choice is not None or before == float("inf")
        if choice is not None:
            assert choice.step_seconds <= before + 1e-12
            before = choice.step_seconds


def test_with_room_for_all_nothing_is_replayed() -> None:
    choice = choose(small_problem(WIDE), Options(keep_gathered=False))
    assert choice.overhead == 0
    chunk = choice.plan.chunk(0)
    absent = ("attn.qknorm", "attn.rope")
    assert replayed_by_layer(chunk, range(4), absent) == [("attn.gather", "mlp.gather")] * 4
    gathered = choose(small_problem(WIDE))
    assert gathered.overhead < 0


def test_the_first_stage_replays_most() -> None:
    choice = choose(small_problem(330))
    replays = [sum(map(sum, pick.replay_ps)) for pick in choice.picks]
    assert replays[0] > replays[1] > replays[2]


def test_nothing_fits_is_said_with_the_bytes_it_takes() -> None:
    with pytest.raises(
        DoesNotFit, match=r"stage 0 needs at least (\d+) bytes with 4 layers \(11 of them state\)"
    ) as said:
        choose(small_problem(60), Options(groups=False))
    least = int(str(said.value).split("at least ")[1].split()[0])
    assert choose(small_problem(least), Options(groups=False)).timeline.peak_bytes[0] <= least
    with pytest.raises(DoesNotFit):
        choose(small_problem(least - 1), Options(groups=False))


def test_groups_of_layers_where_no_save_set_fits() -> None:
    problem = small_problem(1500, micro_batches=500, schedule="gpipe", first=End(), last=End(), layers=6, stages=3)
    with pytest.raises(DoesNotFit):
        choose(problem, Options(groups=False))
    choice = choose(problem)
    assert choice.plan.chunk(0).groups[0].last == 1
    assert max(choice.timeline.peak_bytes) <= 1500


def test_a_heavy_head_gets_fewer_layers() -> None:
    """PP-09: an output matrix of a large vocabulary weighs as much as layers do."""
    head = End(forward_seconds=2 * 1.876e-3, backward_seconds=2 * 3.6e-3)
    problem = small_problem(WIDE, layers=24, stages=4, first=End(), last=head, micro_batches=32)
    assert imbalance(problem) == pytest.approx((24 / 26, 24 / 26, 24 / 26, 32 / 26), rel=1e-3)
    choice = choose(problem, Options(split=True))
    assert sorted(choice.counts, reverse=True) == [(7,), (7,), (6,), (4,)] and choice.counts[-1] == (4,)
    assert choice.overhead < -0.1
    assert max(imbalance(problem, choice.counts)) < 1.1


def test_a_heavy_embedding_gets_fewer_layers_where_memory_is_short() -> None:
    numbers = {"layers": 24, "stages": 4, "micro_batches": 32, "layer_state_bytes": 50, "last": End()}
    problem = small_problem(900, first=End(state_bytes=460), **numbers)
    choice = choose(problem, Options(split=True))
    assert choice.counts[0][0] < 6
    assert choice.step_seconds < choose(problem).step_seconds


def test_slots_use_what_one_mixture_leaves() -> None:
    problem = small_problem(200, micro_batches=24)
    plain, slotted = choose(problem), choose(problem, Options(slots=True))
    assert slotted.step_seconds < plain.step_seconds
    assert max(slotted.timeline.peak_bytes) <= 200
    plan, counts = slotted.plan, [len(pick.slots) for pick in slotted.picks]
    assert [len(plan.slots(stage)) for stage in range(3)] == counts and max(counts) > 1
    stage = counts.index(max(counts))
    assert plan.chunk(stage, 0, 0) != plan.chunk(stage, 0, 1) == plan.chunk(stage, 0, 99)
    assert Plan.from_json(plan.to_json()) == plan


def test_offload_only_when_asked_for() -> None:
    problem = small_problem(200, micro_batches=24, host_bytes_per_s=1e6)
    plain, away = choose(problem), choose(problem, Options(offload=True))
    assert OFFLOAD_HOST not in plain.plan.dumps()
    assert OFFLOAD_HOST in away.plan.dumps()
    assert away.step_seconds < plain.step_seconds
    assert max(away.timeline.peak_bytes) <= 200
    for stage, pick in enumerate(away.picks):
        assert pick.host_bytes <= 1e6 * problem.period_seconds(stage, (4,))
    slow = choose(small_problem(200, micro_batches=24, host_bytes_per_s=1.0), Options(offload=True))
    assert slow.step_seconds == plain.step_seconds


def test_a_global_mixture_is_never_better() -> None:
    for budget in (300, 400, 600, 900):
        problem = small_problem(budget)
        items = layer_items(problem.pricing)
        mixture = best_mixture(problem, items)
        assert mixture is not None
        assert choose(problem, Options(), items).step_seconds <= mixture.step_seconds + 1e-12


def test_clipped_groups_of_the_flags() -> None:
    problem = small_problem(WIDE)
    policies = flag_policies(problem.pricing, 4)
    (first, *_) = applied(problem, problem.division, policies["full, uniform 3"])
    assert [item.layers for item in first.slots[0][0]] == [3, 1]


def test_layers_are_numbered_through_the_model() -> None:
    plan = choose(small_problem(2000, chunks=2)).plan
    addresses = [
        sorted(int(a.split(".")[1]) for a in plan.chunk(stage, chunk).save_sets if a.startswith("layers"))
        for chunk in range(2) for stage in range(3)
    ]  # fmt: skip
    assert addresses == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
