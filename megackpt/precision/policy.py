"""The dtype of every kind of value, derived from the one that a user chooses: that of the parameters.

=======================  =====  =====  =====  =====
parameters                fp32   bf16   fp16   fp64
=======================  =====  =====  =====  =====
activations               fp32   bf16   fp16   fp64
sums over tp ranks        fp32   bf16   fp16   fp64
statistics of norms       fp32   fp32   fp32   fp64
softmax of attention      fp32   fp32¹  fp32¹  fp64
softmax and sums of loss  fp32   fp32   fp32   fp64
main gradient             fp32   fp32²  fp32   fp64
master weight              –     fp32   fp32    –
Adam moments              fp32   fp32   fp32   fp64
=======================  =====  =====  =====  =====

¹ with `--attention-softmax-in-fp32` (the default; the fused core always does so)
² bf16 with `--grad-reduce-in-bf16`

Steps compute in their own format inside and hand on the activations' format, so that a replay, which calls the same
function, meets the same roundings.  The main gradient is fp32 unless told otherwise: bf16 has 8 bits of mantissa, so a
sum over 64 micro-batches of equal gradients would stop growing long before its end.  fp64 is for proofs (layouts
compared to 1e-12).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megackpt.config.precision import PrecisionConfig

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Format for sums and losses over values of `dtype`: fp64 for fp64, otherwise fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Precision:
    """Formats of a run.  Activations have the parameters' format."""

    params_dtype: torch.dtype
    main_grad_dtype: torch.dtype
    """Format in which the gradients of a step are summed, reduced and clipped."""

    @classmethod
    def from_config(cls, config: PrecisionConfig) -> Precision:
        """The formats that follow from the settings (which refuse unknown names)."""
        params = _DTYPES[config.params_dtype]
        return cls(params, torch.bfloat16 if config.grad_reduce_in_bf16 else wide_dtype(params))

    @property
    def loss_dtype(self) -> torch.dtype:
        return wide_dtype(self.params_dtype)

    @property
    def keeps_masters(self) -> bool:
        """Whether the optimizer updates a wider copy of the parameters instead of the parameters."""
        return self.params_dtype != wide_dtype(self.params_dtype)

    @property
    def activation_bytes(self) -> int:
        """Bytes of one element of an activation."""
        return self.params_dtype.itemsize
