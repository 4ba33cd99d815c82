"""The pictures of a plan as SVG: the schedule with its replay, and the memory of a stage over one step."""

from __future__ import annotations

from collections.abc import Sequence

from megackpt.observe.log_line import format_bytes
from megackpt.observe.svg import GRID, QUIET, Canvas, nice_step, tick_text, ticks
from megackpt.plan.accelerators import GIB
from megackpt.plan.evaluation import Evaluation
from megackpt.plan.schedule import Action
from megackpt.plan.simulate import StageTimeline

FORWARD, BACKWARD, WEIGHTS, REPLAY, BUDGET = "#2f6fb7", "#3a8f5c", "#7a3e9d", "#d1622b", "#b3261e"
CURVE = "#2f6fb7"
SCHEDULE_WIDTH = 1060
CURVE_WIDTH, CURVE_HEIGHT = 340, 170
MOST_STAGES = 16
MOST_ACTIONS = 4000
MOST_POINTS = 800
CLOSE_ACTIONS = 24
_ROW, _LEFT, _RIGHT = 22, 70, 16


def shown_stages(count: int) -> list[int]:
    """All stages, or evenly spaced ones with the first and the last."""
    if count <= MOST_STAGES:
        return list(range(count))
    return sorted({round(k * (count - 1) / (MOST_STAGES - 1)) for k in range(MOST_STAGES)})


def shown_seconds(e: Evaluation) -> float:
    """The end of the stretch of the step that the schedule's picture has room for."""
    stages = [e.timeline.stages[index] for index in shown_stages(len(e.stages))]
    ends = sorted(end for stage in stages for end in stage.ends)
    return ends[min(len(ends), MOST_ACTIONS) - 1]


def beginning_seconds(e: Evaluation) -> float | None:
    """When stage 0 has run its first few backwards, which a picture shows one by one; None if the whole step does."""
    stage = e.timeline.stages[0]
    first = next(place for place, action in enumerate(stage.actions) if action.kind == "B")
    few = max(CLOSE_ACTIONS, first + 8)
    return stage.ends[few - 1] if len(stage.ends) > few * 1.5 else None


def schedule(e: Evaluation, until: float) -> str:
    """One row per stage; what a backward replays is drawn first, though it happens layer by layer."""
    indices = shown_stages(len(e.stages))
    bottom = 8 + len(indices) * _ROW
    canvas = Canvas(SCHEDULE_WIDTH, bottom + 42, f"Schedule of one step: {e.name}")
    scale = (SCHEDULE_WIDTH - _LEFT - _RIGHT) / until
    step = nice_step(until * 1e3, 8)
    for tick in ticks(0, until * 1e3, 8):
        x = _LEFT + tick / 1e3 * scale
        canvas.line(x, 8, x, bottom + 4, GRID)
        canvas.text(x, bottom + 18, tick_text(tick, step), 12, "middle", QUIET)
    canvas.text((SCHEDULE_WIDTH + _LEFT) / 2, bottom + 36, "milliseconds", 12, "middle", QUIET)
    for place, index in enumerate(indices):
        y = 8 + place * _ROW
        canvas.text(_LEFT - 8, y + 15, f"stage {index}", 12, "end")
        canvas.rect(_LEFT, y + 2, until * scale, _ROW - 4, GRID)
        _row(canvas, e, index, y + 2, scale, until)
    return canvas.document()


def _row(canvas: Canvas, e: Evaluation, index: int, y: float, scale: float, until: float) -> None:
    stage = e.timeline.stages[index]
    for action, start, end, peak in zip(stage.actions, stage.starts, stage.ends, stage.peaks, strict=True):
        if start >= until:
            break
        end = min(end, until)
        replay = e.replay_of(index, action)
        tip = _tip(action, start, end, replay, peak)
        x, width = _LEFT + start * scale, (end - start) * scale
        colour = {"F": FORWARD, "B": BACKWARD, "W": WEIGHTS}[action.kind]
        gap = 0.6 if width > 3 else 0.0
        canvas.rect(x, y, width - gap, _ROW - 4, colour, tip)
        if replay > 0:
            canvas.rect(x, y, min(replay * scale, width - gap), _ROW - 4, REPLAY, tip)


def _tip(action: Action, start: float, end: float, replay: float, peak: int) -> str:
    name = {"F": "forward", "B": "backward", "W": "weight gradients"}[action.kind]
    text = f"{action}: {name} of micro-batch {action.micro_batch}, chunk {action.chunk}; {start * 1e3:.2f} to"
    text += f" {end * 1e3:.2f} ms"
    if replay > 0:
        text += f", {replay * 1e3:.2f} ms of it replay"
    return f"{text}; at most {format_bytes(peak)}"


def memory(e: Evaluation, index: int, budget: int, top: float) -> str:
    """Bytes that a rank of a stage holds over one step; ``top`` is the end of the value axis, equal for all stages."""
    stage = e.timeline.stages[index]
    peak = stage.peak_bytes
    canvas = Canvas(CURVE_WIDTH, CURVE_HEIGHT, f"Memory of stage {index} over one step")
    left, right, upper, lower = 46, CURVE_WIDTH - 12, 30, CURVE_HEIGHT - 34
    canvas.text(8, 16, f"stage {index}: peak {peak / GIB:.2f} GiB", 12, fill=BUDGET if peak > budget else QUIET)
    step = nice_step(top / GIB, 4)
    for tick in ticks(0, top / GIB, 4):
        y = lower - tick * GIB / top * (lower - upper)
        canvas.line(left, y, right, y, GRID)
        canvas.text(left - 6, y + 4, tick_text(tick, step), 11, "end", QUIET)
    whole = e.pipeline_seconds
    points = [
        (left + x / whole * (right - left), lower - size / top * (lower - upper)) for x, size in _steps(stage, whole)
    ]
    canvas.path(points, CURVE, 1.3)
    y = lower - budget / top * (lower - upper)
    canvas.line(left, y, right, y, BUDGET, 1.2, "5 4")
    canvas.text(left, lower + 16, "0", 11, "middle", QUIET)
    canvas.text(right, lower + 16, f"{whole * 1e3:,.0f} ms", 11, "end", QUIET)
    canvas.text(8, lower + 28, "GiB", 11, "start", QUIET)
    return canvas.document()


def _steps(stage: StageTimeline, until: float) -> Sequence[tuple[float, int]]:
    """Corners of the curve: the peak while an action runs, the level between.  Many actions share a point, which then
    has the most of them."""
    points: list[tuple[float, int]] = [(0.0, stage.before)]
    if len(stage.actions) * 4 <= MOST_POINTS:
        level = stage.before
        for start, end, peak, after in zip(stage.starts, stage.ends, stage.peaks, stage.levels, strict=True):
            points += [(start, level), (start, peak), (end, peak), (end, after)]
            level = after
        return [*points, (until, level)]
    each = -(-len(stage.actions) * 2 // MOST_POINTS)
    for first in range(0, len(stage.actions), each):
        some = slice(first, first + each)
        points += [(stage.starts[first], max(stage.peaks[some])), (stage.ends[some][-1], max(stage.peaks[some]))]
    return [*points, (until, stage.levels[-1])]
