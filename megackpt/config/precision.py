"""Number formats."""

from __future__ import annotations

from dataclasses import dataclass

from megackpt.config.checks import one_of

PARAMS_DTYPES = ("fp32", "bf16", "fp64")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """bf16 parameters have fp32 masters and fp32 gradients; fp64 is for proofs."""

    params_dtype: str = "fp32"
    """Type of parameters and activations."""

    def __post_init__(self) -> None:
        one_of("--params-dtype", self.params_dtype, PARAMS_DTYPES)
