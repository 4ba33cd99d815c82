"""The planner's prices of our own layers: fitted exactly where they can be, every kind of step measured.  Not timed."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest

from megackpt.observe.calibrate import Figure
from megackpt.plan.accelerators import MACHINES, Machine
from megackpt.plan.paces import Company, Overheads, Pace
from megackpt.train import calibrated, host_times, layer_times
from megackpt.train.layer_times import Seen, fitted
from tests.pool import run_distributed

TINY: tuple[dict[str, object], ...] = tuple(
    {"hidden-size": 12 * k, "num-attention-heads": 6, "ffn-hidden-size": 42 * k, "seq-length": 10 * k,
     "vocab-size": 257}
    for k in (2, 4)
)  # fmt: skip
KINDS = {
    "product", "LayerNorm", "LayerNorm, heads", "RMSNorm", "RMSNorm, heads", "core, fused", "core, math",
    "core, unfused", "gelu", "squared_relu", "swiglu", "rope", "residual", "residual, dropout", "dropout", "lookup",
    "loss",
}  # fmt: skip


@pytest.mark.parametrize("pace", [Pace(3e-6, 2e-11, 5e-10), Pace(4e-6, 0.0, 1e-9), Pace(0.0, 7e-12, 0.0)])
def test_prices_that_explain_everything_are_found(pace: Pace) -> None:
    table = [(4, 10**6, 3000), (13, 2 * 10**8, 40_000), (5, 7 * 10**7, 10**6), (9, 5000, 123_456)]
    got = fitted([Seen(o, f, m, pace.seconds(o, f, m)) for o, f, m in table])
    assert list(vars(got).values()) == pytest.approx(list(vars(pace).values()), rel=1e-9, abs=1e-20)


def test_no_price_is_below_zero() -> None:
    """The larger one is the cheaper one: only operations are left to explain it."""
    got = fitted([Seen(10, 1000, 0, 2e-5), Seen(10, 9000, 0, 1e-5)])
    assert (got.flop_s, got.byte_s) == (0.0, 0.0)
    assert got.op_s == pytest.approx(1.2e-6, rel=1e-9)  # (2 + 1) / (2^2 + 1^2) of a relative error


def test_small_errors_count_as_shares() -> None:
    """One operation of a microsecond and a million of two seconds: both errors weigh alike."""
    got = fitted([Seen(1, 0, 0, 1e-6), Seen(10**6, 0, 0, 2.0)])
    a, b = 1 / 1e-6, 10**6 / 2.0
    assert got.op_s == pytest.approx((a + b) / (a * a + b * b), rel=1e-9)


def _measured(rank: int, world_size: int, machine: Machine) -> tuple[Machine, list[tuple[str, str | None]]]:
    told: list[Figure] = []
    with mock.patch.object(layer_times, "SIZES", TINY), mock.patch.object(host_times, "SIZES", TINY), \
            mock.patch.object(layer_times, "RUN_S", 0.0), mock.patch.object(host_times, "STEPS", 2), \
            mock.patch.object(calibrated, "SIZES", TINY), mock.patch.object(calibrated, "measure_company", _company):
        made = calibrated.with_training(machine, 3, told.append)
    return made, [(figure.name, figure.value if "ranks" in figure.name else None) for figure in told]


def _company(machine: Machine, world: int) -> Company:
    assert machine.kernels and machine.overheads.action_s > 0  # ranks are compared with what one takes
    return Company(world, 1.0 + world / 10, 1e-4, 2e-4, 3e-3)


def test_every_kind_of_step_is_measured() -> None:
    """A step that is the roofline's alone would be priced as if the host did nothing."""
    machine = replace(MACHINES["cpu"], overheads=Overheads(message_byte_s=2e-10))
    ((made, told),) = run_distributed(_measured, 1, machine)
    assert set(made.kernels) == KINDS
    assert all(any(vars(pace).values()) for k in made.kernels.values() for pace in (k.forward, k.backward))
    host = made.overheads
    assert host.message_byte_s == 2e-10 and host.batch_s > 0 and host.parameter_s >= 0
    assert [company.ranks for company in made.companies] == [2, 6]
    assert replace(made, kernels={}, overheads=machine.overheads, companies=()) == machine
    alone = ["kernels", "products in layers", "an action", "a replay", "end of a step"]
    assert told == [(name, None) for name in alone] + [
        ("2 ranks in steps", "x1.20, 100 + 200 us, 3.0 ms"), ("6 ranks in steps", "x1.60, 100 + 200 us, 3.0 ms"),
    ]  # fmt: skip


@pytest.mark.parametrize(("nproc", "worlds"), [(1, []), (2, [2, 4]), (3, [2, 6]), (4, [2, 8]), (64, [2, 8])])
def test_ranks_that_train_together(nproc: int, worlds: list[int]) -> None:
    assert calibrated.worlds(nproc) == worlds
