"""What ranks cost each other: found again where it is known, and measured by real ranks.  Nothing is timed."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from megackpt.mesh.device import DeviceSeam
from megackpt.plan.accelerators import MACHINES
from megackpt.plan.paces import Company, Overheads
from megackpt.train import rank_times
from megackpt.train.build import build
from megackpt.train.rank_times import Said, Taken, company_of, runs, solved, work_and_messages
from tests.pool import run_distributed

HOST = replace(
    MACHINES["cpu"], overheads=Overheads(action_s=1e-4, step_s=1e-3, parameter_s=1e-9),
    shared_rates=(1.0, 0.98, 0.65, 0.48),
)  # fmt: skip


COMPANIES = (
    Company(2, 1.0, 2e-4, 3e-4, 1.3e-3), Company(4, 1.2, 4e-4, 1.5e-3, 9e-4), Company(4, 1.5, 0.0, 0.0, 2e-3),
)  # fmt: skip


@pytest.mark.parametrize("company", COMPANIES)
def test_what_made_the_runs_so_long_is_found(company: Company) -> None:
    """Runs that take what the planner says of them in known company."""
    made, taken = runs(company.ranks), []
    for run, vocab in zip(made, (384, 1536, 384), strict=True):
        said = Said(HOST, run, vocab)
        ends = 4 * (company.ranks - 1)
        processors = company.slowdown * said.work(company) + ends * company.message_s
        taken.append(Taken(said.short(company), said.long(company), processors, vocab))
    found = company_of(HOST, made, taken)
    assert found.ranks == company.ranks
    got, there = list(vars(found).values())[1:], list(vars(company).values())[1:]
    assert got == pytest.approx(there, rel=0.01, abs=2e-6)


def test_runs_that_were_quicker_than_said_cost_nothing() -> None:
    made = runs(2)
    nothing = Company(2, 1.0, 0.0, 0.0, 0.0)
    taken = [Taken(1e-6, 2e-6, 1e-7, 640) for _ in made]
    found = company_of(HOST, made, taken)
    assert found.slowdown == 1.0 and max(list(vars(found).values())[2:]) < 2e-7
    assert replace(found, message_s=0.0, message_latency_s=0.0, collective_s=0.0) == nothing


def test_work_is_told_from_messages() -> None:
    assert work_and_messages([0.01, 0.07], [0.012 + 0.004, 0.084 + 0.004], 4) == pytest.approx((1.2, 0.001))
    assert work_and_messages([0.01, 0.07], [0.009 + 0.002, 0.063 + 0.002], 2)[0] == 1.0  # never quicker than alone
    slowdown, message_s = work_and_messages([0.01, 0.07], [0.011, 0.091], 4)  # the small one slowed down less
    assert message_s == 0.0 and 1.1 < slowdown < 1.3


def test_where_a_rising_function_gets_to() -> None:
    assert solved(lambda x: 3 * x + 1, 1.6) == pytest.approx(0.2, rel=2e-3)
    assert solved(lambda x: x + 5, 1.0) == 0.0


TINY = {"hidden-size": 24, "num-attention-heads": 6, "ffn-hidden-size": 84, "seq-length": 10, "vocab-size": 257}


def _taken(rank: int, world_size: int) -> list[Taken]:
    seam = DeviceSeam("cpu", torch.device("cpu"), "gloo")
    with mock.patch.object(rank_times, "RUN_S", 0.0), mock.patch.object(rank_times, "AT_ONCE", 2), \
            mock.patch.object(rank_times, "SIZES", [TINY] * 3):
        return [rank_times._taken(run, build(run.config(run.long), seam)) for run in runs(world_size)[::2]]


def test_real_ranks_are_measured() -> None:
    """Both ranks hear of the processors of both; a long step takes longer than a short one."""
    mine, other = run_distributed(_taken, 2)
    for first, second in zip(mine, other, strict=True):
        assert first.processors == second.processors > 0 and first.vocab == second.vocab
        assert 0 < first.short < first.long
