"""Metrics file: one JSON object per line and iteration, floats in full precision.

JSON has no NaN and no infinity. Such a value is written as null and named in `non_finite`, so that every line
is valid JSON for every reader and nothing is lost:

    {"iteration": 3, "lm_loss": null, ..., "non_finite": {"lm_loss": "nan"}}

Evaluations are objects of their own, with `valid_loss` (or `test_loss`) instead of `lm_loss`. Every line is
flushed when written. A resumed run appends; iterations that it repeats then stand twice, the later line
counts.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from megackpt.config.errors import UsageError
from megackpt.observe.record import EvaluationRecord, IterationRecord

LINE_START = b'{"iteration": '

# Written even when null: readers may rely on the key.
ALWAYS = (
    "iteration", "lm_loss", "grad_norm", "learning_rate", "consumed_samples", "iteration_time_s", "tokens_per_s",
)  # fmt: skip
WHEN_KNOWN = (
    "saved_activation_bytes", "peak_activation_bytes", "global_batch_size", "loss_scale", "num_zeros",
    "params_norm", "skipped_iterations", "nan_iterations", "tflops_per_device", "mfu", "hfu", "replay_overhead",
    "decoupled_learning_rate",
)  # fmt: skip


def iteration_object(record: IterationRecord) -> dict[str, Any]:
    """The object of one iteration, finite or not."""
    values = {key: getattr(record, key) for key in ALWAYS}
    for key in WHEN_KNOWN:
        value = getattr(record, key)
        if value is not None:
            values[key] = list(value) if isinstance(value, Sequence) else value
    if record.memory is not None:
        values["memory_allocated_bytes"] = record.memory.allocated
        values["memory_max_allocated_bytes"] = record.memory.max_allocated
    return values


def evaluation_object(record: EvaluationRecord) -> dict[str, Any]:
    """The object of one evaluation, finite or not."""
    values: dict[str, Any] = {
        "iteration": record.iteration,
        "consumed_samples": record.consumed_samples,
        f"{record.split}_loss": record.loss,
        f"{record.split}_ppl": record.perplexity,
    }
    if record.name:
        values["set"] = record.name
    if record.evaluated_samples is not None:
        values["evaluated_samples"] = record.evaluated_samples
    if record.seconds is not None:
        values["evaluation_time_s"] = record.seconds
    return values


def encode(values: Mapping[str, Any]) -> str:
    """One line of JSON without a newline; top-level NaN and infinities as the module says."""
    plain = dict(values)
    strange = {k: repr(v) for k, v in plain.items() if isinstance(v, float) and not math.isfinite(v)}
    if strange:
        plain.update(dict.fromkeys(strange))
        plain["non_finite"] = strange
    return json.dumps(plain, allow_nan=False)


def decode(line: str) -> dict[str, Any]:
    """The inverse of `encode`. Raises ValueError on a line that is not an object."""
    values = json.loads(line)
    if not isinstance(values, dict):
        raise ValueError(f"not a JSON object: {line[:80]!r}")
    for key, text in values.pop("non_finite", {}).items():
        values[key] = float(text)
    return values


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)


class MetricsWriter:
    """Appends records to a file; to be opened on one rank only."""

    def __init__(self, path: str | os.PathLike[str], warn: Callable[[str], None] = _warn) -> None:
        """Creates missing folders. Raises UsageError when the file cannot be opened for appending."""
        self.path = Path(path)
        self._warn = warn
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _cut_torn_line(self.path)
            self._file: IO[str] | None = self.path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise UsageError(f"--metrics-file {self.path}: {error.strerror or error}") from error

    def iteration(self, record: IterationRecord) -> None:
        self._write(iteration_object(record))

    def evaluation(self, record: EvaluationRecord) -> None:
        self._write(evaluation_object(record))

    def close(self) -> None:
        """May be called more than once."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._warn(f"metrics file {self.path}: {error}")

    def _write(self, values: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(encode(values) + "\n")
        except OSError as error:  # a full disk must not end a run that has weights to save
            self._warn(f"metrics file {self.path}: {error}; no more metrics are written")
            self.close()


def _cut_torn_line(path: Path) -> None:
    """A killed process may leave half a line; appending to it would spoil the next one too.

    Only what we could have written is cut: any other unfinished line means that this is not our file.
    """
    if not path.is_file():
        return
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        keep, tail = end, b""
        while keep > 0:
            start = max(0, keep - 65536)
            file.seek(start)
            block = file.read(keep - start)
            newline = block.rfind(b"\n")
            tail = block[newline + 1 :] + tail
            keep = start + newline + 1
            if newline >= 0:
                break
        if not tail:
            return
        if tail[: len(LINE_START)] != LINE_START[: len(tail)]:
            raise UsageError(f"--metrics-file {path} exists and is not a metrics file; choose another name")
        file.truncate(keep)


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All objects of a metrics file in order; a torn last line is left out.

    Raises ValueError with the line number on any other line that is not a JSON object.
    """
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    objects = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            objects.append(decode(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    return objects


def series(objects: Sequence[Mapping[str, Any]], key: str) -> list[tuple[int, Any]]:
    """(iteration, value) of every object with `key`, by iteration; of a repeated iteration the last."""
    found = {int(o["iteration"]): o[key] for o in objects if o.get(key) is not None}
    return sorted(found.items())
