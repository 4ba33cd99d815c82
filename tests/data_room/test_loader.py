"""Who reads which sample, reading ahead, and going on after a stop."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from megackpt.config.batch import BatchConfig
from megackpt.data.dataset import Sample, training_sample
from megackpt.data.gpt_dataset import GPTDataset, SampleFormat
from megackpt.data.loader import MicroBatchLoader
from megackpt.data.position import DataPosition, resume_message
from megackpt.data.sampler import micro_batch_samples, steps_of
from tests.data_room.tools import numbered, write_documents


class Counting:
    """Sample i holds the token i; remembers what was read, and fails at `bad`."""

    fingerprint = "counting"

    def __init__(self, length: int, bad: int = -1, delay_s: float = 0.0) -> None:
        self.length, self.bad, self.delay_s = length, bad, delay_s
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        self.read.append(index)
        time.sleep(self.delay_s * (index % 3))  # later samples may be ready before earlier ones
        if index == self.bad:
            raise OSError(f"sample {index} is unreadable")
        return training_sample(np.array([index, 0]))


def steps(dataset: Counting, b: int, dp: int, consumed: int = 0, batch: int = 8, workers: int = 0) -> list[set[int]]:
    """Samples of every step, over all dp ranks."""
    loaders = [MicroBatchLoader(dataset, batch, b, d, dp, consumed, workers) for d in range(dp)]
    out: list[set[int]] = []
    per_step = batch // (b * dp)
    rows = [[batch["tokens"].ravel().tolist() for batch in loader] for loader in loaders]
    for step in range(len(rows[0]) // per_step):
        found = [i for r in rows for micro in r[step * per_step : (step + 1) * per_step] for i in micro]
        assert len(found) == len(set(found))
        out.append(set(found))
    assert len({len(r) for r in rows}) == 1 and {loader.position for loader in loaders} == {consumed + 8 * len(out)}
    return out


def test_sampler_formula() -> None:
    assert list(micro_batch_samples(100, 24, 2, 1, 2, 3)) == [100 + (1 * 3 + 2) * 2, 111]
    seen = [i for m in range(4) for d in range(3) for i in micro_batch_samples(100, 24, 2, m, d, 3)]
    assert seen == list(range(100, 124))


@pytest.mark.parametrize(
    ("batch", "b", "m", "d", "dp"), [(8, 3, 0, 0, 1), (8, 2, 4, 0, 1), (8, 2, 0, 2, 2), (8, 2, -1, 0, 1)]
)
def test_sampler_refuses_what_does_not_fit(batch: int, b: int, m: int, d: int, dp: int) -> None:
    with pytest.raises(ValueError):
        micro_batch_samples(0, batch, b, m, d, dp)


@pytest.mark.parametrize("workers", [0, 3])
def test_steps_read_the_same_samples_under_every_layout(workers: int) -> None:
    """CK-02, CK-16: dp and micro-batch do not matter, before and after a resume."""
    expected = [set(range(8 * k, 8 * k + 8)) for k in range(5)]
    for b, dp in [(1, 1), (2, 1), (8, 1), (2, 2), (1, 4), (2, 4)]:
        assert steps(Counting(43), b, dp, workers=workers) == expected
        assert steps(Counting(43), b, dp, consumed=16, workers=workers) == expected[2:]


def test_tail_that_is_no_whole_step_is_left_out_on_all_ranks() -> None:
    assert [list(steps_of(n, 0, lambda _: 8)) for n in (7, 15, 16)] == [[], [(0, 8)], [(0, 8), (8, 8)]]
    assert list(steps_of(20, 16, lambda _: 8)) == list(steps_of(10, 16, lambda _: 8)) == []
    data = Counting(15)
    assert steps(data, 2, 2) == [set(range(8))] and max(data.read) == 7


GROWING = BatchConfig(micro_batch_size=2, global_batch_size=12, rampup_batch_size=("4", "4", "30"))


@pytest.mark.parametrize("workers", [0, 3])
def test_a_batch_that_grows(workers: int) -> None:
    """4 samples a step until 15 are consumed, then 8, from 30 on 12; the tail of 5 is left out."""
    starts = [(0, 4), (4, 4), (8, 4), (12, 4), (16, 8), (24, 8), (32, 12), (44, 12)]
    assert list(steps_of(61, 0, GROWING.size_at)) == starts and GROWING.steps(0, 61) == (8, 56)
    for dp, b in ((1, 2), (2, 2), (2, 1), (1, 4)):
        for first in range(len(starts) + 1):  # a resume at every step
            begin = starts[first][0] if first < len(starts) else 56
            loaders = [MicroBatchLoader(Counting(61), GROWING.size_at, b, d, dp, begin, workers) for d in range(dp)]
            for start, size in starts[first:]:
                assert {loader.position for loader in loaders} == {start}
                rows = [next(loader)["tokens"] for _ in range(size // (b * dp)) for loader in loaders]
                assert np.concatenate(rows).ravel().tolist() == list(range(start, start + size))
            for loader in loaders:
                assert loader.position == 56
                with pytest.raises(StopIteration):
                    next(loader)


def test_threads_change_nothing_but_the_time() -> None:
    plain = [b["tokens"].ravel().tolist() for b in MicroBatchLoader(Counting(64), 8, 2)]
    for workers in (1, 2, 5):
        with MicroBatchLoader(Counting(64, delay_s=0.002), 8, 2, num_workers=workers) as loader:
            assert [b["tokens"].ravel().tolist() for b in loader] == plain


def test_position_counts_whole_steps_and_not_what_was_read_ahead() -> None:
    data = Counting(64)
    with MicroBatchLoader(data, 8, 2, num_workers=2) as loader:
        positions = [loader.position]
        for _ in range(9):
            next(loader)
            positions.append(loader.position)
    assert positions == [0, 0, 0, 0, 8, 8, 8, 8, 16, 16]
    assert len(data.read) > 18  # it did read ahead


def test_resume_gives_the_samples_of_the_uninterrupted_run(tmp_path: Path) -> None:
    """CK-01: real data, read ahead, resumed with other dp, micro-batch, workers and a new dataset object."""
    indexed = write_documents(tmp_path / "d", numbered([7, 20, 1, 0, 33]))

    def data(samples: int) -> GPTDataset:
        return GPTDataset(indexed, range(5), SampleFormat(6), 1234, samples)

    whole = [b["tokens"] for b in MicroBatchLoader(data(64), 8, 4)]
    with MicroBatchLoader(data(64), 8, 4, num_workers=2) as loader:
        head = [next(loader)["tokens"] for _ in range(6)]
        state = DataPosition(loader.position, data(1).fingerprint, "d")
    state = DataPosition.from_dict(state.to_dict())
    assert state.consumed_samples == 24 and resume_message(state, data(200).fingerprint, "d") is None
    ranks = [MicroBatchLoader(data(64), 8, 1, d, 2, state.consumed_samples, d) for d in range(2)]
    rows = [[b["tokens"] for b in rank] for rank in ranks]
    tail = [row for pair in zip(*rows, strict=True) for row in pair]
    assert np.concatenate(head + tail).tolist() == np.concatenate(whole).tolist()


def test_other_data_on_resume_is_said() -> None:
    """CK-04."""
    message = resume_message(DataPosition(24, "x", "old"), "y", "new")
    assert message is not None
    for part in ("(new)", "(old)", "sample 24 of the new order", "--finetune"):
        assert part in message


def test_evaluation_does_not_disturb_training() -> None:
    data, other = Counting(64), Counting(64)
    with MicroBatchLoader(data, 8, 2, num_workers=2) as train:
        seen = []
        for batch in train:
            seen += batch["tokens"].ravel().tolist()
            if len(seen) % 16 == 0:
                with MicroBatchLoader(other, 8, 2, num_workers=1) as valid:
                    assert next(valid)["tokens"].ravel().tolist() == [0, 1]
    assert seen == list(range(64))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_comes_out_at_its_batch_and_ends_the_loader(workers: int) -> None:
    loader = MicroBatchLoader(Counting(64, bad=5), 8, 2, num_workers=workers)
    assert [next(loader)["tokens"].ravel().tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(OSError, match="sample 5 is unreadable"):
        next(loader)
    loader.close()
    assert [t for t in threading.enumerate() if t.name.startswith("data_")] == []


def test_threads_end_with_the_loader() -> None:
    def alive() -> int:
        return sum(thread.name.startswith("data_") for thread in threading.enumerate())

    loader = MicroBatchLoader(Counting(64), 8, 2, num_workers=3)
    next(loader)
    assert alive() > 0
    loader.close()
    loader.close()
    assert alive() == 0
    with pytest.raises(StopIteration):
        next(loader)
    dropped = MicroBatchLoader(Counting(64), 8, 2, num_workers=3)
    next(dropped)
    del dropped
    deadline = time.monotonic() + 10
    while alive() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert alive() == 0


def test_reading_ahead_needs_no_shared_memory_and_no_processes() -> None:
    """OP-10: in a container with a small /dev/shm other loaders' processes die of a bus error."""

    def shared() -> set[str]:
        return {path.name for path in Path("/dev/shm").iterdir()} if Path("/dev/shm").is_dir() else set()

    before, children = shared(), len(multiprocessing.active_children())
    with MicroBatchLoader(Counting(64), 8, 2, num_workers=3) as loader:
        for _ in range(9):
            next(loader)
            mine = {name for name in shared() - before if str(os.getpid()) in name}
            assert not mine and len(multiprocessing.active_children()) == children
