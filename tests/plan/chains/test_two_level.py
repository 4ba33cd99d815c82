"""Two tiers of slots against the table, every sequence of actions, and the machine."""
from __future__ import annotations

from typing import Any

import pytest

from megackpt.plan.chains import Chain, InfeasibleBudget, Report, binomial, extra_advances, run, two_level
from tests.plan.chains.oracle import figures, least_cost

ROWS: list[dict[str, Any]] = figures()["two_level"]["rows"]


def executed(length: int, ram: int, disk: int, transfer: float) -> Report:
    report = run(Chain.uniform(length), two_level(length, ram, disk, transfer), write_cost=transfer, read_cost=transfer)
    assert report.slots <= ram and report.disk_slots <= disk
    return report


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['length']}-{row['ram']}-{row['disk']}")
def test_the_table(row: dict[str, Any]) -> None:
    report = executed(row["length"], row["ram"], row["disk"], row["transfer"])
    found = (report.extra_forwards, report.writes, report.reads, report.extra_forwards + report.transfer_cost)
    assert found == (row["extra"], row["writes"], row["reads"], row["cost"])


@pytest.mark.parametrize(
    ("length", "ram", "disk", "transfer"),
    [(5, 1, 1, 0.5), (6, 1, 1, 1), (6, 1, 2, 0.25), (6, 0, 2, 1), (6, 2, 1, 0.5), (6, 1, 2, 0)],
)
def test_no_sequence_of_actions_is_better(length: int, ram: int, disk: int, transfer: float) -> None:
    report = executed(length, ram, disk, transfer)
    assert report.extra_forwards + report.transfer_cost == least_cost(length, ram, disk, transfer)


def test_the_ends_are_binomial() -> None:
    assert list(two_level(24, 3, 0, 2.0).rows()) == list(binomial(24, 3).rows())
    assert list(two_level(24, 3, 4, 1000.0).rows()) == list(binomial(24, 3).rows())
    free = executed(30, 2, 3, 0.0)  # transfers for nothing: as good as five slots
    assert free.extra_forwards <= extra_advances(30, 5)


def test_reads_and_writes_may_cost_differently() -> None:
    dear = run(Chain.uniform(24), two_level(24, 2, 3, 0.5, 50.0), write_cost=0.5, read_cost=50.0)
    even = run(Chain.uniform(24), two_level(24, 2, 3, 0.5), write_cost=0.5, read_cost=0.5)
    assert (dear.reads, dear.extra_forwards) == (0, extra_advances(24, 2))
    assert even.reads > 0 and even.extra_forwards < dear.extra_forwards


def test_refusals() -> None:
    with pytest.raises(InfeasibleBudget, match="least feasible budget is 1 slots"):
        two_level(2, 0, 0, 1.0)
    with pytest.raises(ValueError, match="disk=-1"):
        two_level(2, 1, -1, 1.0)
    assert len(two_level(1, 0, 0, 1.0)) == 1
