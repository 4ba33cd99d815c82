"""bf16 and fp16 weights and activations with fp32 gradients and masters: it learns, alike in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.layouts import SMALL_GPT, SMALL_LLAMA, Flags, Layout, logged, relative, train_all
from tests.pool import run_distributed

# A bf16 number has 8 bits: one rounding is 2^-9 of it at most.  Layouts round other partial sums (a product split
# over tensor-parallel ranks is rounded before its parts are added), at random, so a mean over 80 tokens is apart by a
# small part of one rounding.  Measured over 20 steps: 2e-4 of the loss, 1.4e-2 of the gradient norm.
LOSS, NORM = 2**-10, 2**-5


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [(SMALL_GPT, "bf16"), (SMALL_LLAMA, "bf16"), (SMALL_GPT, "fp16")],
    ids=["gpt-bf16", "llama-bf16", "gpt-fp16"],
)
def test_losses_fall_and_equal_one_process_within_rounding(flags: Flags, dtype: str, tmp_path: Path) -> None:
    flags = flags | {"params-dtype": dtype, "train-iters": 20, "lr": 2e-3}
    if dtype == "fp16":
        flags |= {"initial-loss-scale": 4096.0}  # one with which no step is left out
    runs = []
    for layout in (Layout(), Layout(tp=2, pp=2, sp=True)):
        path = tmp_path / f"{layout}.jsonl"
        run_distributed(train_all, layout.world_size, flags | {"metrics-file": str(path)}, layout)
        runs.append(logged(path, "lm_loss", "grad_norm"))
    alone, spread = runs
    for (loss, norm), (expected_loss, expected_norm) in zip(spread, alone, strict=True):
        assert relative(loss, expected_loss) <= LOSS
        assert relative(norm, expected_norm) <= NORM
    assert alone[-1][0] < 0.85 * alone[0][0]
