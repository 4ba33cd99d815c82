"""Dashboards of a distributed run."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.layouts import SMALL_GPT, Flags, Layout, logged, train_all
from tests.pool import run_distributed

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
