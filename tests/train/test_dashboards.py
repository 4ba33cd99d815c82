"""Dashboards of a distributed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.layouts import GPT, Flags, Layout, logged, train_all
from tests.pool import run_distributed

SCALARS = {"lm loss", "learning-rate", "grad-norm", "tokens-per-second", "mem-max-allocated-bytes"}


def rows(run: Path) -> list[dict[str, str]]:
    """What a W&B run file holds, read with W&B's own reader: names and JSON values of every logged row."""
    datastore = pytest.importorskip("wandb.sdk.internal.datastore")
    from wandb.proto import wandb_internal_pb2

    store, found = datastore.DataStore(), []
    store.open_for_scan(str(run))
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            items = record.history.item
            found.append({item.key or "/".join(item.nested_key): item.value_json for item in items})
    return found


def test_wandb_offline_has_one_run_with_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # OP-07
    pytest.importorskip("wandb")
    flags: Flags = GPT | {
        "wandb-project": "megackpt-tests",
        "wandb-exp-name": "three dimensions",
        "run-dir": str(tmp_path),
        "train-iters": 3,
        "eval-iters": 1,
    }
    run_distributed(_offline, 4, flags, Layout(tp=2, pp=2, sp=True), timeout=100)
    runs = list(tmp_path.rglob("*.wandb"))
    assert len(runs) == 1, runs
    seen = [row for row in rows(runs[0]) if "lm loss" in row]
    assert len(seen) == 3
    for row in seen:
        assert row.keys() >= SCALARS
    losses = [loss for (loss,) in logged(tmp_path / "metrics.jsonl", "lm_loss")]
    assert [float(row["lm loss"]) for row in seen] == losses


def _offline(rank: int, world_size: int, flags: Flags, layout: Layout) -> None:
    import os

    os.environ["WANDB_MODE"] = "offline"
    train_all(rank, world_size, flags, layout)
