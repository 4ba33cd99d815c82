"""A run that was interrupted goes on as if it had not been: weights, optimizer, schedule, random streams and data, to
the bit, in new processes, time after time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megackpt.data.indexed_writer import IndexedWriter
from megackpt.train.build import Trainer
from megackpt.train.checkpoint import load_run, random_state
from megackpt.train.loop import train
from tests.layouts import SMALL_GPT, Flags, Layout, WatchedDataset, built, logged, train_all, words
from tests.pool import ROOT, SINGLE_THREAD, run_distributed, shutdown

DROPOUT = SMALL_GPT | {"hidden-dropout": 0.1, "attention-dropout": 0.1}
WATCHED = ("iteration", "lm_loss", "grad_norm", "learning_rate", "consumed_samples")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of 30 documents, some 70 samples: the runs below go over less than all of them in their first 15 steps."""
    prefix = tmp_path_factory.mktemp("data") / "corpus"
    draw = np.random.default_rng(0)
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        for _ in range(30):
            writer.add(np.cumsum(draw.integers(0, 9, draw.integers(5, 100))) % 509)
    return prefix


def on_data(corpus: Path, folder: Path, name: str) -> Flags:
    """A run over the corpus that saves to and, if there is something, loads from `folder/name`."""
    given = {key: value for key, value in DROPOUT.items() if key != "mock-data"}
    return given | {
        "data-path": str(corpus),
        "data-cache-path": str(folder / "cache"),
        "split": "90,10,0",
        "eval-iters": 1,
        "eval-interval": 4,
        "save": str(folder / name),
        "load": str(folder / name),
        "metrics-file": str(folder / f"{name}.jsonl"),
        "num-workers": 1,
    }


def through_torchrun(flags: Flags, layout: Layout, hash_seed: str) -> None:
    """As a user does it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += [str(layout.world_size), "pretrain_gpt.py", *words(flags | layout.flags)]
    environment = {**os.environ, **SINGLE_THREAD, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def in_new_pool(flags: Flags, layout: Layout, hash_seed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In workers of a template that was started anew."""
    monkeypatch.setenv("PYTHONHASHSEED", hash_seed)
    shutdown()
    run_distributed(train_all, layout.world_size, flags, layout, timeout=100)


def _everything(trainer: Trainer) -> dict[str, torch.Tensor]:
    """All that makes a run what it is on this rank, as the trainer itself holds it."""
    tensors = {f"weight.{record.name}": parameter.detach() for parameter, record in trainer.parameters}
    for kind, by_name in trainer.optimizer.state_tensors().items():
        tensors |= {f"{kind}.{name}": tensor for name, tensor in by_name.items()}
    return {name: tensor.clone() for name, tensor in (tensors | random_state(trainer)).items()}


def _differences(rank: int, world_size: int, flags: Flags, layout: Layout, saves: list[str]) -> list[str]:
    """Names of what differs on this rank between the newest checkpoints of two runs."""
    states = []
    for save in saves:
        trainer = built(flags | {"save": save, "load": save}, layout)
        where = load_run(trainer).position
        counts = torch.tensor([where.iteration, where.consumed_samples, trainer.optimizer.step_count])
        states.append(_everything(trainer) | {"counts": counts})
    one, other = states
    assert set(one) == set(other) and len(one) >= 3 * len(trainer.parameters) + 4
    return [name for name in one if not torch.equal(one[name], other[name])]


def same_at_the_end(flags: Flags, layout: Layout, folder: Path) -> None:
    """The interrupted run has written the numbers, and the last checkpoint, of the run that was not interrupted."""
    whole, parts = (logged(folder / f"{name}.jsonl", *WATCHED) for name in ("whole", "parts"))
    assert [number for number, *_ in whole] == list(range(1, 16))
    assert parts == whole
    saves = [str(folder / name) for name in ("whole", "parts")]
    for differences in run_distributed(_differences, layout.world_size, flags, layout, saves):
        assert differences == []


def test_tensor_and_pipeline_parallel(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """15 steps = 5 + 5 + 5 with a schedule that changes the rate in every one of them."""
    layout = Layout(tp=2, pp=2, sp=True)
    schedule = {"train-iters": 15, "lr-decay-style": "cosine", "lr-warmup-iters": 3, "min-lr": 1e-5}
    more = schedule | {"recompute-granularity": "selective", "attention-backend": "unfused"}
    run_distributed(train_all, 4, on_data(corpus, tmp_path, "whole") | more, layout, timeout=100)
    parts = on_data(corpus, tmp_path, "parts") | more | {"exit-interval": 5}
    run_distributed(train_all, 4, parts, layout, timeout=100)
    shutil.rmtree(tmp_path / "cache")
    in_new_pool(parts, layout, "1", monkeypatch)
    shutil.rmtree(tmp_path / "cache")
    in_new_pool(parts, layout, "2", monkeypatch)
    same_at_the_end(parts, layout, tmp_path)


def test_data_parallel(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of 5, 10 and 15 steps: what a run reads first does not depend on how long it is."""
    layout = Layout(dp=2)
    run_distributed(train_all, 2, on_data(corpus, tmp_path, "whole") | {"train-iters": 15}, layout, timeout=100)
    parts = on_data(corpus, tmp_path, "parts")
    run_distributed(train_all, 2, parts | {"train-iters": 5}, layout, timeout=100)
    shutil.rmtree(tmp_path / "cache")
    through_torchrun(parts | {"train-iters": 10}, layout, hash_seed="3")
    shutil.rmtree(tmp_path / "cache")
    in_new_pool(parts | {"train-iters": 15}, layout, "4", monkeypatch)
    same_at_the_end(parts | {"train-iters": 15}, layout, tmp_path)


@pytest.mark.parametrize(
    ("length", "numbers"),
    [({"train-iters": 6}, [5, 6]), ({"train-samples": 24}, [5, 6, 7, 8])],
    ids=["by-iterations", "by-samples"],
)
def test_a_smaller_global_batch_after_the_resume(length: Flags, numbers: list[int], tmp_path: Path) -> None:
    """4 steps of 4 samples, then steps of 2: more samples were consumed than a whole run of the new batch has."""
    flags = SMALL_GPT | {"load": str(tmp_path / "saved"), "metrics-file": str(tmp_path / "log.jsonl")}
    del flags["train-iters"]
    first = flags | {"train-iters": 4, "save": str(tmp_path / "saved")}
    run_distributed(train_all, 1, first, Layout())
    run_distributed(train_all, 1, flags | length | {"global-batch-size": 2}, Layout())
    seen = logged(tmp_path / "log.jsonl", "iteration", "consumed_samples")[4:]
    assert seen == [(number, 16 + 2 * k) for k, number in enumerate(numbers, start=1)]


# -- random state ----------------------------------------------------------------------------------------------------


def _random_states(
    rank: int, world_size: int, flags: Flags, layout: Layout, folder: str, resume: bool
) -> dict[str, list[Any]]:
    """This rank's random state where the run was saved (or, resumed, right after loading)."""
    trainer = built(flags | {"save": folder, "load": folder}, layout)
    torch.manual_seed((99 if resume else 7) + rank)  # a new process may have drawn anything before it loads
    if resume:
        load_run(trainer)
    else:
        train(trainer)
    return {name: value.tolist() for name, value in random_state(trainer).items()}


def test_every_rank_gets_its_own_random_state_back(tmp_path: Path) -> None:  # RN-04
    layout, folder = Layout(tp=2, dp=2), str(tmp_path / "saved")
    flags = DROPOUT | {"train-iters": 10, "metrics-file": str(tmp_path / "parts.jsonl")}
    first = flags | {"exit-interval": 5}
    before = run_distributed(_random_states, 4, first, layout, folder, False)
    after = run_distributed(_random_states, 4, first, layout, folder, True)
    assert after == before
    assert len({str(state) for state in before}) == 4, "no two ranks stand alike, so that none can pass for another"
    assert all(state["stream.tensor"] != [0] for state in before), "attention dropout has drawn"
    run_distributed(train_all, 4, flags | {"load": folder}, layout)
    whole = flags | {"metrics-file": str(tmp_path / "whole.jsonl")}
    run_distributed(train_all, 4, whole, layout)
    assert logged(tmp_path / "parts.jsonl", *WATCHED) == logged(tmp_path / "whole.jsonl", *WATCHED)


# -- data ------------------------------------------------------------------------------------------------------------


def _samples_read(rank: int, world_size: int, flags: Flags, layout: Layout) -> list[int]:
    trainer = built(flags, layout)
    read: list[int] = []
    object.__setattr__(trainer.datasets, "train", WatchedDataset(trainer.datasets.train, read))
    train(trainer)
    return read


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(pp=2, dp=2)], ids=str)
def test_a_resumed_run_reads_on_where_it_stopped(layout: Layout, corpus: Path, tmp_path: Path) -> None:  # CK-01
    flags = on_data(corpus, tmp_path, "parts") | {"train-iters": 6, "num-workers": 0}
    whole = {key: value for key, value in flags.items() if key not in ("save", "load")}
    expected = run_distributed(_samples_read, layout.world_size, whole, layout)
    first = run_distributed(_samples_read, layout.world_size, flags | {"exit-interval": 2}, layout)
    second = run_distributed(_samples_read, layout.world_size, flags, layout)
    assert [a + b for a, b in zip(first, second, strict=True)] == expected
    # all ranks of a data-parallel index read the same; together the two read every sample once
    by_dp = expected[: layout.dp]
    assert all(read == by_dp[rank % layout.dp] for rank, read in enumerate(expected))
    assert sorted(number for read in by_dp for number in read) == list(range(6 * 4))
