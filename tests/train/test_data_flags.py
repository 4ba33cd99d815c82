"""Data by split through a whole run: each validation set has a loss of its own, and the test its own data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from megackpt.data.indexed_writer import IndexedWriter
from tests.layouts import SMALL_GPT, Flags, Layout, train_all
from tests.pool import run_distributed


def _write(prefix: Path, tokens: range) -> str:
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        for first in range(30):
            writer.add([tokens[(first * 7 + i) % len(tokens)] for i in range(25)])
    return str(prefix)


def test_each_validation_set_is_evaluated_on_its_own(tmp_path: Path) -> None:
    given = {key: value for key, value in SMALL_GPT.items() if key != "mock-data"}
    flags: Flags = given | {
        "train-data-path": ["2", _write(tmp_path / "a", range(200)), "1", _write(tmp_path / "a2", range(100, 300))],
        "valid-data-path": [_write(tmp_path / "near", range(200)), _write(tmp_path / "far", range(300, 500))],
        "test-data-path": [_write(tmp_path / "t", range(200))],
        "multiple-validation-sets": True,
        "train-iters": 4,
        "eval-interval": 2,
        "eval-iters": 2,
        "metrics-file": str(tmp_path / "log.jsonl"),
    }
    run_distributed(train_all, 2, flags, Layout(pp=2))
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    valid = [(line["iteration"], line["set"]) for line in lines if "valid_loss" in line]
    assert valid == [(2, "near"), (2, "far"), (4, "near"), (4, "far")]
    losses = {line["set"]: line["valid_loss"] for line in lines if "valid_loss" in line}
    assert losses["near"] < losses["far"] - 0.05  # tokens 300 to 499 never occur in training
    (test,) = [line for line in lines if "test_loss" in line]
    assert test["iteration"] == 4 and "set" not in test and test["test_loss"] < losses["far"] - 0.05
