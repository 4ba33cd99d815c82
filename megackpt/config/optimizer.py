"""The optimizer and its learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass

from megackpt.config.checks import above_zero, at_least, one_of, within
from megackpt.config.errors import UsageError

OPTIMIZERS = ("adam", "sgd")
DECAY_STYLES = ("cosine", "linear", "constant", "inverse-square-root", "WSD")
WSD_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, Adam or SGD.  Schedule lengths are iterations or samples, as training itself is counted."""

    lr: float
    """Learning rate after warm-up."""
    min_lr: float = 0.0
    optimizer: str = "adam"
    weight_decay: float = 0.01
    """Biases and norm weights are exempt."""
    decoupled_weight_decay: bool = True
    """Adam's decay shrinks the weight (AdamW) rather than being added to the gradient.  SGD's is added."""
    sgd_momentum: float = 0.9
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 = no clipping."""
    decoupled_lr: float | None = None
    """Learning rate of the word embedding and the output layer; None = lr."""
    decoupled_min_lr: float | None = None
    """Its min_lr; None = 0 (Megatron's default) where decoupled_lr is given."""
    lr_decay_style: str = "linear"
    lr_decay_iters: int | None = None
    """Iterations until min_lr, warm-up included; None = train_iters."""
    lr_decay_samples: int | None = None
    """The same in samples; None = train_samples."""
    lr_warmup_iters: int = 0
    lr_warmup_samples: int = 0
    lr_warmup_fraction: float | None = None
    """Share of the decay length that is warm-up."""
    lr_warmup_init: float = 0.0
    """Learning rate at the start of warm-up."""
    lr_wsd_decay_style: str = "exponential"
    lr_wsd_decay_iters: int | None = None
    """Iterations of the decay that ends a WSD schedule (warm-up, stable, decay)."""
    lr_wsd_decay_samples: int | None = None
    """The same in samples."""
    use_checkpoint_schedule: bool = False
    """On load, the schedule of the checkpoint wins over these values."""
    override_schedule: bool = False
    """On load, these values win over the schedule of the checkpoint.  (Neither: a difference is an error.)"""

    def __post_init__(self) -> None:
        one_of("--optimizer", self.optimizer, OPTIMIZERS)
        one_of("--lr-decay-style", self.lr_decay_style, DECAY_STYLES)
        at_least("--lr", self.lr, 0)
        at_least("--min-lr", self.min_lr, 0)
        if self.min_lr > self.lr:
            raise UsageError(f"--min-lr {self.min_lr} is above --lr {self.lr}. Nearest valid: --min-lr {self.lr}.")
        at_least("--weight-decay", self.weight_decay, 0)
        within("--sgd-momentum", self.sgd_momentum, 0.0, 1.0)
        within("--adam-beta1", self.adam_beta1, 0.0, 1.0)
        within("--adam-beta2", self.adam_beta2, 0.0, 1.0)
        above_zero("--adam-eps", self.adam_eps)
        at_least("--clip-grad", self.clip_grad, 0)
        self._check_decoupled()
        self._check_schedule()
        self._check_wsd()
        if self.use_checkpoint_schedule and self.override_schedule:
            raise UsageError(
                "--use-checkpoint-opt_param-scheduler and --override-opt_param-scheduler contradict each other:"
                " either the checkpoint's schedule wins or the flags do."
            )

    def _check_decoupled(self) -> None:
        at_least("--decoupled-lr", self.decoupled_lr, 0)
        at_least("--decoupled-min-lr", self.decoupled_min_lr, 0)
        if self.decoupled_min_lr is None:
            return
        if self.decoupled_lr is None:
            raise UsageError(
                f"--decoupled-min-lr {self.decoupled_min_lr} has no effect without --decoupled-lr: add it, or leave"
                " --decoupled-min-lr out."
            )
        if self.decoupled_min_lr > self.decoupled_lr:
            raise UsageError(
                f"--decoupled-min-lr {self.decoupled_min_lr} is above --decoupled-lr {self.decoupled_lr}. Nearest"
                f" valid: --decoupled-min-lr {self.decoupled_lr}."
            )

    def _check_wsd(self) -> None:
        one_of("--lr-wsd-decay-style", self.lr_wsd_decay_style, WSD_STYLES)
        at_least("--lr-wsd-decay-iters", self.lr_wsd_decay_iters, 0)
        at_least("--lr-wsd-decay-samples", self.lr_wsd_decay_samples, 0)
        lengths = {
            "--lr-wsd-decay-iters": self.lr_wsd_decay_iters,
            "--lr-wsd-decay-samples": self.lr_wsd_decay_samples,
        }
        given = {flag: value for flag, value in lengths.items() if value is not None}
        if self.lr_decay_style == "WSD" and not given:
            raise UsageError(
                "--lr-decay-style WSD needs the length of its last phase: --lr-wsd-decay-iters (with --train-iters) or"
                " --lr-wsd-decay-samples (with --train-samples)."
            )
        if self.lr_decay_style != "WSD" and given:
            flag, value = next(iter(given.items()))
            raise UsageError(
                f"{flag} {value} has no effect with --lr-decay-style {self.lr_decay_style}: use --lr-decay-style WSD,"
                f" or leave {flag} out."
            )

    def _check_schedule(self) -> None:
        at_least("--lr-decay-iters", self.lr_decay_iters, 1)
        at_least("--lr-decay-samples", self.lr_decay_samples, 1)
        at_least("--lr-warmup-iters", self.lr_warmup_iters, 0)
        at_least("--lr-warmup-samples", self.lr_warmup_samples, 0)
        at_least("--lr-warmup-init", self.lr_warmup_init, 0)
        if self.lr_warmup_init > self.lr:
            raise UsageError(
                f"--lr-warmup-init {self.lr_warmup_init} is above --lr {self.lr}. Nearest valid: --lr-warmup-init"
                f" {self.lr}."
            )
        if self.lr_warmup_fraction is not None:
            within("--lr-warmup-fraction", self.lr_warmup_fraction, 0.0, 1.0)
            for flag, value in (
                ("--lr-warmup-iters", self.lr_warmup_iters),
                ("--lr-warmup-samples", self.lr_warmup_samples),
            ):
                if value:
                    raise UsageError(
                        f"--lr-warmup-fraction {self.lr_warmup_fraction} and {flag} {value} contradict each other:"
                        " give one of them."
                    )
