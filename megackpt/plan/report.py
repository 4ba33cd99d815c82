"""The answer to a user's question before a launch: the plan as given, the best one, its neighbours, and advice.

A value that the table, the pictures and the JSON file are written from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megackpt.plan.accelerators import Machine
from megackpt.plan.advice import advise
from megackpt.plan.choose.choose import Options
from megackpt.plan.choose.engine import choose_for
from megackpt.plan.choose.problem import DoesNotFit
from megackpt.plan.decision import KEEP, REPLAY, Decision, Plan, SaveSet
from megackpt.plan.evaluate import Evaluator
from megackpt.plan.evaluation import Evaluation
from megackpt.plan.numbers import Layout, ModelNumbers
from megackpt.plan.policies import Policy, plan_for
from megackpt.plan.profile import Profile
from megackpt.plan.steps import GATHERS

VERSION = 1
EQUAL = 2e-4  # of a step's seconds
WANTED = Options(slots=True, ahead=True, keep_gathered=False)


@dataclass(frozen=True)
class StepRow:
    """One step of a transformer layer under the given plan, and what the opposite decision would change."""

    name: str
    kept: bool  # nothing of it is rebuilt
    bytes: int  # that keeping it costs per layer and micro-batch in flight
    seconds: float  # that rebuilding it costs per layer and micro-batch

    def to_json(self) -> dict[str, Any]:
        return {"step": self.name, "kept": self.kept, "bytes": self.bytes, "seconds": self.seconds}


@dataclass(frozen=True)
class Report:
    """``given``: the flags as they are; ``best``: the fastest plan within the budget, None if none fits."""

    model: ModelNumbers
    machine: Machine
    budget_bytes: int
    given: Evaluation
    best: Evaluation | None
    ladder: tuple[Evaluation, ...]  # the recompute flags and the best plan, leanest first
    decisions: tuple[StepRow, ...]
    why_not: str  # where nothing fits
    advice: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.given.fits(self.budget_bytes)

    @property
    def leaner(self) -> Evaluation | None:
        """Of the plans that need less memory than the given one, the fastest."""
        lean = [e for e in self.ladder if e.peak_bytes < self.given.peak_bytes]
        return min(lean, key=lambda e: (e.step_seconds, e.peak_bytes), default=None)

    @property
    def faster(self) -> Evaluation | None:
        """Of the plans that are faster than the given one, the leanest."""
        fast = [e for e in self.ladder if e.step_seconds < self.given.step_seconds * (1 - 1e-9)]
        return min(fast, key=lambda e: (e.peak_bytes, e.step_seconds), default=None)

    def to_json(self) -> dict[str, Any]:
        """The document of docs/plan.md."""
        budget = self.budget_bytes
        return {
            "version": VERSION,
            "machine": self.machine.to_json(),
            "memory_budget_bytes": budget,
            "model": self.model.to_json(),
            "fits": self.fits,
            "given": self.given.to_json(budget),
            "best": None if self.best is None else self.best.to_json(budget),
            "why_nothing_fits": self.why_not or None,
            "plans": [_line(e, budget) for e in self.ladder],
            "next_leaner": None if self.leaner is None else _line(self.leaner, budget),
            "next_faster": None if self.faster is None else _line(self.faster, budget),
            "decisions": [row.to_json() for row in self.decisions],
            "recommendation": list(self.advice),
            "notices": list(self.notices),
        }


def _line(e: Evaluation, budget: int) -> dict[str, Any]:
    return {
        "name": e.name,
        "peak_bytes": e.peak_bytes,
        "step_seconds": e.step_seconds,
        "overhead": e.overhead,
        "fits": e.fits(budget),
    }


def report(
    model: ModelNumbers,
    layout: Layout,
    plan: Plan,
    machine: Machine,
    budget_bytes: int,
    made: Profile | None = None,
    notices: Sequence[str] = (),
    options: Options = WANTED,
) -> Report:
    """Everything about ``plan``.  ``options``: what the recommended one may use.  Raises ValueError when the model does
    not divide over the ranks."""
    evaluator = Evaluator(model, layout, machine, made)
    given = evaluator(plan)
    plans = [plan_for(layout.pieces, policy) for policy in ladder_policies(model, layout)]
    flags = [given if other == plan else evaluator(other) for other in plans]
    tried, why_not = _tried(evaluator, budget_bytes, flags, options)
    best = _best(budget_bytes, flags, tried)
    seen: dict[str, Evaluation] = {}
    for e in [given, *flags, *tried, *([best] if best else [])]:
        seen.setdefault(e.name, e)
    return Report(
        model=model,
        machine=machine,
        budget_bytes=budget_bytes,
        given=given,
        best=best,
        ladder=tuple(sorted(seen.values(), key=lambda e: (e.peak_bytes, e.step_seconds, e.name))),
        decisions=decisions(evaluator, plan),
        why_not="" if best else why_not,
        advice=advise(evaluator, budget_bytes, given, best, flags, tried, why_not),
        notices=tuple(notices),
    )


def ladder_policies(model: ModelNumbers, layout: Layout) -> list[Policy]:
    """The recompute flags that differ in a useful way, from rich to lean."""
    chunked = bool(model.loss_chunk)
    largest = max(len(chunk) for stage in layout.pieces for chunk in stage)
    wanted: list[dict[str, Any]] = [{"granularity": "none"}, {"granularity": "free"}]
    if not model.fused_attention:
        wanted.append({"granularity": "selective"})
    wanted.append({"granularity": "full"})
    wanted.append({"granularity": "full", "keep": "layer-input"})
    sizes = sorted({2, max(2, round(largest**0.5)), largest}) if largest > 1 else []
    wanted += [{"granularity": "full", "num_layers": size} for size in sizes if size <= largest]
    return [Policy(**details, chunked_loss=chunked) for details in wanted]


def _tried(
    evaluator: Evaluator, budget: int, flags: Sequence[Evaluation], options: Options
) -> tuple[list[Evaluation], str]:
    """The choice per stage, and with every freedom that ``options`` add, one after the other; those that fit, or why
    none does.  Where everything fits only another split can win."""
    everything, layout = flags[0].fits(budget), evaluator.layout
    steps = [Options(keep_gathered=False)]
    pipeline = {"slots": options.slots and layout.v == 1, "ahead": options.ahead and layout.p > 1}
    for more in (pipeline, {"split": options.split}, {"offload": options.offload}):
        if any(more.values()) and ("split" in more or not everything):
            steps.append(replace(steps[-1], **more))
    found: list[Evaluation] = []
    why_not = ""
    for some in steps[everything:]:
        try:
            chosen = choose_for(evaluator.model, evaluator.layout, evaluator.machine, budget, some, evaluator.made)
        except DoesNotFit as error:
            why_not = str(error)
            continue
        made = evaluator(chosen.choice.plan, chosen.layout)
        if made.name not in {e.name for e in found}:
            found.append(made)
    return found, why_not


def _best(budget: int, flags: Sequence[Evaluation], tried: Sequence[Evaluation]) -> Evaluation | None:
    """The fastest plan that fits; of what is as good as equal the one with the least freedom."""

    def order(e: Evaluation) -> tuple[float, int]:
        return e.step_seconds, e.peak_bytes

    fitting = [e for e in flags if e.fits(budget)]
    by_flags = flags[0] if flags[0].fits(budget) else min(fitting, key=order, default=None)
    fastest = min([*([by_flags] if by_flags else []), *tried], key=order, default=None)
    if fastest is None or fastest is by_flags:
        return fastest
    for e in tried:
        if e.step_seconds <= fastest.step_seconds * (1 + EQUAL) and (by_flags is None or order(e) < order(by_flags)):
            return e
    return fastest


def decisions(evaluator: Evaluator, plan: Plan) -> tuple[StepRow, ...]:
    """The steps of a layer of stage 0 (the one whose save-set drops most there), each decided the other way round."""
    stage = plan.stages[0]
    sets = [chunk.save_set(address) for chunk in stage for address in chunk.save_sets if address.startswith("layers.")]
    prices = evaluator.prices
    now = min(sets, key=prices.kept_bytes, default=SaveSet())
    rows = []
    for step in evaluator.made.block.steps:
        if step.name in GATHERS or not (step.output_is_saved or step.internal_bytes):
            continue
        decision = now[step.name]
        keeps = {"output": decision.output != REPLAY, "internals": decision.internals != REPLAY}
        kept = keeps["output"] or (bool(step.internal_bytes) and keeps["internals"])
        other = REPLAY if kept else KEEP
        flipped = SaveSet(dict(now.decisions) | {step.name: Decision(other, other, decision.masks)}, now.default)
        with_, without = (now, flipped) if kept else (flipped, now)
        rows.append(
            StepRow(
                step.name,
                kept,
                prices.kept_bytes(with_) - prices.kept_bytes(without),
                prices.replay_seconds(without) - prices.replay_seconds(with_),
            )
        )
    masks = [step for step in evaluator.made.block.steps if step.mask_bytes]
    kept = any(now[step.name].masks == KEEP for step in masks)
    rows.append(StepRow("dropout masks", kept, sum(step.mask_bytes for step in masks), 0.0))
    return tuple(row for row in rows if row.bytes > 0)
