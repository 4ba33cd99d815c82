"""Measured against predicted: the peak of a step beside its prediction, and a plan that follows it.

With ``--recompute-adapt`` the plan is chosen again between steps by what was measured.  Of every stage the ratio of
measured to predicted activation bytes is learnt, and the next choice is made as if its predictions were that much
larger or smaller: leaner where the budget would be broken, faster where bytes are left.  Losses and gradients do not
change by a bit, since no plan changes them.

A change costs one choice on one rank, so it is bounded: looks are 2, 4, 8 ... steps apart, a faster plan must be worth
it, and a ratio that once broke the budget never shrinks again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megackpt.mesh.layout import MeshShape
from megackpt.observe.auto import Task
from megackpt.observe.log_line import format_bytes
from megackpt.plan.choose.problem import DoesNotFit
from megackpt.plan.decision import Plan
from megackpt.plan.evaluate import Evaluator
from megackpt.plan.predict import Prediction
from megackpt.train.agree import agree, from_first
from megackpt.train.auto import plan_of_text, predicted

WORTH = 0.002  # of a step: what a faster plan must win
FIRST_LOOK = 2  # iterations after the start; the first one of a process allocates what stays
MOST_CHANGES = 6


@dataclass(frozen=True)
class Peaks:
    """Activation bytes of every stage at its peak: of the rank that had most, and as predicted."""

    measured: tuple[int, ...]
    predicted: tuple[int, ...]

    @staticmethod
    def of(by_rank: Sequence[int], shape: MeshShape, made: Prediction) -> Peaks:
        """``by_rank``: measured, in rank order; a stage's ranks stand together."""
        size = len(by_rank) // shape.pp
        measured = tuple(max(by_rank[stage * size : (stage + 1) * size]) for stage in range(shape.pp))
        return Peaks(measured, tuple(stage.activation_bytes for stage in made.stages))

    def __str__(self) -> str:
        pairs = zip(self.measured, self.predicted, strict=True)
        return ", ".join(
            f"stage {stage} {format_bytes(seen)} measured, {format_bytes(said)} predicted ({seen / said - 1:+.1%})"
            for stage, (seen, said) in enumerate(pairs)
        )


class Adapter:
    """Chooses again; the same on every rank."""

    def __init__(self, task: Task, plan: Plan, first: int) -> None:
        """``first``: the first iteration of this process."""
        self.task, self.plan = task, plan
        self.scales = task.scales or (1.0,) * task.layout.p
        self._floors = [0.0] * task.layout.p
        self._next, self._wait, self._changes = first + FIRST_LOOK - 1, FIRST_LOOK, 0

    def looks(self, iteration: int) -> bool:
        """Whether the peak of this iteration is wanted."""
        return iteration >= self._next and self._changes < MOST_CHANGES

    def look(self, iteration: int, peaks: Peaks) -> str | None:
        """After the iteration: take the plan that its peaks ask for.  A collective call; says what changed, if anything
        did, and then `plan` is the new one on all ranks."""
        self._wait *= 2
        self._next = iteration + self._wait
        broken = self._learn(peaks)
        text = from_first(lambda: self._chosen(broken))
        if text is None:
            return None
        before, self.plan = self.plan, plan_of_text(text)
        agree(self.plan.digest(), "recompute plan")
        self._changes += 1
        why = "leaner: the budget was broken" if broken else "faster: bytes were left"
        return f"the plan changes after iteration {iteration}, {why} ({before.name} -> {self.plan.name})"

    def _learn(self, peaks: Peaks) -> bool:
        """New ratios; whether a stage was above the budget."""
        made = predicted(replace(self.task, scales=None), self.plan)
        broken, scales = False, []
        for stage, (row, seen) in enumerate(zip(made.stages, peaks.measured, strict=True)):
            ratio = seen / max(1, row.activation_bytes)
            if row.total_bytes - row.activation_bytes + seen > self.task.budget_bytes:
                broken = True
                self._floors[stage] = max(self._floors[stage], ratio)
            scales.append(max(ratio, self._floors[stage]))
        self.scales = tuple(scales)
        return broken

    def _chosen(self, broken: bool) -> str | None:
        """The text of a better plan than the present one, on one rank."""
        task = replace(self.task, scales=self.scales)
        try:
            plan = task.choose().choice.plan
        except DoesNotFit:
            plan = task.choose(task.least_bytes()).choice.plan  # the leanest there is
        if replace(plan, name="") == replace(self.plan, name=""):
            return None
        if not broken:
            evaluator = Evaluator(task.model, task.layout, task.machine)
            if evaluator(plan).step_seconds > evaluator(self.plan).step_seconds * (1 - WORTH):
                return None
        return plan.dumps()
