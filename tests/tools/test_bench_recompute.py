"""The benchmark of recomputation runs, compares what it says it compares, and counts what can be counted by hand.

Times are not looked at.  Quick shapes: L layers, s sequence, b micro-batch, h hidden.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.pool import run_distributed
from tools import bench_recompute_tp as tp
from tools.bench_recompute import QUICK, main
from tools.bench_regions import REMAT, absent, ways

L, S, B, H = 2, 16, 2, 32
PRODUCTS = B * S * H * H  # one of an [h, h] matrix, in multiply-adds
CORE = 2 * B * S * S * H  # both products of core attention
NONE = 3 * L * 2 * (12 * PRODUCTS + CORE)  # forward once, backward twice
UNIT = 4 * S * B * H


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = tmp_path_factory.mktemp("bench") / "bench.json"
    assert main(["--quick", "--parts", "host", "none", "stack", "--attention", "unfused", "--json", str(path)]) == 0
    return json.loads(path.read_text())


def test_every_way_is_timed(found: Any) -> None:
    names = {way.name for way in ways()}
    assert (REMAT in names) == (absent() == []) and found["absent"] == absent()
    step, trainers, plain = (found["host"][name] for name in ("step", "layer of the trainer", "plain layer"))
    assert set(step["ways"]) == names | {
        "ours: tape, outputs kept", "ours: tape, every other output kept", "ours: tape, own streams only",
    }  # fmt: skip
    assert set(plain["ways"]) == names - {"by hand"}
    assert set(trainers["ways"]) == set(plain["ways"]) | {
        "tape, policy none", "ours: tape, full, boundaries", "ours: tape, full, layer-input",
    }  # fmt: skip


def test_a_tape_that_does_nothing_is_compared_in_pairs(found: Any) -> None:
    measured = found["none"]["measured"]
    low, median, high = measured["quartiles"]
    assert len(measured["ratios"]) == QUICK["none_pairs"] and 0.2 < low <= median <= high < 5.0
    assert measured["plain_ms"] > 0.0


def test_flops_are_those_of_the_products_run_again(found: Any) -> None:
    again = {
        "ours none": 0,
        "ours free": 0,
        "ours selective": CORE,
        "ours full": 7 * PRODUCTS + CORE,
        "ours full, layer-input": 8 * PRODUCTS + CORE,
        "ours, no tape": 0,
        "torch none": 0,
        "torch selective contexts (products saved)": 0,
        "torch checkpoint of core attention": CORE // 2,  # stops before the second product
        "torch checkpoint of layers, non-reentrant": 8 * PRODUCTS + CORE,  # stops before the last product
        "torch checkpoint of layers, reentrant": 12 * PRODUCTS + CORE,
        "plain layers in our checkpoint": 8 * PRODUCTS + CORE,
    }
    if not absent():
        again["torch_remat of layers"] = 12 * PRODUCTS + CORE
    measured = found["stack"]["unfused"]["measured"]
    assert {name: got["flops"] for name, got in measured.items()} == {
        name: NONE + 2 * L * products for name, products in again.items()
    }


def test_bytes_are_those_of_what_is_kept(found: Any) -> None:
    """The stack's input is there before and its output is not kept: of full, a boundary in each layer and the output
    of all but the last; with the layer input alone the latter.  The loss is alive too."""
    measured = found["stack"]["unfused"]["measured"]
    loss = 4
    assert measured["ours full"]["alive_bytes"] == (2 * L - 1) * UNIT + loss
    regions = ("torch checkpoint of layers, non-reentrant", "plain layers in our checkpoint")
    for name in ("ours full, layer-input", *regions):
        assert measured[name]["alive_bytes"] == (L - 1) * UNIT + loss
        assert measured[name]["saved_bytes"] == (L - 1) * UNIT
    assert measured["ours none"]["alive_bytes"] == measured["ours, no tape"]["alive_bytes"]
    assert measured["ours full"]["peak_bytes"] < measured["ours full, layer-input"]["peak_bytes"]


def _counts(rank: int, world_size: int) -> dict[str, tuple[int, float]]:
    job = QUICK["tp_job"]
    assert isinstance(job, tp.Job)
    return {name: (got.collectives, got.flops) for name, got in tp.on_rank(rank, world_size, job).items()}


def test_collectives_of_two_processes() -> None:
    """A layer: 6 gathers and 4 reduce-scatters; the layer input alone replays a reduction, torch's checkpoint both
    gathers as well."""
    for found in run_distributed(_counts, 2, timeout=60):
        calls = {name: collectives for name, (collectives, _) in found.items()}
        assert {name: calls[name] for name in tp.OURS} == {
            "ours, none": 10 * L, "ours, full": 10 * L, "ours, full, layer-input": 11 * L,
        }  # fmt: skip
        assert calls["DTensor, checkpoint of layers"] == calls["DTensor, none"] + 3 * L
        assert found["ours, none"][1] == found["DTensor, none"][1]


@pytest.mark.full
def test_it_starts_its_own_processes(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    assert main(["--quick", "--parts", "tp", "--json", str(path)]) == 0
    assert set(json.loads(path.read_text())["tp"]["measured"]) == {*tp.OURS, *tp.DTENSOR}
