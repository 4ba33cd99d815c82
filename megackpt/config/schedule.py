"""How long to train, and when to evaluate."""

from __future__ import annotations

from dataclasses import dataclass

from megackpt.config.checks import at_least, one_of
from megackpt.config.errors import UsageError

EXIT_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Exactly one of train_iters and train_samples is given; it decides the unit of the learning-rate schedule."""

    train_iters: int | None = None
    train_samples: int | None = None
    eval_interval: int = 1000
    """Iterations between two evaluations."""
    eval_iters: int = 100
    """Global batches of one evaluation; 0 = none."""
    exit_interval: int | None = None
    """Stop, saving, at an iteration that this divides."""
    exit_duration_minutes: float = 0.0
    """Stop, saving, after the first iteration that ends later than so many minutes after the start; 0 = never."""
    exit_signal_handler: bool = False
    """Stop, saving, after the iteration in which any rank gets ``exit_signal``; else a signal ends a rank at once."""
    exit_signal: str = "SIGTERM"
    seed: int = 1234
    deterministic_mode: bool = False
    """Two runs of the same commands on the same machines are equal to the bit, or the run is refused."""
    max_skipped_iterations: int = 10
    """Steps in a row without finite gradients that end the run; those that lower the loss scale do not count."""
    check_for_nan: bool = True
    """False: no number of such steps ends it."""
    check_replicas_interval: int | None = None
    """Iterations between two comparisons of all copies of parameters and optimizer state; every save compares too."""

    def __post_init__(self) -> None:
        if self.train_iters is not None and self.train_samples is not None:
            raise UsageError(
                f"--train-iters {self.train_iters} and --train-samples {self.train_samples} contradict each other:"
                " give one of them."
            )
        if self.train_iters is None and self.train_samples is None:
            raise UsageError("The length of training is missing: give --train-iters or --train-samples.")
        at_least("--train-iters", self.train_iters, 1)
        at_least("--train-samples", self.train_samples, 1)
        at_least("--eval-interval", self.eval_interval, 1)
        at_least("--eval-iters", self.eval_iters, 0)
        at_least("--exit-interval", self.exit_interval, 1)
        at_least("--exit-duration-in-mins", self.exit_duration_minutes, 0)
        one_of("--exit-signal", self.exit_signal, EXIT_SIGNALS)
        if self.exit_signal != "SIGTERM" and not self.exit_signal_handler:
            raise UsageError(f"--exit-signal {self.exit_signal} needs --exit-signal-handler. Add it, or leave it out.")
        at_least("--max-skipped-iterations", self.max_skipped_iterations, 1)
        at_least("--check-replicas-interval", self.check_replicas_interval, 1)
        at_least("--seed", self.seed, 0)

    @property
    def by_samples(self) -> bool:
        """Training and its schedule are counted in samples."""
        return self.train_samples is not None
