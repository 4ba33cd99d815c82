"""Every schedule, split and number of chunks trains what one process trains: the grid of the new schedules.

p stages, v chunks a stage, n micro-batches around p; embeddings tied across the first and the last stage, thirteen
layers that nothing divides, and splits that are uneven on purpose.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.layouts import GPT, LLAMA, TOLERANCES, Distance, Flags, Layout, Trace, built, distance, steps
from tests.pool import run_distributed

TINY: Flags = {
    "num-layers": 13,
    "hidden-size": 48,
    "num-attention-heads": 6,
    "ffn-hidden-size": 168,
    "seq-length": 10,
    "vocab-size": 257,
    "micro-batch-size": 1,
    "params-dtype": "fp64",
}
TIED = GPT | TINY | {"max-position-embeddings": 10}
FREE = LLAMA | TINY | {"num-query-groups": 2}
FULL: Flags = {"recompute-granularity": "full"}
ZERO: Flags = {"pipeline-schedule": "zb-h1"}
UNEVEN: list[Flags] = [
    {"decoder-first-pipeline-num-layers": 4},
    {"account-for-embedding-in-pipeline-split": True, "account-for-loss-in-pipeline-split": True},
]


def micro_batch_counts(p: int) -> list[int]:
    return sorted({n for n in (1, p - 1, p, p + 1, 2 * p + 1) if n >= 1})


def _alone(rank: int, world_size: int, model: Flags, counts: list[int], folder: Path) -> None:
    for n in counts:
        steps(built(model | {"global-batch-size": n}), 1, gradients_of=1).save(folder / f"{n}.pt")


def _beside(
    rank: int, world_size: int, layout: Layout, cases: list[tuple[Flags, int]], folder: Path
) -> list[Distance]:
    found = []
    for flags, n in cases:
        trace = steps(built(flags | {"global-batch-size": n}, layout), 1, gradients_of=1)
        found.append(distance(trace, Trace.read(folder / f"{n}.pt")))
    return found


def check(layout: Layout, model: Flags, cases: list[tuple[Flags, int]], folder: Path, timeout: float = 100) -> None:
    """fp64, losses and gradients within 1e-12, every parameter on some rank."""
    run_distributed(_alone, 1, model, sorted({n for _, n in cases}), folder)
    runs = [(model | flags, n) for flags, n in cases]
    found = run_distributed(_beside, layout.world_size, layout, runs, folder, timeout=timeout)
    for number, (_, n) in enumerate(cases):
        for of_rank in found:
            of_rank[number].check(**TOLERANCES["fp64"])
        names = {name for of_rank in found for name in of_rank[number].names}
        assert names == set(Trace.read(folder / f"{n}.pt").grads[0])


def test_a_few(tmp_path: Path) -> None:
    cases = [(FULL | UNEVEN[0], 3), (ZERO | UNEVEN[1], 4), ({"pipeline-schedule": "gpipe"} | FULL, 2)]
    check(Layout(pp=3), TIED, cases, tmp_path)


def test_a_few_with_chunks(tmp_path: Path) -> None:
    check(Layout(pp=3, vp=2), TIED, [(FULL | UNEVEN[0], 4), (UNEVEN[1], 2)], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(("p", "v"), list(itertools.product((2, 3, 4), (1, 2, 3))))
@pytest.mark.parametrize("model", [TIED, FREE], ids=["tied", "untied"])
def test_the_grid(p: int, v: int, model: Flags, tmp_path: Path) -> None:
    kinds = [{}, FULL, *UNEVEN] + ([ZERO, ZERO | FULL | UNEVEN[0]] if v == 1 else [])
    cases = [(flags, n) for flags in kinds for n in micro_batch_counts(p)]
    check(Layout(pp=p, vp=v), model, cases, tmp_path, timeout=300)


@pytest.mark.full
def test_eight_stages(tmp_path: Path) -> None:
    check(Layout(pp=8), TIED, [(ZERO | FULL, 9), (FULL, 5)], tmp_path, timeout=200)


@pytest.mark.full
def test_eight_processes_with_chunks(tmp_path: Path) -> None:
    check(Layout(tp=2, sp=True, pp=4, vp=3), TIED, [(FULL, 5), ({}, 9)], tmp_path, timeout=200)


def _replicated(rank: int, world_size: int, flags: Flags, layout: Layout) -> dict[str, Tensor]:
    trainer = built(flags, layout)
    norms = steps(trainer, 50).norms
    assert min(norms) > trainer.config.optimizer.clip_grad  # clipping was active throughout
    return {record.name: p.detach().clone() for p, record in trainer.parameters if record.shard_dim is None}


@pytest.mark.parametrize("schedule", [ZERO, {"num-virtual-stages-per-pipeline-rank": 2}], ids=["zb-h1", "interleaved"])
def test_replicated_weights_stay_equal_under_clipping(schedule: Flags) -> None:  # TE-06
    """Two tensor-parallel ranks of two stages, bf16, fifty clipped steps: what both hold whole is equal to the bit."""
    flags = TIED | {"num-layers": 4, "params-dtype": "bf16", "clip-grad": 0.01, "global-batch-size": 3}
    flags |= {"train-iters": 50} | schedule
    first, second, third, fourth = run_distributed(_replicated, 4, flags, Layout(tp=2, sp=True, pp=2), timeout=100)
    for a, b in ((first, second), (third, fourth)):
        assert a.keys() == b.keys() and len(a) >= 8
        assert all(torch.equal(a[name], weight) for name, weight in b.items())
