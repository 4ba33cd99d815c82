"""The index cache: one builder among many processes, whole entries only, and never more than a convenience."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from megackpt.data.cache import Arrays, cached_arrays, digest
from megackpt.data.gpt_dataset import GPTDataset, SampleFormat
from tests.data_room.tools import numbered, write_documents

KEY = {"what": "test", "n": 3}


def arrays(factor: int = 1) -> Arrays:
    return {"a": np.arange(4) * factor, "b": np.ones((2, 2), dtype=np.int64)}


def forbidden() -> Arrays:
    raise AssertionError("must come from the cache")


def same(a: Arrays, b: Arrays) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def test_built_once_then_read(tmp_path: Path) -> None:
    assert same(cached_arrays(tmp_path, KEY, arrays), arrays())
    assert same(cached_arrays(tmp_path, KEY, forbidden), arrays())
    assert json.loads((tmp_path / digest(KEY) / "entry.json").read_text())["key"] == KEY
    assert sorted(p.name for p in tmp_path.iterdir()) == [digest(KEY), digest(KEY) + ".lock"]


def test_key_order_does_not_matter_and_content_does() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 1, "b": 3})


@pytest.mark.parametrize("damage", ["truncate", "remove", "manifest", "shape"])
def test_a_damaged_entry_is_rebuilt(tmp_path: Path, damage: str) -> None:
    cached_arrays(tmp_path, KEY, arrays)
    entry = tmp_path / digest(KEY)
    if damage == "truncate":
        os.truncate(entry / "a.npy", 130)
    elif damage == "remove":
        (entry / "b.npy").unlink()
    elif damage == "manifest":
        (entry / "entry.json").write_text("{")
    else:
        np.save(entry / "a.npy", np.arange(5))
    assert same(cached_arrays(tmp_path, KEY, arrays), arrays())
    assert same(cached_arrays(tmp_path, KEY, forbidden), arrays())


def test_deleted_and_unwritable_caches_only_cost_time(tmp_path: Path) -> None:
    cached_arrays(tmp_path / "c", KEY, arrays)
    shutil.rmtree(tmp_path / "c")
    assert same(cached_arrays(tmp_path / "c", KEY, arrays), arrays())
    (tmp_path / "file").write_text("not a directory")
    assert same(cached_arrays(tmp_path / "file" / "c", KEY, arrays), arrays())
    assert same(cached_arrays(None, KEY, arrays), arrays())


def test_large_arrays_are_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megackpt.data.cache._MAP_ABOVE_BYTES", 1)
    cached_arrays(tmp_path, KEY, arrays)
    found = cached_arrays(tmp_path, KEY, forbidden)
    assert isinstance(found["a"], np.memmap) and same(found, arrays())


def _hold(path: str, started: object, seconds: float) -> None:
    def slow() -> Arrays:
        started.set()  # type: ignore[attr-defined]
        time.sleep(seconds)
        return arrays()

    cached_arrays(path, KEY, slow)


def test_a_lock_that_stays_held_or_whose_holder_died(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    started = context.Event()
    holder = context.Process(target=_hold, args=(str(tmp_path), started, 60.0))
    holder.start()
    assert started.wait(20)
    begin = time.monotonic()
    assert same(cached_arrays(tmp_path, KEY, lambda: arrays(2), lock_seconds=0.1), arrays(2))  # built in memory
    assert time.monotonic() - begin < 5 and not (tmp_path / digest(KEY)).exists()
    holder.kill()  # the kernel frees the lock
    holder.join(20)
    assert same(cached_arrays(tmp_path, KEY, arrays, lock_seconds=20), arrays())
    assert (tmp_path / digest(KEY)).is_dir()


def _rank(rank: int, directory: str, repeats: int, barrier: object, results: object) -> None:
    """One of several ranks that want the same entry at once; the first one to come is the slow one in turn."""
    out = []
    for repeat in range(repeats):
        barrier.wait(30)  # type: ignore[attr-defined]
        if rank == repeat % 4:
            time.sleep(0.05)
        log = Path(directory) / f"builds-{repeat}"

        def build(log: Path = log, factor: int = repeat + 1) -> Arrays:
            with open(log, "a") as stream:
                stream.write("x")
            time.sleep(0.03)
            return arrays(factor)

        found = cached_arrays(Path(directory) / f"cache-{repeat}", {"repeat": repeat}, build)
        out.append(found["a"].tolist())
    results.put((rank, out))  # type: ignore[attr-defined]


def test_four_ranks_on_a_cold_cache(tmp_path: Path) -> None:
    """DI-02: 20 repeats, one rank late each time; one build each, equal arrays, no error."""
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    ranks = [context.Process(target=_rank, args=(r, str(tmp_path), 20, barrier, results)) for r in range(4)]
    for process in ranks:
        process.start()
    found = [results.get(timeout=60) for _ in ranks]
    for process in ranks:
        process.join(20)
    assert [process.exitcode for process in ranks] == [0] * 4
    assert all(out == [[0, n, 2 * n, 3 * n] for n in range(1, 21)] for _, out in found)
    assert [(tmp_path / f"builds-{n}").read_text() for n in range(20)] == ["x"] * 20


def test_changed_data_is_not_read_from_the_old_entry(tmp_path: Path) -> None:
    form = SampleFormat(4)
    cache = tmp_path / "cache"
    first = GPTDataset(write_documents(tmp_path / "d", numbered([9, 9])), range(2), form, 1, 4, cache)
    texts = [first.text(j).tolist() for j in range(4)]
    second = GPTDataset(write_documents(tmp_path / "d", numbered([4, 14])), range(2), form, 1, 4, cache)
    assert first.fingerprint != second.fingerprint
    again = GPTDataset(write_documents(tmp_path / "d", numbered([9, 9])), range(2), form, 1, 4, cache)
    assert [again.text(j).tolist() for j in range(4)] == texts
    assert len([p for p in cache.iterdir() if p.is_dir()]) == 2
