"""The learning rate as a pure function of the number of samples consumed so far.

::

    samples           0 ──────▶ warm-up ──────────────────▶ decay ─────▶
    rate  lr_warmup_init ─line─▶ lr ──cosine, line, ...───▶ min_lr (constant: lr)

Megatron's meaning: `lr_decay_iters` (default: the length of the run) includes the warm-up,
`lr_warmup_fraction` is a fraction of it, and everything is counted in samples, so that iterations mean the
same with any batch.  The rate of a step is that of the samples consumed *before* it: with a warm-up from 0
the first step has rate 0.

The word embedding and the output layer may have a rate of their own (`--decoupled-lr`) on the same schedule.

As nothing is remembered, a resumed run needs only its consumed samples and cannot advance twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megackpt.config.batch import BatchConfig
from megackpt.config.checks import one_of
from megackpt.config.errors import UsageError
from megackpt.config.optimizer import DECAY_STYLES, WSD_STYLES, OptimizerConfig
from megackpt.config.schedule import TrainConfig


@dataclass(frozen=True)
class Rates:
    """Of one step.  `decoupled` is that of the word embedding and the output layer, None if theirs is no other."""

    rate: float
    decoupled: float | None = None


@dataclass(frozen=True)
class LearningRate:
    """`LearningRate(...)(consumed_samples)` are the rates of the next step."""

    peak: float
    minimum: float
    initial: float
    """rate at sample 0 if there is a warm-up"""
    warmup_samples: float
    """may be fractional (from a fraction of the decay), as in Megatron"""
    decay_samples: int
    """including the warm-up"""
    style: str = "cosine"
    last_samples: int = 0
    """of the phase in which a WSD schedule decays"""
    last_style: str = "exponential"
    decoupled_peak: float | None = None
    decoupled_minimum: float = 0.0

    def __post_init__(self) -> None:
        one_of("--lr-decay-style", self.style, DECAY_STYLES)
        one_of("--lr-wsd-decay-style", self.last_style, WSD_STYLES)
        if not 0 <= self.warmup_samples < self.decay_samples:
            raise UsageError(
                f"the learning rate's warm-up ({self.warmup_samples:g} samples) must end before its decay "
                f"({self.decay_samples} samples): lower --lr-warmup-iters, --lr-warmup-samples or "
                "--lr-warmup-fraction, or raise --lr-decay-iters or --lr-decay-samples"
            )

    @classmethod
    def from_config(cls, optimizer: OptimizerConfig, train: TrainConfig, batch: BatchConfig) -> LearningRate:
        """The schedule of a run; raises UsageError if the warm-up is not shorter than the decay."""
        if train.train_samples is not None:
            decay = optimizer.lr_decay_samples or train.train_samples
            warmup: float = optimizer.lr_warmup_samples
            last = optimizer.lr_wsd_decay_samples or 0
        else:
            assert train.train_iters is not None  # exactly one of the two is given
            decay = (optimizer.lr_decay_iters or train.train_iters) * batch.global_batch_size
            warmup = optimizer.lr_warmup_iters * batch.global_batch_size
            last = (optimizer.lr_wsd_decay_iters or 0) * batch.global_batch_size
        if optimizer.lr_warmup_fraction is not None:
            warmup = optimizer.lr_warmup_fraction * decay
        return cls(
            peak=optimizer.lr,
            minimum=optimizer.min_lr,
            initial=optimizer.lr_warmup_init,
            warmup_samples=warmup,
            decay_samples=decay,
            style=optimizer.lr_decay_style,
            last_samples=last,
            last_style=optimizer.lr_wsd_decay_style,
            decoupled_peak=optimizer.decoupled_lr,
            decoupled_minimum=optimizer.decoupled_min_lr or 0.0,
        )

    def resumed(self, saved: Mapping[str, Any], *, use_saved: bool, override: bool) -> LearningRate:
        """The schedule of a run that goes on from a checkpoint, where it was `saved` (`dataclasses.asdict`).

        `override`: this one, from the flags.  `use_saved`: the checkpoint's.  Neither: they must agree.

        Raises:
            UsageError: they differ and neither was said to win.
        """
        if override:
            return self
        if use_saved:
            return LearningRate(**saved)
        own = asdict(self)
        idle = {"minimum", "decay_samples", "decoupled_minimum"} if self.style == "constant" else set()
        idle |= {"last_samples", "last_style"} if self.style != "WSD" else set()
        different = [f"{k} {saved.get(k)} -> {own[k]}" for k in own if k not in idle and saved.get(k) != own[k]]
        if different:
            raise UsageError(
                f"the learning-rate schedule differs from the checkpoint's: {', '.join(different)}. Choose "
                "--override-opt_param-scheduler (the flags win) or --use-checkpoint-opt_param-scheduler."
            )
        return self

    def __call__(self, consumed_samples: int) -> Rates:
        """Rates of a step that starts after `consumed_samples` samples."""
        decoupled = None
        if self.decoupled_peak is not None:
            decoupled = self._at(consumed_samples, self.decoupled_peak, self.decoupled_minimum)
        return Rates(self._at(consumed_samples, self.peak, self.minimum), decoupled)

    def _at(self, consumed: int, peak: float, minimum: float) -> float:
        if self.warmup_samples > 0 and consumed <= self.warmup_samples:
            return self.initial + (peak - self.initial) * consumed / self.warmup_samples
        if self.style == "constant":
            return peak
        if consumed > self.decay_samples:
            return minimum
        if self.style == "inverse-square-root":
            return max(minimum, peak * math.sqrt(max(self.warmup_samples, 1) / max(consumed, 1)))
        if self.style == "WSD":
            start = self.decay_samples - self.last_samples
            left = 1.0 if consumed <= start else _left(self.last_style, (consumed - start) / self.last_samples)
        else:
            left = _left(self.style, (consumed - self.warmup_samples) / (self.decay_samples - self.warmup_samples))
        return minimum + left * (peak - minimum)


def _left(style: str, done: float) -> float:
    """Share of the way from the minimum to the peak that is left when `done` of a decay is over."""
    match style:
        case "linear":
            return 1.0 - done
        case "exponential":
            return 2.0 * 0.5**done - 1.0
        case "minus_sqrt":
            return 1.0 - math.sqrt(done)
    return 0.5 * (math.cos(math.pi * done) + 1.0)
