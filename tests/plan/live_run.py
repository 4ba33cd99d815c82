"""Real steps of the trainer under the byte counter, beside what the plan room predicts for them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from megackpt.observe.memory_tracker import MemoryTracker
from megackpt.observe.numbers import model_numbers, split_of
from megackpt.plan.numbers import Layout as PlanLayout
from megackpt.plan.predict import StagePrediction, predict
from megackpt.train.build import Trainer
from megackpt.train.loop import loader
from megackpt.train.step import Stepper
from tests.layouts import Layout, built

REPEATS = 2  # and the least of them: see PatientTracker
WIDE: dict[str, object] = {"hidden-size": 256, "num-attention-heads": 8, "ffn-hidden-size": 1024, "seq-length": 64}


@dataclass(frozen=True)
class Seen:
    """One rank's step."""

    kept: int  # most bytes that its tapes held
    peak: int  # most bytes that the step allocated
    numel: int


class PatientTracker(MemoryTracker):
    """gloo's threads let go of a tensor some time after its collective has ended.  This one waits for them, so that
    what it counts is what the program holds."""

    def __init__(self) -> None:
        super().__init__()
        self._waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._waits:
            self._waits -= 1
            time.sleep(3e-4)
        if func.namespace == "c10d":
            self._waits = 3
        return super().__torch_dispatch__(func, types, args, kwargs)


def layout_of(trainer: Trainer) -> PlanLayout:
    config, shape = trainer.config, trainer.mesh.shape
    return PlanLayout(
        split_of(config),
        t=shape.tp,
        c=shape.cp,
        d=shape.dp,
        n=config.micro_batches,
        micro_batch=config.batch.micro_batch_size,
        sequence_parallel=config.parallel.sequence_parallel,
        act_bytes=trainer.precision.activation_bytes,
        schedule=config.parallel.schedule,
        device="cpu",
        tp_rank=trainer.mesh.tp.index,
    )


def run_cases(
    rank: int, world_size: int, cases: list[Mapping[str, object]], layout: Layout
) -> list[tuple[Seen, StagePrediction]]:
    """A case for `run_distributed`: one step per set of flags, and its prediction for this rank's stage."""
    return [_run(flags, layout) for flags in cases]


def _run(flags: Mapping[str, object], layout: Layout) -> tuple[Seen, StagePrediction]:
    trainer = built(flags, layout)
    stepper = Stepper(trainer)
    stepper.count_bytes = True
    with closing(loader(trainer, trainer.datasets.train, 0)) as batches:
        stepper.accumulate(batches)  # the first step of a process allocates things that stay
        trainer.account.reset_peak()
        peaks = []
        for _ in range(REPEATS):
            with PatientTracker() as tracker:
                stepper.accumulate(batches)
            peaks.append(tracker.peak_bytes)
    seen = Seen(trainer.account.peak, min(peaks), sum(p.numel() for p, _ in trainer.parameters))
    prediction = predict(model_numbers(trainer.config, trainer.vocab), layout_of(trainer), trainer.plan, watched=True)
    return seen, prediction.stages[trainer.mesh.pp.index]
