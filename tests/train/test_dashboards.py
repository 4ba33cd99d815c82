"""Dashboards of a distributed run."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megackpt.config.checkpoint_folder import saved_directories
from megackpt.config.run import RunConfig
from megackpt.data.indexed_writer import IndexedWriter
from megackpt.mesh.launch import LaunchEnvironment
from megackpt.train.loop import run
from tests.layouts import SMALL_GPT, Flags, Layout, batches_of, built, logged, train_all, words
from tests.pool import ROOT, SINGLE_THREAD, DistributedFailure, run_distributed

SCALARS = {"lm loss", "learning-rate", "grad-norm", "tokens-per-second", "mem-max-allocated-bytes"}


def messages(run: Path) -> Iterator[bytes]:
    """Messages in a W&B run file, a log in LevelDB's format: blocks of 32 KiB of pieces with a header of 7 bytes."""
    data, message, at = run.read_bytes(), b"", 7  # after the file's own header
    while at < len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        message += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            yield message
            message = b""


def rows(run: Path) -> list[dict[str, str]]:
    """Every logged row: names and JSON values."""
    protocol = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    found = []
    for message in messages(run):
        record = protocol.Record.FromString(message)
        if record.HasField("history"):
            found.append({item.key or "/".join(item.nested_key): item.value_json for item in record.history.item})
    return found


def _offline(rank: int, world_size: int, flags: Flags, layout: Layout) -> None:
    os.environ["WANDB_MODE"] = "offline"
    train_all(rank, world_size, flags, layout)


def test_wandb_offline_has_one_run_with_everything(tmp_path: Path) -> None:  # OP-07
    pytest.importorskip("wandb")
    flags = SMALL_GPT | {
        "wandb-project": "megackpt-tests",
        "wandb-exp-name": "three dimensions",
        "run-dir": str(tmp_path),
        "train-iters": 3,
        "eval-iters": 1,
    }
    run_distributed(_offline, 4, flags, Layout(tp=2, pp=2, sp=True), timeout=100)
    runs = list(tmp_path.rglob("*.wandb"))
    assert len(runs) == 1, runs
    everything = rows(runs[0])
    steps = [row for row in everything if "lm loss" in row]
    assert all(row.keys() >= SCALARS for row in steps)
    assert [(float(row["lm loss"]),) for row in steps] == logged(tmp_path / "metrics.jsonl", "lm_loss")
    assert len(steps) == 3
    assert any("lm loss validation" in row for row in everything)


def _unmasked(rank: int, world_size: int, flags: Flags) -> list[int]:
    return [int(batch["loss_mask"].sum()) for batch in batches_of(built(flags))]


def test_tokens_per_second_leave_masked_tokens_out(tmp_path: Path) -> None:  # MX-06
    with IndexedWriter(tmp_path / "data", np.dtype("<u2")) as writer:
        for document in range(80):
            writer.add([*range(1 + document % 7), 508])
    flags = {key: value for key, value in SMALL_GPT.items() if key not in ("mock-data", "vocab-size")}
    flags |= {"data-path": str(tmp_path / "data"), "split": "1,0,0", "train-iters": 3, "eod-mask-loss": True}
    flags |= {"tokenizer-type": "NullTokenizer", "vocab-size": 508, "metrics-file": str(tmp_path / "log")}
    ((*counts,),) = run_distributed(_unmasked, 1, flags)
    run_distributed(train_all, 2, flags, Layout(dp=2))
    found = [round(rate * seconds) for rate, seconds in logged(tmp_path / "log", "tokens_per_s", "iteration_time_s")]
    assert found == counts[:3] and 0 < max(found) < 4 * 20


def test_a_run_folder_that_cannot_be_written_is_refused_by_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").mkdir()
    with pytest.raises(DistributedFailure, match=rf"UsageError: --run-dir {tmp_path}: Is a directory") as caught:
        run_distributed(train_all, 2, SMALL_GPT | {"run-dir": str(tmp_path)}, Layout(dp=2))
    assert [report.status for report in caught.value.reports] == ["raised"] * 2


def test_pictures_that_cannot_be_drawn_do_not_end_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text("not of this kind\n")
    flags = SMALL_GPT | {"run-dir": str(tmp_path), "train-iters": 1, "device": "cpu"}
    assert run(RunConfig.from_flags(flags), LaunchEnvironment.detect({})) == 0
    _, err = capsys.readouterr()
    assert err.startswith(f"warning: --run-dir {tmp_path}: no pictures: {tmp_path}/metrics.jsonl, line 1: "), err
    assert "Traceback" not in err


def test_a_log_on_a_full_disk_does_not_end_the_run(tmp_path: Path) -> None:
    flags = SMALL_GPT | {"save": str(tmp_path), "train-iters": 2, "log-interval": 1, "device": "cpu"}
    line = [sys.executable, "pretrain_gpt.py", *words(flags)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            line, cwd=ROOT, env={**os.environ, **SINGLE_THREAD}, stdout=full, stderr=subprocess.PIPE, timeout=60
        )
    assert done.returncode == 0
    assert done.stderr == b"warning: standard output: No space left on device; no more lines are printed\n"
    assert list(saved_directories(tmp_path)) == [2]
