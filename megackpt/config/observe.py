"""What a run reports."""

from __future__ import annotations

from dataclasses import dataclass

from megackpt.config.checks import above_zero, at_least


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Log line, metric files and writers."""

    log_interval: int = 100
    """Iterations between two log lines."""
    log_throughput: bool = False
    log_num_zeros_in_grad: bool = False
    log_params_norm: bool = False
    tensorboard_dir: str | None = None
    wandb_project: str | None = None
    wandb_exp_name: str | None = None
    metrics_file: str | None = None
    """JSON lines, one object per iteration."""
    memory_track_interval: int | None = None
    """Iterations between two measurements of peak activation bytes; None = the second iteration only."""
    run_dir: str | None = None
    """Folder for metrics.jsonl, loss.svg, memory.svg and config.yaml."""
    peak_tflops: float | None = None
    """Dense peak of one device, for MFU; None = known devices only."""

    timeline: str | None = None
    """Folder for the event record of a few iterations."""
    timeline_steps: int = 3
    """Iterations recorded, from the third of the process on."""

    def __post_init__(self) -> None:
        at_least("--log-interval", self.log_interval, 1)
        at_least("--timeline-steps", self.timeline_steps, 1)
        at_least("--memory-track-interval", self.memory_track_interval, 1)
        if self.peak_tflops is not None:
            above_zero("--peak-tflops", self.peak_tflops)
