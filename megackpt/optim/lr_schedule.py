"""The learning rate as a pure function of the number of samples consumed so far.

::

    samples           0 ──────▶ warm-up ─────────────────▶ decay ─────▶
    rate  lr_warmup_init ─line─▶ lr ─cosine, line or flat─▶ min_lr (flat: lr)

Megatron's meaning: `lr_decay_iters` (default: the length of the run) includes the warm-up,
`lr_warmup_fraction` is a fraction of it, and everything is counted in samples, so that iterations mean the
same with any batch.  The rate of a step is that of the samples consumed *before* it: with a warm-up from 0
the first step has rate 0.

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
from megackpt.config.optimizer import DECAY_STYLES, OptimizerConfig
from megackpt.config.schedule import TrainConfig


@dataclass(frozen=True)
class LearningRate:
    """`LearningRate(...)(consumed_samples)` is the rate of the next step."""

    peak: float
    minimum: float
    initial: float
    """rate at sample 0 if there is a warm-up"""
    warmup_samples: float
    """may be fractional (from a fraction of the decay), as in Megatron"""
    decay_samples: int
    """including the warm-up"""
    style: str = "cosine"

    def __post_init__(self) -> None:
        one_of("--lr-decay-style", self.style, DECAY_STYLES)
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
        else:
            assert train.train_iters is not None  # exactly one of the two is given
            decay = (optimizer.lr_decay_iters or train.train_iters) * batch.global_batch_size
            warmup = optimizer.lr_warmup_iters * batch.global_batch_size
        if optimizer.lr_warmup_fraction is not None:
            warmup = optimizer.lr_warmup_fraction * decay
        return cls(
            peak=optimizer.lr,
            minimum=optimizer.min_lr,
            initial=optimizer.lr_warmup_init,
            warmup_samples=warmup,
            decay_samples=decay,
            style=optimizer.lr_decay_style,
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
        idle = {"minimum", "decay_samples"} if self.style == "constant" else set()
        different = [f"{k} {saved.get(k)} -> {own[k]}" for k in own if k not in idle and saved.get(k) != own[k]]
        if different:
            raise UsageError(
                f"the learning-rate schedule differs from the checkpoint's: {', '.join(different)}. Choose "
                "--override-opt_param-scheduler (the flags win) or --use-checkpoint-opt_param-scheduler."
            )
        return self

    def __call__(self, consumed_samples: int) -> float:
        """Rate of a step that starts after `consumed_samples` samples."""
        if self.warmup_samples > 0 and consumed_samples <= self.warmup_samples:
            return self.initial + (self.peak - self.initial) * consumed_samples / self.warmup_samples
        if self.style == "constant":
            return self.peak
        if consumed_samples > self.decay_samples:
            return self.minimum
        done = (consumed_samples - self.warmup_samples) / (self.decay_samples - self.warmup_samples)
        left = 1.0 - done if self.style == "linear" else 0.5 * (math.cos(math.pi * done) + 1.0)
        return self.minimum + left * (self.peak - self.minimum)
