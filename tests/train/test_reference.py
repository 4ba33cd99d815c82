"""R0 is the model and the training that the textbooks mean: it equals a plain PyTorch loop that shares no code."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests import reference
from tests.layouts import (
    FAMILIES,
    SHAPES,
    STEPS,
    TOLERANCES,
    Distance,
    Flags,
    Trace,
    batches_of,
    built,
    distance,
    rate_of,
    steps,
    whole_weights,
)
from tests.pool import run_distributed


def _beside_plain_loop(rank: int, world_size: int, family: str, flags: Flags) -> tuple[Distance, set[str]]:
    trainer = built(flags)
    weights = whole_weights(trainer)
    batches = list(itertools.islice(batches_of(trainer), STEPS))
    rate = trainer.config.optimizer.lr
    plain = reference.train(weights, batches, SHAPES[family], reference.AdamW(rate))
    expected = Trace([s.loss for s in plain], [s.norm for s in plain], [], [s.grads for s in plain])
    gradients_of = STEPS if trainer.precision.params_dtype == torch.float64 else 1
    return distance(steps(trainer, STEPS, gradients_of=gradients_of), expected), set(expected.grads[0])


@pytest.mark.parametrize("backend", ["fused", "unfused"])
@pytest.mark.parametrize("dtype", ["fp64", "fp32"])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_training_equals_a_plain_loop(family: str, dtype: str, backend: str) -> None:
    flags = FAMILIES[family] | {"params-dtype": dtype, "lr": rate_of(dtype), "attention-backend": backend}
    ((found, names),) = run_distributed(_beside_plain_loop, 1, family, flags)
    assert set(found.names) == names
    found.check(**TOLERANCES[dtype])
