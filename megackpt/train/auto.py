"""``--recompute-granularity auto`` in a run: the task that this device sets, and one plan for all ranks.

`observe/auto.py` says how a plan is found; here one rank finds it and the others take it, so that they cannot differ.
"""

from __future__ import annotations

import json

from megackpt.config.run import RunConfig
from megackpt.mesh.device import DeviceSeam
from megackpt.observe.auto import Task, machine_of, refuse_impossible, task_of
from megackpt.observe.log_line import format_bytes
from megackpt.observe.plan_words import plan_lines
from megackpt.plan.decision import Plan
from megackpt.plan.predict import Prediction, predict
from megackpt.plan.profile import absent_steps
from megackpt.train.agree import from_first


def auto_task(config: RunConfig, vocab: int, seam: DeviceSeam) -> Task:
    """What auto has to solve on this device.  Raises UsageError without a budget on a CPU."""
    return task_of(config, vocab, machine_of(seam.kind, seam.name, seam.total_bytes()), seam.kind)


def chosen_plan(config: RunConfig, vocab: int, seam: DeviceSeam) -> Plan:
    """The plan of rank 0, on every rank.  A collective call; raises UsageError on all ranks where nothing fits."""

    def choose() -> str:
        task = auto_task(config, vocab, seam)
        refuse_impossible(task)
        return task.choose().choice.plan.dumps()

    return plan_of_text(from_first(choose))


def plan_of_text(text: str) -> Plan:
    """The plan that ``Plan.dumps`` wrote."""
    return Plan.from_json(json.loads(text))


def predicted(task: Task, plan: Plan) -> Prediction:
    """All bytes of all ranks under a plan, as the budget counts them (``scales`` apart)."""
    return predict(task.model, task.layout, plan, task.machine, watched=task.watched)


def said(task: Task, plan: Plan) -> list[str]:
    """The choice in a few lines."""
    made = predicted(task, plan)
    peaks = " / ".join(format_bytes(stage.total_bytes) for stage in made.stages)
    state = format_bytes(max(stage.state_bytes for stage in made.stages))
    lines = [
        f"auto: {plan.name} within {format_bytes(task.budget_bytes)} a rank: predicted peak by stage {peaks}"
        f" (weights, gradients and optimizer at most {state})"
    ]
    return lines + [f"auto: {line}" for line in plan_lines(plan, absent_steps(task.model, task.layout))]
