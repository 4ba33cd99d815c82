"""The model over stages: every layer is trained once, whatever the numbers of layers, stages and micro-batches."""

from __future__ import annotations

import pytest

from megackpt.config.errors import UsageError
from megackpt.config.run import RunConfig
from tests.layouts import FAMILIES, GPT, Flags, Layout, built, relative, steps
from tests.pool import run_distributed

SMALL = GPT | {
    "hidden-size": 8,
    "num-attention-heads": 2,
    "ffn-hidden-size": 12,
    "seq-length": 6,
    "vocab-size": 17,
    "make-vocab-size-divisible-by": 1,
}


def _names(rank: int, world_size: int, depths: list[int]) -> tuple[dict[int, list[str]], list[float]]:
    """Parameters of this stage by the model's depth, and the loss of one step at each."""
    names, losses = {}, []
    for depth in depths:
        trainer = built(SMALL | {"num-layers": depth}, Layout(pp=world_size))
        names[depth] = [record.name for _, record in trainer.parameters]
        losses += steps(trainer, 1).losses
    return names, losses


def test_every_layer_is_on_one_stage_or_the_run_is_refused() -> None:  # PP-01
    depths = list(range(1, 13))
    ((whole, losses),) = run_distributed(_names, 1, depths)
    for stages in (2, 3, 4):
        for depth in range(1, stages):
            with pytest.raises(UsageError, match=f"--num-layers {depth} is fewer than"):
                RunConfig.from_flags(SMALL | {"num-layers": depth} | Layout(pp=stages).flags, stages)
        possible = [depth for depth in depths if depth >= stages]
        found = run_distributed(_names, stages, possible)
        for depth in possible:
            names = [name for by_depth, _ in found for name in by_depth[depth]]
            tied = ["embedding.word.weight"]  # also on the last stage, in every cut
            assert sorted(names) == sorted(whole[depth] + tied), (depth, stages)
        assert max(map(relative, found[0][1], losses[stages - 1 :])) <= 1e-6


def _losses(rank: int, world_size: int, flags: Flags, layout: Layout) -> list[float]:
    return steps(built(flags, layout), 2).losses


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_fewer_micro_batches_than_stages(micro_batches: int, family: str) -> None:  # PP-02
    flags = FAMILIES[family] | {"params-dtype": "fp64", "micro-batch-size": 1, "global-batch-size": micro_batches}
    expected = run_distributed(_losses, 1, flags, Layout())[0]
    for losses in run_distributed(_losses, 4, flags, Layout(pp=4), timeout=60):
        assert max(map(relative, losses, expected)) <= 1e-12


def test_a_batch_that_does_not_divide_into_micro_batches_is_refused() -> None:  # PP-06
    with pytest.raises(UsageError) as refused:
        RunConfig.from_flags(GPT | {"micro-batch-size": 3, "global-batch-size": 8} | Layout(pp=2).flags, 2)
    for part in ("--global-batch-size 8", "--micro-batch-size 3", "Nearest valid: --global-batch-size 6 or 9"):
        assert part in str(refused.value)
