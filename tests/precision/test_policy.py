from __future__ import annotations

import pytest
import torch

from megackpt.config.precision import PrecisionConfig
from megackpt.precision import Precision


@pytest.mark.parametrize(
    ("name", "params", "main", "masters", "size"),
    [
        ("fp32", torch.float32, torch.float32, False, 4),
        ("bf16", torch.bfloat16, torch.float32, True, 2),
        ("fp16", torch.float16, torch.float32, True, 2),
        ("fp64", torch.float64, torch.float64, False, 8),
    ],
)
def test_formats(name: str, params: torch.dtype, main: torch.dtype, masters: bool, size: int) -> None:
    precision = Precision.from_config(PrecisionConfig(params_dtype=name))
    assert precision.params_dtype == params
    assert precision.main_grad_dtype == precision.loss_dtype == main
    assert precision.keeps_masters is masters
    assert precision.activation_bytes == size


def test_gradients_in_bf16_are_an_option() -> None:
    precision = Precision.from_config(PrecisionConfig(params_dtype="bf16", grad_reduce_in_bf16=True))
    assert (precision.main_grad_dtype, precision.loss_dtype) == (torch.bfloat16, torch.float32)
