"""Looking at a run does not change it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.layouts import GPT, LLAMA, Flags, Layout, logged, train_all
from tests.pool import run_distributed

DROPOUT = {"hidden-dropout": 0.1, "attention-dropout": 0.1, "eval-iters": 1, "train-iters": 11}
RECOMPUTE: dict[str, Flags] = {
    "none": {},
    "full": {"recompute-granularity": "full", "attention-backend": "unfused"},
}


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize(("flags", "layout"), [(GPT, Layout()), (LLAMA, Layout(tp=2, pp=2, sp=True))], ids=["gpt", "llama-tp2sp-pp2"])
def test_evaluating_often_does_not_change_training(
    flags: Flags, layout: Layout, recompute: str, tmp_path: Path
) -> None:  # RN-08
    flags = flags | DROPOUT | RECOMPUTE[recompute]
    seen = []
    for interval in (5, 1000):
        path = tmp_path / f"{interval}.jsonl"
        more = {"eval-interval": interval, "metrics-file": str(path)}
        run_distributed(train_all, layout.world_size, flags | more, layout)
        assert path.read_text().count("valid_loss") == (3 if interval == 5 else 1)  # after 5, 10 and at the end
        seen.append(logged(path, "iteration", "lm_loss", "grad_norm"))
    assert len(seen[0]) == 11
    assert seen[0] == seen[1]
