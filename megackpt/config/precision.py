"""Number formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megackpt.config.checks import above_zero, at_least, one_of
from megackpt.config.errors import UsageError

BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
"""Of one number, by format."""
PARAMS_DTYPES = tuple(BYTES)


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """16-bit parameters have fp32 masters and fp32 gradients; fp64 is for proofs."""

    params_dtype: str = "fp32"
    """Type of parameters and activations."""
    grad_reduce_in_bf16: bool = False
    """bf16 gradients are summed over micro-batches and ranks in bf16: half the bytes, and small terms are lost."""
    loss_scale: float | None = None
    """Static loss scale; None = dynamic for fp16, 1 for the others."""
    initial_loss_scale: float = 2.0**32
    min_loss_scale: float = 1.0
    loss_scale_window: int = 1000
    """Steps without an overflow after which a dynamic scale doubles."""
    hysteresis: int = 2
    """Overflows that a dynamic scale takes before it halves."""

    def __post_init__(self) -> None:
        one_of("--params-dtype", self.params_dtype, PARAMS_DTYPES)
        if self.grad_reduce_in_bf16 and self.params_dtype != "bf16":
            raise UsageError(
                f"--grad-reduce-in-bf16 contradicts --params-dtype {self.params_dtype}: it is for bf16 parameters."
                " Use --bf16, or leave it out."
            )
        if self.loss_scale is not None:
            above_zero("--loss-scale", self.loss_scale)
        above_zero("--initial-loss-scale", self.initial_loss_scale)
        above_zero("--min-loss-scale", self.min_loss_scale)
        at_least("--loss-scale-window", self.loss_scale_window, 1)
        at_least("--hysteresis", self.hysteresis, 1)
        if self.min_loss_scale > self.initial_loss_scale:
            raise UsageError(
                f"--min-loss-scale {self.min_loss_scale:g} is above --initial-loss-scale {self.initial_loss_scale:g}."
                f" Nearest valid: --min-loss-scale {self.initial_loss_scale:g}."
            )

    @property
    def params_bytes(self) -> int:
        """Of one parameter, or one number of an activation."""
        return BYTES[self.params_dtype]

    @property
    def grad_bytes(self) -> int:
        """Of one number of the main gradients."""
        return 2 if self.grad_reduce_in_bf16 else max(4, self.params_bytes)

    @property
    def dynamic_loss_scale(self) -> bool:
        """The scale follows the overflows."""
        return self.params_dtype == "fp16" and self.loss_scale is None
