"""The rates that a run prints are those of the products that it really multiplies."""

from __future__ import annotations

from pathlib import Path

import pytest

from megackpt.train.loop import train
from tests.layouts import GPT, LLAMA, Flags, Layout, built, logged
from tests.pool import run_distributed
from tests.recompute.probes import Products, flops

ONE_STEP: Flags = {"train-iters": 1, "attention-backend": "unfused", "peak-tflops": 2.0}
MODELS: dict[str, Flags] = {
    "mha": GPT | ONE_STEP,
    "gqa": LLAMA | ONE_STEP,
    "gqa, heads of 16": LLAMA | ONE_STEP | {"kv-channels": 16, "num-query-groups": 2},
}
POLICIES: dict[str, Flags] = {
    "none": {},
    "selective": {"recompute-granularity": "selective"},
    "mlp": {"recompute-granularity": "selective", "recompute-modules": ["core_attn", "mlp"]},
    "full": {"recompute-granularity": "full"},
    "layer-input": {"recompute-granularity": "full", "recompute-keep": "layer-input"},
}


def _multiplied(rank: int, world_size: int, flags: Flags, layout: Layout) -> int:
    """FLOPs of all matrix products of a run of one step, on this rank."""
    trainer = built(flags, layout)
    with Products() as products:
        train(trainer)
    return flops(products.seen)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *((model, Layout()) for model in MODELS),
        ("gqa", Layout(tp=2, dp=2, sp=True)),
        pytest.param("mha", Layout(tp=2, dp=2, sp=True), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_printed_flops_are_those_of_the_products(model: str, layout: Layout, tmp_path: Path) -> None:  # MX-01
    """Within 1 %: MFU counts what is multiplied without replay, HFU all that is."""
    useful = 0
    for name, policy in POLICIES.items():
        file = tmp_path / f"{name}.jsonl"
        flags = MODELS[model] | policy | {"metrics-file": str(file)}
        multiplied = sum(run_distributed(_multiplied, layout.world_size, flags, layout))
        useful = useful or multiplied
        assert (multiplied > useful) == (name != "none")
        ((rate, mfu, hfu, seconds),) = logged(file, "tflops_per_device", "mfu", "hfu", "iteration_time_s")
        device_seconds = seconds * layout.world_size
        assert rate * 1e12 * device_seconds == pytest.approx(useful, rel=0.01)
        assert mfu * 2e12 * device_seconds == pytest.approx(useful, rel=0.01)
        assert hfu * 2e12 * device_seconds == pytest.approx(multiplied, rel=0.01)
