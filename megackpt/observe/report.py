"""Draw a run folder's pictures from its metrics file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megackpt.observe.metrics import read_metrics, series
from megackpt.observe.plots import loss_curve, memory_per_rank

METRICS, LOSS, MEMORY = "metrics.jsonl", "loss.svg", "memory.svg"


def draw_run(
    run_dir: str | os.PathLike[str],
    metrics_file: str | os.PathLike[str] | None = None,
    references: Sequence[tuple[float, str]] = (),
    rank_labels: Sequence[str] | None = None,
) -> list[Path]:
    """Write `loss.svg` and, where activation bytes were recorded, `memory.svg` into `run_dir`.

    `references` are (loss, label) lines of the loss curve. Returns the files written. Raises FileNotFoundError
    without a metrics file, ValueError on a damaged one.
    """
    folder = Path(run_dir)
    objects = read_metrics(metrics_file or folder / METRICS)
    written = [folder / LOSS]
    written[0].write_text(
        loss_curve(series(objects, "lm_loss"), series(objects, "valid_loss"), references), encoding="utf-8"
    )
    history = series(objects, "saved_activation_bytes")
    if history:
        ranks = len(history[-1][1])  # a run resumed at another layout changed the number of ranks
        history = [(x, values) for x, values in history if len(values) == ranks]
        peaks = [values for _, values in series(objects, "peak_activation_bytes") if len(values) == ranks]
        labels = rank_labels if rank_labels is not None and len(rank_labels) == ranks else None
        picture = memory_per_rank(history[-1][1], peaks[-1] if peaks else None, history, labels)
        written.append(folder / MEMORY)
        written[-1].write_text(picture, encoding="utf-8")
    return written
