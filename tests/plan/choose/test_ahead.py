"""Replay ahead as the chooser turns it on: what it wins to the picosecond, what it costs to the byte, and where not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megackpt.plan.accelerators import MACHINES
from megackpt.plan.choose.ahead import HAIR, most_units, with_ahead
from megackpt.plan.choose.choose import Options, choose
from megackpt.plan.choose.engine import choose_for, least_bytes
from megackpt.plan.choose.knapsack import Table
from megackpt.plan.choose.pareto import Item, group_items, layer_items, priced
from megackpt.plan.choose.prices import PICO
from megackpt.plan.choose.problem import DoesNotFit, End, Pick, Problem
from megackpt.plan.decision import Plan
from megackpt.plan.evaluate import Evaluator
from megackpt.plan.numbers import Layout, ModelNumbers
from megackpt.plan.policies import Policy, full_layer, keep_everything, plan_for
from megackpt.plan.predict import predict
from tests.plan.choose.layer import small_prices, small_problem

(FULL,) = priced(small_prices(), [full_layer("boundaries")])
LAYERS = 4  # of each of three stages


def alike(budget: int, **more: object) -> Problem:
    """Three stages that are alike to the picosecond, without ends."""
    return small_problem(budget, **({"first": End(), "last": End()} | more))


def plain(problem: Problem, item: Item = FULL) -> tuple[Pick, ...]:
    """The same for all layers of all stages."""
    return (Pick((((item,) * LAYERS,),)),) * problem.stages


def chosen(problem: Problem, picks: tuple[Pick, ...] = ()) -> tuple[Pick, ...]:
    """What becomes of these picks where nothing else may be kept."""
    picks = picks or plain(problem)

    def fits(stage: int, pick: Pick) -> bool:
        tried = (*picks[:stage], pick, *picks[stage + 1 :])
        return problem.timeline(problem.division, tried).peak_bytes[stage] <= problem.budget_bytes

    return with_ahead(problem, problem.division, picks, fits, lambda stage, ahead: None)


def aheads(picks: tuple[Pick, ...]) -> list[tuple[int, int]]:
    """Layers that are rebuilt ahead by stage, and the forwards in flight until which (0: always)."""
    return [(pick.units_ahead(0, 0), pick.within) for pick in picks]


def won(problem: Problem, picks: tuple[Pick, ...]) -> float:
    """Seconds of a step."""
    without = tuple(pick.with_ahead(()) for pick in picks)
    return problem.step_seconds(problem.division, without) - problem.step_seconds(problem.division, picks)


def test_the_replay_of_all_stages_but_the_last_goes_out_of_the_way() -> None:
    """With room for all of it the last gradient meets no replay on its way."""
    problem = alike(100_000)
    picks = chosen(problem)
    assert aheads(picks) == [(4, 0), (4, 0), (0, 0)]
    assert won(problem, picks) == pytest.approx(2 * LAYERS * FULL.replay_ps / PICO, rel=1e-9)
    timeline = problem.timeline(problem.division, picks)
    assert timeline.step_seconds == pytest.approx(problem.step_seconds(problem.division, picks))


def test_the_end_of_a_step_is_filled_with_bytes_that_are_free_then() -> None:
    """Stage 0 holds three micro-batches of four layers.  While one or two are in flight, what the others kept is
    enough to rebuild all layers at once, if they kept that much; one byte less, and it is not."""
    item = replace(FULL, kept_bytes=3 * FULL.transient_bytes)
    kept, rebuilt = LAYERS * item.kept_bytes, item.transient_bytes
    least = 11 + 3 * kept + rebuilt
    assert 11 + 2 * kept + LAYERS * rebuilt <= least
    problem = alike(least)
    picks = chosen(problem, plain(problem, item))
    assert problem.timeline(problem.division, picks).peak_bytes[0] == least
    assert aheads(picks) == [(4, 2), (4, 0), (0, 0)]  # stage 1 never holds more than two
    whole = alike(11 + 3 * kept + LAYERS * rebuilt)
    assert aheads(chosen(whole, plain(whole, item)))[0] == (4, 0)
    short = alike(11 + 3 * kept + LAYERS * rebuilt - 1)
    assert aheads(chosen(short, plain(short, item)))[0] == (4, 2)


def test_few_bytes_buy_the_last_layers_of_every_backward() -> None:
    """With one micro-batch no other is in flight: as many layers are rebuilt at once as there is room for."""
    for layers in (2, 3, 4):
        problem = alike(11 + LAYERS * FULL.kept_bytes + layers * FULL.transient_bytes, micro_batches=1)
        picks = chosen(problem)
        assert aheads(picks) == [(layers, 0), (layers, 0), (0, 0)]
        assert won(problem, picks) == pytest.approx(2 * layers * FULL.replay_ps / PICO, rel=1e-9)
        assert max(problem.timeline(problem.division, picks).peak_bytes) == problem.budget_bytes


def test_where_it_wins_nothing_it_is_left_alone() -> None:
    alone = alike(100_000, stages=1, layers=LAYERS)
    assert chosen(alone) == plain(alone)  # nobody waits
    (kept,) = priced(small_prices(), [keep_everything()])
    room = alike(100_000)
    assert chosen(room, plain(room, kept)) == plain(room, kept)  # nothing is replayed
    won_at_most = 2 * LAYERS * FULL.replay_ps / PICO
    for micro_batches, helps in ((100, True), (2000, False)):
        many = alike(100_000, micro_batches=micro_batches)
        assert (won_at_most > HAIR * many.step_seconds(many.division, plain(many))) is helps
        assert (chosen(many) != plain(many)) is helps


def test_what_the_choice_says() -> None:
    problem = alike(200)
    without, choice = choose(problem), choose(problem, Options(ahead=True))
    assert choice.step_seconds < without.step_seconds * (1 - HAIR) and choice.name == "per stage, ahead"
    assert [(c.ahead, c.ahead_within) for (c,) in choice.plan.stages] == aheads(choice.picks)
    assert Plan.from_json(choice.plan.to_json()) == choice.plan
    assert max(choice.timeline.peak_bytes) <= 200


@pytest.mark.parametrize(("cores", "helps"), [(1, False), (2, True), (3, True)])
def test_stages_that_share_one_core_have_no_time_to_fill(cores: int, helps: bool) -> None:
    problem = replace(alike(100_000), speed=lambda busy: min(1.0, cores / busy))
    assert any(pick.ahead for pick in chosen(problem)) is helps


def test_a_calibrated_machine_with_shared_cores_decides() -> None:
    """The same model and budget: with a core for every rank replay ahead is chosen, on one core it is not."""
    model = ModelNumbers.gpt(8, 96, 8, 512, 40)
    layout = Layout.even(8, 4, n=5, micro_batch=2, act_bytes=4, device="cpu")
    own = replace(MACHINES["cpu"], communicator_bytes=0, shared_rates=(1.0,) * 4)
    one = replace(own, shared_rates=(1.0,))
    everything = predict(model, layout, plan_for(layout.pieces, Policy()), own).peak_bytes
    budget = (least_bytes(model, layout, own) + everything) // 2
    options = Options(keep_gathered=False, ahead=True)
    choices = [choose_for(model, layout, machine, budget, options).choice for machine in (own, one)]
    assert [any(pick.ahead for pick in choice.picks) for choice in choices] == [True, False]
    plain = choose_for(model, layout, own, budget, replace(options, ahead=False)).choice.plan
    seconds = [Evaluator(model, layout, own)(plan).pipeline_seconds for plan in (choices[0].plan, plain)]
    assert seconds[0] < seconds[1] * (1 - HAIR)


def test_groups_and_the_layers_after_them() -> None:
    """A group that stands last counts as one, and nothing before it is rebuilt ahead."""
    (group,) = group_items(small_prices(), [2])
    assert [most_units(mixture) for mixture in ((group, group), (group, FULL), (FULL, FULL), ())] == [1, 1, 2, 0]


layouts = st.fixed_dictionaries(
    {
        "layers": st.integers(12, 16),
        "stages": st.integers(2, 4),
        "chunks": st.integers(1, 2),
        "micro_batches": st.integers(1, 9),
        "base_bytes": st.integers(0, 50),
        "transfer_seconds": st.sampled_from([0.0, 1e-4]),
        "schedule": st.sampled_from(["1f1b", "gpipe", "zb-h1"]),
    }
)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(layouts, st.integers(120, 600), st.booleans())
def test_never_slower_never_above_the_budget_and_always_the_same(
    numbers: dict[str, object], budget: int, slots: bool
) -> None:
    chunks = numbers["chunks"] if numbers["schedule"] == "1f1b" else 1
    problem = small_problem(budget, **(numbers | {"chunks": chunks}))
    table, options = Table(layer_items(problem.pricing)), Options(slots=slots)
    try:
        plain = choose(problem, options, table)
    except DoesNotFit:
        return
    ahead = choose(problem, replace(options, ahead=True), table)
    assert ahead == choose(problem, replace(options, ahead=True), table)
    assert max(ahead.timeline.peak_bytes) <= budget
    if any(pick.ahead for pick in ahead.picks):
        assert ahead.step_seconds <= plain.step_seconds * (1 - HAIR)
    else:
        assert ahead.picks == plain.picks
    last = ahead.plan.stages[-1][-1]
    assert last.ahead == 0  # nobody sends it a gradient


@pytest.mark.parametrize(("p", "v", "schedule"), [(4, 1, "1f1b"), (2, 2, "1f1b"), (2, 1, "gpipe")])
def test_more_memory_is_hardly_ever_slower(p: int, v: int, schedule: str) -> None:
    """Predicted bytes within the budget; seconds that the evaluation knows too; and as bytes may go to what is kept or
    to what is ahead, a larger budget may end half a percent above a smaller one, but no more."""
    model = ModelNumbers.gpt(8, 96, 8, 512, 40)
    layout = Layout.even(8, p, v, n=4, micro_batch=2, act_bytes=4, device="cpu", schedule=schedule)
    machine = replace(MACHINES["h100-80gb"], context_bytes=0, communicator_bytes=0, margin_bytes=0)
    options = Options(keep_gathered=False, ahead=True)
    least = least_bytes(model, layout, machine, options)
    most = predict(model, layout, plan_for(layout.pieces, Policy()), machine).peak_bytes
    evaluator, before, used = Evaluator(model, layout, machine), float("inf"), 0
    for part in range(4):
        found = choose_for(model, layout, machine, least + part * (most - least) // 3, options)
        assert found.prediction.peak_bytes <= least + part * (most - least) // 3
        assert evaluator(found.choice.plan).pipeline_seconds == pytest.approx(found.choice.step_seconds, rel=1e-6)
        assert found.choice.step_seconds <= before * 1.005
        before = found.choice.step_seconds
        used += any(pick.ahead for pick in found.choice.picks)
    assert used
