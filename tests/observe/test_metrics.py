"""The metrics file: keys, precision, NaN, resume."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from megackpt.config.errors import UsageError
from megackpt.observe.metrics import MetricsWriter, encode, read_metrics, series
from megackpt.observe.record import EvaluationRecord, IterationRecord, MemoryCounters

BASE = IterationRecord(
    iteration=1,
    train_iters=10,
    consumed_samples=8,
    global_batch_size=8,
    iteration_time_s=1 / 3,
    learning_rate=1e-4 / 3,
    lm_loss=2 / 3 * 10,
    grad_norm=1.1,
    tokens_per_s=960.0000000001,
    saved_activation_bytes=[10, 20],
)


def test_keys_and_full_precision(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.iteration(BASE)
    measured = replace(BASE, iteration=2, peak_activation_bytes=(30, 40), memory=MemoryCounters(5, 6))
    writer.iteration(measured)
    # Visible before close: a run that is killed leaves every finished iteration.
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    writer.close()
    writer.close()
    assert {
        "iteration", "lm_loss", "grad_norm", "learning_rate", "consumed_samples", "iteration_time_s", "tokens_per_s",
        "saved_activation_bytes",
    } <= first.keys()  # fmt: skip
    for key in ("lm_loss", "learning_rate", "iteration_time_s", "tokens_per_s", "grad_norm"):
        assert first[key] == getattr(BASE, key)  # the very same double
    assert first["saved_activation_bytes"] == [10, 20]
    assert "peak_activation_bytes" not in first
    assert second["peak_activation_bytes"] == [30, 40]
    assert second["memory_max_allocated_bytes"] == 6


def test_evaluations_have_valid_loss(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "m.jsonl")
    writer.evaluation(EvaluationRecord(iteration=5, consumed_samples=40, loss=1.5, evaluated_samples=16))
    writer.evaluation(EvaluationRecord(iteration=5, consumed_samples=40, loss=1.75, split="test"))
    writer.close()
    valid, test = read_metrics(tmp_path / "m.jsonl")
    assert (valid["iteration"], valid["valid_loss"], valid["evaluated_samples"]) == (5, 1.5, 16)
    assert valid["valid_ppl"] == math.exp(1.5)
    assert test["test_loss"] == 1.75
    assert "lm_loss" not in valid and "valid_loss" not in test


def test_non_finite_values_are_valid_json_and_survive(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "m.jsonl")
    writer.iteration(replace(BASE, lm_loss=math.nan, grad_norm=math.inf, learning_rate=-math.inf))
    writer.close()
    line = (tmp_path / "m.jsonl").read_text()
    plain = json.loads(line, parse_constant=lambda name: pytest.fail(f"bare {name} in the file"))
    assert plain["lm_loss"] is None
    assert plain["non_finite"] == {"lm_loss": "nan", "grad_norm": "inf", "learning_rate": "-inf"}
    (back,) = read_metrics(tmp_path / "m.jsonl")
    assert math.isnan(back["lm_loss"]) and back["grad_norm"] == math.inf and back["learning_rate"] == -math.inf
    assert "non_finite" not in back


def test_resume_appends_and_later_lines_count(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    for start, loss in ((1, 5.0), (3, 4.0)):
        writer = MetricsWriter(path)
        for i in range(start, start + 3):
            writer.iteration(replace(BASE, iteration=i, lm_loss=loss + i / 100))
        writer.close()
    objects = read_metrics(path)
    assert [o["iteration"] for o in objects] == [1, 2, 3, 3, 4, 5]
    assert series(objects, "lm_loss") == [(1, 5.01), (2, 5.02), (3, 4.03), (4, 4.04), (5, 4.05)]


@pytest.mark.parametrize("torn", ['{"iteration": 2, "lm_lo', "{", '{"iteration": ' + "1" * 200_000])
def test_a_torn_last_line_is_cut(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(encode({"iteration": 1}) + "\n" + torn)
    assert read_metrics(path) == [{"iteration": 1}]
    writer = MetricsWriter(path)
    writer.iteration(replace(BASE, iteration=2))
    writer.close()
    assert [o["iteration"] for o in read_metrics(path)] == [1, 2]


def test_another_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("dear diary")
    with pytest.raises(UsageError, match=r"--metrics-file .*notes exists and is not a metrics file"):
        MetricsWriter(path)
    assert path.read_text() == "dear diary"


def test_unusable_path_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--metrics-file"):
        MetricsWriter(tmp_path / "file" / "m.jsonl")
    with pytest.raises(UsageError, match="--metrics-file"):
        MetricsWriter(tmp_path)


def test_a_full_disk_warns_once_and_does_not_raise() -> None:
    warnings: list[str] = []
    writer = MetricsWriter("/dev/full", warn=warnings.append)
    for i in range(3):
        writer.iteration(replace(BASE, iteration=i))
    writer.close()
    assert warnings[0].startswith("metrics file /dev/full: ") and "no more metrics" in warnings[0]
    assert sum("no more metrics" in w for w in warnings) == 1


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"iteration": 1}\n[1]\n')
    with pytest.raises(ValueError, match=r"m\.jsonl, line 2: not a JSON object"):
        read_metrics(path)
