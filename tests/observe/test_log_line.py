"""The log line, byte for byte, and through the expressions that people grep it with."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from datetime import datetime

import pytest

from megackpt.observe.log_line import evaluation_line, format_bytes, iteration_line
from megackpt.observe.record import EvaluationRecord, IterationRecord, MemoryCounters, summarise

NOW = datetime(2026, 1, 1, 10, 0, 0)
BASE = IterationRecord(
    iteration=10,
    train_iters=100,
    consumed_samples=80,
    global_batch_size=8,
    iteration_time_s=0.5123,
    learning_rate=1.5e-4,
    lm_loss=6.512345,
    grad_norm=1.234,
)


def test_the_documented_line() -> None:
    assert iteration_line(BASE, NOW) == (
        " [2026-01-01 10:00:00] iteration       10/     100 | consumed samples:           80 | elapsed time per"
        " iteration (ms): 512.3 | learning rate: 1.500000E-04 | global batch size:     8 | lm loss: 6.512345E+00"
        " | loss scale: 1.0 | grad norm: 1.234 | number of skipped iterations:   0 | number of nan iterations:"
        "   0 |"
    )


def test_a_decoupled_rate_follows_the_rate_and_the_scale_is_a_number() -> None:
    line = iteration_line(replace(BASE, decoupled_learning_rate=2e-3, loss_scale=2.0**32), NOW)
    assert " | learning rate: 1.500000E-04 | decoupled learning rate: 2.000000E-03 | global batch size:" in line
    assert " | loss scale: 4294967296.0 | " in line


def test_every_field_in_order() -> None:
    full = replace(
        BASE,
        num_zeros=17,
        params_norm=98.7654,
        skipped_iterations=1,
        nan_iterations=2,
        tokens_per_s=1234.5,
        tflops_per_device=123.46,
        mfu=0.4165,
        hfu=0.4512,
        replay_overhead=0.198,
        memory=MemoryCounters(allocated=1, max_allocated=3 * 2**30),
        time_left_s=83.2,
    )
    labels = re.findall(r"\| ([^:|]+):", iteration_line(full, NOW, log_throughput=True))
    assert labels == [
        "consumed samples", "elapsed time per iteration (ms)", "throughput per GPU (TFLOP/s/GPU)", "learning rate",
        "global batch size", "lm loss", "loss scale", "grad norm", "num zeros", "params norm",
        "number of skipped iterations", "number of nan iterations",
        "mfu", "hfu", "peak memory", "replay overhead", "tokens/s", "eta",
    ]  # fmt: skip
    assert iteration_line(full, NOW, log_throughput=True).endswith(
        " | throughput per GPU (TFLOP/s/GPU): 123.5 | learning rate: 1.500000E-04 | global batch size:     8"
        " | lm loss: 6.512345E+00 | loss scale: 1.0 | grad norm: 1.234 | num zeros: 17 | params norm: 98.765"
        " | number of skipped iterations:   1 | number of nan iterations:   2 | mfu: 41.65% | hfu: 45.12%"
        " | peak memory: 3 GiB | replay overhead: 19.8% | tokens/s: 1234 | eta: 0:01:23 |"
    )
    assert "throughput" not in iteration_line(full, NOW)


def test_a_slow_machines_throughput_is_not_zero() -> None:
    line = iteration_line(replace(BASE, tflops_per_device=0.0312), NOW, log_throughput=True)
    assert "throughput per GPU (TFLOP/s/GPU): 0.0312 |" in line


def test_nan_loss_is_printed() -> None:
    assert "| lm loss: NAN |" in iteration_line(replace(BASE, lm_loss=math.nan), NOW)
    assert "lm loss" not in iteration_line(replace(BASE, lm_loss=None), NOW)


def test_common_expressions_match() -> None:
    line = iteration_line(BASE, NOW)
    assert re.search(r"iteration\s+(\d+)/\s*(\d+)", line).groups() == ("10", "100")
    assert re.search(r"lm loss: ([\d.E+-]+)", line)[1] == "6.512345E+00"
    assert re.search(r"elapsed time per iteration \(ms\): ([\d.]+)", line)[1] == "512.3"
    fields = dict(f.strip().rsplit(": ", 1) for f in line.split("|")[1:-1])
    assert float(fields["learning rate"]) == 1.5e-4


def test_validation_line() -> None:
    record = EvaluationRecord(iteration=10, consumed_samples=80, loss=6.1)
    assert evaluation_line(record) == (
        " validation loss at iteration 10 | lm loss value: 6.100000E+00 | lm loss PPL: 4.458578E+02 | "
    )
    on_test = evaluation_line(replace(record, split="test", loss=50.0))
    assert on_test.startswith(" validation loss at iteration 10 on test set | ")
    assert "lm loss PPL: 4.851652E+08" in on_test  # exp(20), Megatron's cap
    assert math.isnan(replace(record, loss=math.nan).perplexity)


def test_summary_averages_as_megatron() -> None:
    def one(**changes: object) -> IterationRecord:
        return replace(BASE, **changes)

    got = summarise(
        [
            one(iteration=1, lm_loss=6.0, iteration_time_s=1.0, mfu=0.4, tokens_per_s=10.0),
            one(iteration=2, lm_loss=9.0, iteration_time_s=2.0, mfu=0.1, tokens_per_s=5.0, skipped_iterations=1),
            one(iteration=3, lm_loss=math.nan, iteration_time_s=1.0, mfu=0.2, tokens_per_s=10.0, nan_iterations=1),
            one(iteration=4, lm_loss=5.0, iteration_time_s=4.0, mfu=0.4, tokens_per_s=2.5, grad_norm=2.0),
        ]
    )
    assert (got.iteration, got.lm_loss, got.iteration_time_s, got.grad_norm) == (4, 5.5, 2.0, 2.0)
    assert (got.skipped_iterations, got.nan_iterations) == (1, 1)
    assert got.tokens_per_s == pytest.approx(40 / 8)
    assert got.mfu == pytest.approx((0.4 + 0.2 + 0.2 + 1.6) / 8)
    assert math.isnan(summarise([one(lm_loss=math.nan)]).lm_loss)
    with pytest.raises(ValueError, match="no iteration"):
        summarise([])


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "0.977 KiB"), (1536, "1.5 KiB"), (2**20, "1 MiB"), (123456789, "118 MiB")],
)
def test_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text
