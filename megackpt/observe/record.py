"""One iteration's numbers, made once by the training loop and read by every output."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class MemoryCounters:
    """Memory of one process or device, in bytes, under the names of the dashboards' scalars."""

    allocated: int
    max_allocated: int
    reserved: int | None = None


@dataclass(frozen=True)
class IterationRecord:
    """What one optimizer step did. None: not measured, and left out of every output that allows it."""

    iteration: int
    train_iters: int
    consumed_samples: int
    """Sequences consumed by the run so far, this step included."""
    global_batch_size: int
    iteration_time_s: float
    learning_rate: float
    lm_loss: float | None
    """Mean over the step's unmasked tokens; may be NaN."""
    grad_norm: float | None = None
    """Global norm before clipping."""
    decoupled_learning_rate: float | None = None
    """Of the word embedding and the output layer, where it is another."""
    loss_scale: float = 1.0
    num_zeros: int | None = None
    params_norm: float | None = None
    skipped_iterations: int = 0
    """1 when the optimizer left this step out; a count in a summary."""
    nan_iterations: int = 0
    world_size: int = 1
    tokens_per_s: float | None = None
    """Tokens that carry loss (masked ones excluded) per second, over all devices."""
    tflops_per_device: float | None = None
    """Model FLOPs: nothing that is replayed counts."""
    mfu: float | None = None
    hfu: float | None = None
    replay_overhead: float | None = None
    """Replayed FLOPs as a fraction of the model FLOPs."""
    saved_activation_bytes: Sequence[int] | None = None
    """The engine's count, one entry per rank."""
    peak_activation_bytes: Sequence[int] | None = None
    """Measured, one entry per rank; only on the iterations that measure."""
    memory: MemoryCounters | None = None
    time_left_s: float | None = None


@dataclass(frozen=True)
class EvaluationRecord:
    """The result of one evaluation."""

    iteration: int
    consumed_samples: int
    loss: float
    split: str = "valid"
    """`valid` or `test`."""
    name: str = ""
    """Of the set, where several are evaluated one by one."""
    evaluated_samples: int | None = None
    seconds: float | None = None

    @property
    def perplexity(self) -> float:
        """exp of the loss, capped at exp(20) as in Megatron so that an untrained model does not overflow."""
        return math.exp(min(20.0, self.loss)) if not math.isnan(self.loss) else math.nan


def summarise(records: Sequence[IterationRecord]) -> IterationRecord:
    """One record for the iterations since the last log line, as Megatron averages them.

    Time is the mean, loss the mean over the steps that were neither skipped nor NaN, skipped and NaN steps
    are counted, rates are weighted with time, memory is the maximum, and the rest is the last step's.
    Raises ValueError on an empty sequence.
    """
    if not records:
        raise ValueError("nothing to summarise: no iteration was recorded")
    last = records[-1]
    seconds = sum(r.iteration_time_s for r in records)
    losses = [r.lm_loss for r in records if r.lm_loss is not None]
    advanced = [r.lm_loss for r in records if r.lm_loss is not None and not r.skipped_iterations]
    finite = [x for x in advanced if math.isfinite(x)]

    def rate(name: str) -> float | None:
        known = [(getattr(r, name), r.iteration_time_s) for r in records if getattr(r, name) is not None]
        weight = sum(t for _, t in known)
        return sum(x * t for x, t in known) / weight if weight > 0 else getattr(last, name)

    peaks = [r.peak_activation_bytes for r in records if r.peak_activation_bytes is not None]
    return replace(
        last,
        iteration_time_s=seconds / len(records),
        lm_loss=math.fsum(finite) / len(finite) if finite else (losses[-1] if losses else None),
        skipped_iterations=sum(r.skipped_iterations for r in records),
        nan_iterations=sum(r.nan_iterations for r in records),
        tokens_per_s=rate("tokens_per_s"),
        tflops_per_device=rate("tflops_per_device"),
        mfu=rate("mfu"),
        hfu=rate("hfu"),
        peak_activation_bytes=peaks[-1] if peaks else None,
    )
