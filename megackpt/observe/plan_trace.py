"""A plan's schedule as a trace: open it in ui.perfetto.dev or chrome://tracing.

One process per plan, one thread per stage; forwards, backwards and, inside them, replay as slices; the memory of each
stage as a counter.  Times are microseconds of the simulated step.
"""

from __future__ import annotations

from typing import Any

from megackpt.plan.accelerators import GIB
from megackpt.plan.evaluation import Evaluation
from megackpt.plan.report import Report

NAMES = {"F": "forward", "B": "backward", "W": "weight gradients"}


def trace(report: Report) -> dict[str, Any]:
    """The JSON object of the trace event format."""
    plans = [report.given]
    if report.best is not None and report.best.name != report.given.name:
        plans.append(report.best)
    events: list[dict[str, Any]] = []
    for process, e in enumerate(plans):
        events += _process(e, process, "as given" if process == 0 else "recommended")
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _process(e: Evaluation, process: int, role: str) -> list[dict[str, Any]]:
    events = [_named("process_name", process, 0, f"{role}: {e.name}")]
    for index, stage in enumerate(e.timeline.stages):
        events.append(_named("thread_name", process, index, f"stage {index}: {e.layout.layers_of(index)} layers"))
        events.append(_memory(process, index, 0.0, stage.before))
        rows = zip(stage.actions, stage.starts, stage.ends, stage.peaks, stage.levels, strict=True)
        for action, start, end, peak, level in rows:
            slot = e.slot_of(index, action)
            args = {"micro_batch": action.micro_batch, "chunk": action.chunk, "slot": slot, "peak_bytes": peak}
            events.append(_slice(str(action), NAMES[action.kind], process, index, start, end, args))
            replay = e.replay_of(index, action)
            if replay > 0:
                until = min(end, start + replay)
                events.append(_slice(f"replay {action.micro_batch}", "replay", process, index, start, until, {}))
            events += [_memory(process, index, start, peak), _memory(process, index, end, level)]
    return events


def _slice(
    name: str, kind: str, process: int, thread: int, start: float, end: float, args: dict[str, Any]
) -> dict[str, Any]:
    times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
    return {"name": name, "cat": kind, "ph": "X", "pid": process, "tid": thread, **times, "args": args}


def _memory(process: int, stage: int, at: float, size: int) -> dict[str, Any]:
    name = f"memory of stage {stage}"
    return {"name": name, "ph": "C", "pid": process, "ts": at * 1e6, "args": {"GiB": size / GIB}}


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
