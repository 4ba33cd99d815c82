"""What a plan costs on a machine: bytes of every stage, seconds of a step, useful and replayed work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megackpt.plan.accelerators import Machine
from megackpt.plan.decision import Plan
from megackpt.plan.flops import utilisation
from megackpt.plan.numbers import Layout, ModelNumbers
from megackpt.plan.predict import STATE, Prediction
from megackpt.plan.schedule import Action
from megackpt.plan.simulate import Timeline
from megackpt.plan.split import split_flags
from megackpt.plan.step_end import StepEnd

FIXED = (*STATE, "communicators", "context", "margin")


@dataclass(frozen=True)
class StageSeconds:
    """One micro-batch through all layers of a stage."""

    forward: float
    backward: float  # without what is replayed for it
    replay: float  # the mean, where micro-batches differ

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.replay

    @property
    def replay_share(self) -> float:
        """Of the stage's time without replay."""
        return self.replay / (self.forward + self.backward)


@dataclass(frozen=True)
class Evaluation:
    """What a plan costs."""

    model: ModelNumbers
    layout: Layout
    machine: Machine
    plan: Plan
    prediction: Prediction
    simulated: Callable[[], Timeline]
    pipeline_seconds: float
    stages: tuple[StageSeconds, ...]
    replay_of: Callable[[int, Action], float]  # (stage, action) -> its seconds of replay
    slot_of: Callable[[int, Action], int]
    bare_seconds: float  # of the pipeline, were nothing replayed
    end: StepEnd
    model_flops: int
    replayed_flops: int

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def peak_bytes(self) -> int:
        return self.prediction.peak_bytes

    @cached_property
    def timeline(self) -> Timeline:
        """Every action of every stage; its bytes include the state."""
        return self.simulated()

    @property
    def idle_seconds(self) -> tuple[float, ...]:
        """By stage: the part of the pipeline's time in which it computes nothing."""
        return tuple(self.pipeline_seconds - self.layout.n * stage.total for stage in self.stages)

    @property
    def bubble_share(self) -> float:
        """Idle time of all stages over their busy time: (p-1)/n for 1F1B on equal stages."""
        return sum(self.idle_seconds) / (self.layout.n * sum(stage.total for stage in self.stages))

    @property
    def reduction_seconds(self) -> float:
        """Exchange of gradients, and of weights where the optimizer is sharded, that nothing hides."""
        return self.end.reduction

    @property
    def optimizer_seconds(self) -> float:
        return self.end.optimizer

    @property
    def step_seconds(self) -> float:
        return self.pipeline_seconds + self.reduction_seconds + self.optimizer_seconds

    @property
    def overhead(self) -> float:
        """Time that replay adds to the pipeline, as a share of it."""
        return self.pipeline_seconds / self.bare_seconds - 1

    @property
    def replays(self) -> bool:
        return any(stage.replay > 0 for stage in self.stages)

    @property
    def devices(self) -> int:
        return self.layout.t * self.layout.c * self.layout.d * self.layout.p

    @property
    def peak_flops(self) -> float:
        """Dense peak of one device in the run's number format."""
        return self.machine.flops_per_s(self.layout.act_bytes) / self.machine.gemm_fraction

    @property
    def mfu(self) -> float:
        """Useful work over what the devices could do; never counts replay."""
        return utilisation(self.model_flops, self.step_seconds, self.devices, self.peak_flops)

    @property
    def hfu(self) -> float:
        """The same with replayed work counted."""
        work = self.model_flops + self.replayed_flops
        return utilisation(work, self.step_seconds, self.devices, self.peak_flops)

    @property
    def tokens_per_s(self) -> float:
        layout = self.layout
        return self.model.seq * layout.micro_batch * layout.n * layout.d / self.step_seconds

    def fits(self, budget_bytes: int) -> bool:
        return self.peak_bytes <= budget_bytes

    def to_json(self, budget_bytes: int) -> dict[str, Any]:
        """Every term of every stage; docs/plan.md describes the fields."""
        rows = []
        ranks = self.devices // self.layout.p
        for row, seconds in zip(self.prediction.stages, self.stages, strict=True):
            rows.append(
                {
                    "ranks": {"first": row.stage * ranks, "count": ranks},
                    "layers": [[piece.start, piece.stop] for piece in self.layout.pieces[row.stage]],
                    **row.to_json(),
                    "slots": max(len(self.plan.slots(row.stage, chunk)) for chunk in range(self.layout.v)),
                    "fits": row.total_bytes <= budget_bytes,
                    "seconds": {"forward": seconds.forward, "backward": seconds.backward, "replay": seconds.replay},
                    "idle_seconds": self.idle_seconds[row.stage],
                }
            )
        return {
            "name": self.name,
            "fits": self.fits(budget_bytes),
            "peak_bytes": self.peak_bytes,
            "step_seconds": self.step_seconds,
            "seconds": {
                "pipeline": self.pipeline_seconds,
                "pipeline_without_replay": self.bare_seconds,
                "data_parallel_reduction": self.reduction_seconds,
                "data_parallel_gradients": self.end.reduce,
                "data_parallel_weights": self.end.gather,
                "optimizer": self.optimizer_seconds,
            },
            "bubble_share": self.bubble_share,
            "overhead": self.overhead,
            "tokens_per_second": self.tokens_per_s,
            "model_flops": self.model_flops,
            "replayed_flops": self.replayed_flops,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "layout": self.layout.to_json(),
            "split_flags": split_flags(self.layout.pieces) or None,
            "stages": rows,
            "plan": self.plan.to_json(),
        }
