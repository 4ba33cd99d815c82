"""Equal groups: the best number of them, their bytes by formula and machine, and the bound on extra work."""
from __future__ import annotations

import pytest

from megackpt.plan.chains import Chain, InfeasibleBudget, run, uniform, uniform_bytes, uniform_plan
from megackpt.plan.chains.uniform import real_optimum


def test_bytes_by_machine() -> None:
    for layers in (1, 2, 7, 12, 30):
        for groups in range(1, layers + 1):
            report = run(Chain.uniform(layers, tape_bytes=17), uniform_plan(layers, groups))
            assert report.peak_bytes == uniform_bytes(layers, groups, 1, 17)
            assert report.extra_forwards == layers - -(-layers // groups)
            assert max(report.forwards) <= 2


def test_at_most_one_extra_forward_whatever_the_groups() -> None:
    for groups in range(1, 97):
        report = run(Chain.uniform(96, tape_bytes=17), uniform_plan(96, groups, keep_last=False))
        assert report.forwards == (2,) * 96


@pytest.mark.parametrize("in_flight", [1, 4])
@pytest.mark.parametrize(("input_bytes", "layer_bytes"), [(1, 1), (1, 17), (2, 34), (3, 10)])
def test_the_optimum_is_that_of_a_full_search(input_bytes: int, layer_bytes: int, in_flight: int) -> None:
    for layers in (1, 5, 24, 96, 100):
        best = min(uniform_bytes(layers, c, input_bytes, layer_bytes, in_flight) for c in range(1, layers + 1))
        found = uniform(layers, input_bytes, layer_bytes, in_flight)
        assert found.bytes == uniform_bytes(layers, found.groups, input_bytes, layer_bytes, in_flight) == best
        sizes = {-(-layers // c): c for c in range(layers, 0, -1)}  # the fewest groups of each size
        for budget in range(best, best * 4, 7):
            fitting = [g for g, c in sizes.items() if uniform_bytes(layers, c, input_bytes, layer_bytes) <= budget]
            if fitting and in_flight == 1:
                found = uniform(layers, input_bytes, layer_bytes, budget=budget)
                assert found.extra_forwards == layers - max(fitting)


def test_the_optimum_is_not_the_square_root_of_the_layers() -> None:
    """A layer's tape is 17 inputs: four times as many groups as sqrt(L), and less than half of the bytes."""
    found = uniform(96, 2, 34)
    assert (round(real_optimum(96, 2, 34), 1), found.groups, found.bytes) == (40.4, 48, 164)
    assert uniform_bytes(96, 10, 2, 34) == 360
    # with n micro-batches in flight, c = sqrt(L A_layer / (n A_in))
    assert (round(real_optimum(96, 2, 34, 8), 1), uniform(96, 2, 34, 8).groups) == (14.3, 16)


def test_a_budget_takes_the_least_work() -> None:
    front = [(budget, uniform(24, 1, 17, budget=budget)) for budget in (43, 60, 100, 250, 409)]
    assert [(u.groups, u.extra_forwards) for _, u in front] == [(24, 23), (8, 21), (5, 19), (2, 12), (1, 0)]
    for budget, found in front:
        report = run(Chain.uniform(24, tape_bytes=17), found.plan(24))
        assert (report.peak_bytes, report.extra_forwards) == (found.bytes, found.extra_forwards)
        assert report.peak_bytes <= budget


def test_several_in_flight_spare_no_group() -> None:
    found = uniform(24, 1, 17, in_flight=3)
    report = run(Chain.uniform(24, tape_bytes=17), found.plan(24, in_flight=3))
    assert report.extra_forwards == found.extra_forwards == 24
    assert report.held_bytes == found.groups + 1  # the groups' inputs and the output


def test_refusals() -> None:
    with pytest.raises(InfeasibleBudget, match="the least feasible budget is 41 bytes") as caught:
        uniform(24, 1, 17, budget=40)
    assert uniform(24, 1, 17, budget=int(caught.value.least)).bytes == 41
    with pytest.raises(ValueError, match="5 groups of 4 layers"):
        uniform_plan(4, 5)
