"""The log line that people's scripts already grep: Megatron's labels, order, formats and separators.

    [2026-01-01 10:00:00] iteration       10/     100 | consumed samples:           80 | elapsed time ...

Ours follow after Megatron's last field, in the same `label: value |` shape, so a parser that stops there sees
no difference.
"""

from __future__ import annotations

import math
from datetime import datetime

from megackpt.observe.progress import format_duration
from megackpt.observe.record import EvaluationRecord, IterationRecord

BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(count: float) -> str:
    """`count` bytes with three significant digits in the largest binary unit that keeps it at least 1."""
    power = 0
    while abs(count) >= 1000 and power + 1 < len(BYTE_UNITS):  # 1000, not 1024: never four digits
        count /= 1024
        power += 1
    return f"{count:.3g} {BYTE_UNITS[power]}"


def iteration_line(record: IterationRecord, now: datetime, log_throughput: bool = False) -> str:
    """The line for one iteration or for a summary of several (`record.summarise`), without a newline.

    `throughput per GPU` needs `log_throughput`; `num zeros`, `params norm`, `grad norm`, `lm loss` and all of
    ours appear when the record has them.
    """
    fields = [
        f" [{now:%Y-%m-%d %H:%M:%S}] iteration {record.iteration:8d}/{record.train_iters:8d}",
        f"consumed samples: {record.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {record.iteration_time_s * 1e3:.1f}",
    ]
    if log_throughput and record.tflops_per_device is not None:
        fields.append(f"throughput per GPU (TFLOP/s/GPU): {_rate(record.tflops_per_device)}")
    fields.append(f"learning rate: {record.learning_rate:.6E}")
    if record.decoupled_learning_rate is not None:
        fields.append(f"decoupled learning rate: {record.decoupled_learning_rate:.6E}")
    fields.append(f"global batch size: {record.global_batch_size:5d}")
    if record.lm_loss is not None:
        fields.append(f"lm loss: {record.lm_loss:.6E}")
    fields.append(f"loss scale: {record.loss_scale:.1f}")
    if record.grad_norm is not None:
        fields.append(f"grad norm: {record.grad_norm:.3f}")
    if record.num_zeros is not None:
        fields.append(f"num zeros: {record.num_zeros}")
    if record.params_norm is not None:
        fields.append(f"params norm: {record.params_norm:.3f}")
    fields.append(f"number of skipped iterations: {record.skipped_iterations:3d}")
    fields.append(f"number of nan iterations: {record.nan_iterations:3d}")
    return " | ".join(fields + _our_fields(record)) + " |"


def _our_fields(record: IterationRecord) -> list[str]:
    fields = []
    if record.mfu is not None:
        fields.append(f"mfu: {100 * record.mfu:.2f}%")
    if record.hfu is not None:
        fields.append(f"hfu: {100 * record.hfu:.2f}%")
    if record.memory is not None:
        fields.append(f"peak memory: {format_bytes(record.memory.max_allocated)}")
    if record.replay_overhead is not None:
        fields.append(f"replay overhead: {100 * record.replay_overhead:.1f}%")
    if record.tokens_per_s is not None:
        fields.append(f"tokens/s: {record.tokens_per_s:.0f}")
    if record.time_left_s is not None:
        fields.append(f"eta: {format_duration(record.time_left_s)}")
    return fields


def _rate(tflops: float) -> str:
    # One decimal as in Megatron; a CPU's hundredths of a TFLOP/s would all print as 0.0.
    return f"{tflops:.1f}" if tflops >= 10 or not math.isfinite(tflops) else f"{tflops:.4f}"


def evaluation_line(record: EvaluationRecord) -> str:
    """The result of an evaluation in Megatron's shape, without a newline."""
    on_test = " on test set" if record.split == "test" else f" on {record.name}" if record.name else ""
    return (
        f" validation loss at iteration {record.iteration}{on_test} | lm loss value: {record.loss:.6E}"
        f" | lm loss PPL: {record.perplexity:.6E} | "
    )
