"""The order of samples: whatever the layout, and wherever the run was stopped, the global list is the same."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from megackpt.data.build import SampleCounts, build_datasets
from megackpt.data.dataset import Sample, SampleDataset, training_sample
from megackpt.data.gpt_dataset import SampleFormat
from megackpt.data.loader import MicroBatchLoader
from tests.data_room.tools import numbered, write_documents

STEPS, BATCH = 12, 16


class Numbered:
    """Sample i holds its number."""

    fingerprint = "numbered"

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> Sample:
        return training_sample(np.array([index, 0]))


def run(data: SampleDataset, b: int, dp: int, first: int, last: int, workers: int = 0) -> list[list[int]]:
    """Ids (first tokens) of the samples of steps first … last - 1, each step in the order of micro-batch and rank."""
    loaders = [MicroBatchLoader(data, BATCH, b, d, dp, first * BATCH, workers) for d in range(dp)]
    out = []
    for _ in range(first, last):
        step: list[int] = []
        for _ in range(BATCH // (b * dp)):
            for loader in loaders:
                step += next(loader)["tokens"][:, 0].tolist()
        out.append(step)
    assert {loader.position for loader in loaders} == {last * BATCH}
    for loader in loaders:
        loader.close()
    return out


LAYOUTS = [(b, dp) for dp, b in itertools.product((1, 2, 4), (1, 2))]  # accumulation 16 … 2


def test_every_layout_reads_the_same_list() -> None:
    expected = [list(range(BATCH * k, BATCH * k + BATCH)) for k in range(STEPS)]
    for b, dp in LAYOUTS:
        assert run(Numbered(), b, dp, 0, STEPS) == expected, (b, dp)


@pytest.mark.parametrize(("b", "dp"), LAYOUTS)
def test_resumed_at_every_step_under_every_layout(b: int, dp: int) -> None:
    """CK-02, CK-16: stopped after k of 12 steps under one layout, gone on under each of the others."""
    whole = run(Numbered(), 1, 1, 0, STEPS)
    for k in range(STEPS + 1):
        head = run(Numbered(), b, dp, 0, k)
        for other_b, other_dp in LAYOUTS:
            assert head + run(Numbered(), other_b, other_dp, k, STEPS) == whole, (k, other_b, other_dp)


def test_a_blend_on_disk_too(tmp_path: Path) -> None:
    """Real data, several epochs, a blend, threads that read ahead, and a dataset built anew after each stop."""
    write_documents(tmp_path / "a", numbered([7, 20, 1, 0, 33]))
    write_documents(tmp_path / "b", [[t + 1000 for t in d] for d in numbered([9, 5])])
    path = ["3", str(tmp_path / "a"), "1", str(tmp_path / "b")]

    def data() -> SampleDataset:
        return build_datasets(path, "1,0,0", SampleCounts(STEPS * BATCH), SampleFormat(6), 1234).train

    whole = run(data(), 1, 1, 0, STEPS)
    assert {x < 1000 for step in whole for x in step} == {True, False}
    for (b, dp), k in zip(LAYOUTS, (0, 1, 4, 7, 11, 12), strict=True):
        assert run(data(), b, dp, 0, k, 2) + run(data(), 2, 4, k, STEPS, dp) == whole, (b, dp, k)


def ramp(consumed: int) -> int:
    """A global batch that grows from 8 to 16 to 24."""
    return 8 if consumed < 32 else 16 if consumed < 96 else 24


@pytest.mark.parametrize(("b", "dp"), LAYOUTS)
def test_a_growing_batch_reads_the_same_list(b: int, dp: int) -> None:
    """Whatever the size of each step, the samples go on without a gap, and from any step on."""
    bounds = [0]
    while bounds[-1] + ramp(bounds[-1]) <= STEPS * BATCH:
        bounds.append(bounds[-1] + ramp(bounds[-1]))
    for first in (0, 3, 7, len(bounds) - 2):
        loaders = [MicroBatchLoader(Numbered(), ramp, b, d, dp, bounds[first]) for d in range(dp)]
        for low, high in itertools.pairwise(bounds[first:]):
            step = []
            for _ in range((high - low) // (b * dp)):
                for loader in loaders:
                    step += next(loader)["tokens"][:, 0].tolist()
            assert step == list(range(low, high)) and {loader.position for loader in loaders} == {high}
