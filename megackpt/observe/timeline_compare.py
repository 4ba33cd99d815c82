"""Two event records side by side: a prediction and a run, or two runs. Text, one picture, one trace.

Each record shows one step: of several the one of median length. Times count from its first action. Tensor-parallel
ranks of a stage do the same at the same time and data-parallel replicas do not meet before the end, so the first rank
of each stage stands for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any

from megackpt.observe.plan_html import STYLE
from megackpt.observe.plan_pictures import BACKWARD, FORWARD, REPLAY, SCHEDULE_WIDTH, WEIGHTS
from megackpt.observe.plan_table import columns
from megackpt.observe.svg import GRID, QUIET, Canvas, nice_step, tick_text, ticks
from megackpt.plan.events import Event, Record, Span, StepRecord

COLOURS = {"F": FORWARD, "B": BACKWARD, "W": WEIGHTS}
COLLECTIVE, WAIT = "#b8901f", "#aab2bf"
NAMES = {"F": "forward", "B": "backward", "W": "weight gradients"}
_ROW, _LEFT, _RIGHT = 20, 118, 16


@dataclass(frozen=True)
class Shown:
    """One record as it is shown: the step, and by stage the first rank's events and spans, from second 0 on."""

    title: str
    seconds: float
    events: tuple[tuple[Event, ...], ...]
    spans: tuple[tuple[Span, ...], ...]
    begin: float

    def waiting(self, stage: int) -> float:
        """Seconds in which a stage waits for messages, or has nothing to do before its first and after its last."""
        return self.seconds - sum(e.busy_s for e in self.events[stage])

    def of_kind(self, stage: int, kind: str) -> float:
        """Seconds of a stage's actions of that kind, without their waits."""
        return sum(e.busy_s for e in self.events[stage] if e.kind == kind)

    def of_spans(self, stage: int, kind: str) -> float:
        return sum(span.end_s - span.start_s for span in self.spans[stage] if span.kind == kind)


def shown(record: Record) -> Shown:
    """The step of median length. Raises ValueError for a record without a whole step."""
    steps = record.whole
    ordered = sorted(steps, key=lambda iteration: (steps[iteration].seconds, iteration))
    chosen = ordered[(len(ordered) - 1) // 2]
    step = steps[chosen]
    title = str(record.about.get("name", "")) or str(record.about.get("kind", ""))
    if record.about.get("kind") == "measured":
        title += f" (iteration {chosen} of {min(steps)} to {max(steps)})"
    begin = min(event.start_s for event in step.events)
    first = _first_ranks(step)
    events = tuple(tuple(e for e in step.events if e.rank == rank) for rank in first)
    spans = tuple(tuple(s for s in step.spans if s.rank == rank) for rank in first)
    return Shown(title, step.seconds, events, spans, begin)


def _first_ranks(step: StepRecord) -> list[int]:
    ranks: dict[int, int] = {}
    for event in step.events:
        ranks[event.stage] = min(event.rank, ranks.get(event.stage, event.rank))
    return [ranks[stage] for stage in sorted(ranks)]


def comparison(a: Shown, b: Shown) -> str:
    """The table; times are milliseconds."""
    rows: list[tuple[str, ...]] = [("ms", "A", "B", "B against A")]
    rows.append(_row("pipeline", a.seconds, b.seconds))
    if len(a.events) != len(b.events):
        return f"A: {a.title}\nB: {b.title}\n\n{columns(rows)}\nThe two have different numbers of stages.\n"
    for stage in range(len(a.events)):
        for kind in ("F", "B", "W"):
            times = [record.of_kind(stage, kind) for record in (a, b)]
            if any(times):
                rows.append(_row(f"stage {stage}: {NAMES[kind]}", *times))
        rows.append(_row(f"stage {stage}: of it replay", *(r.of_spans(stage, "replay") for r in (a, b))))
        rows.append(_row(f"stage {stage}: collectives", *(r.of_spans(stage, "collective") for r in (a, b))))
        rows.append(_row(f"stage {stage}: idle or waiting", *(r.waiting(stage) for r in (a, b))))
        kept = [max((e.saved_bytes for e in record.events[stage]), default=0) / 2**20 for record in (a, b)]
        rows.append((f"stage {stage}: kept, MiB", *(f"{size:.2f}" for size in kept), _share(*kept)))
    return f"A: {a.title}\nB: {b.title}\n\n{columns(rows)}"


def _row(name: str, a: float, b: float) -> tuple[str, ...]:
    return (name, f"{a * 1e3:.2f}", f"{b * 1e3:.2f}", _share(a, b))


def _share(a: float, b: float) -> str:
    return f"{b / a - 1:+.1%}" if a > 0 else ""


def picture(a: Shown, b: Shown) -> str:
    """Both schedules on one axis, each stage with a row of A above a row of B, as SVG."""
    stages = max(len(a.events), len(b.events))
    bottom = 8 + stages * (2 * _ROW + 8)
    canvas = Canvas(SCHEDULE_WIDTH, bottom + 42, f"{a.title} and {b.title}")
    until = max(a.seconds, b.seconds)
    scale = (SCHEDULE_WIDTH - _LEFT - _RIGHT) / until
    step = nice_step(until * 1e3, 8)
    for tick in ticks(0, until * 1e3, 8):
        x = _LEFT + tick / 1e3 * scale
        canvas.line(x, 8, x, bottom, GRID)
        canvas.text(x, bottom + 18, tick_text(tick, step), 12, "middle", QUIET)
    canvas.text((SCHEDULE_WIDTH + _LEFT) / 2, bottom + 36, "milliseconds", 12, "middle", QUIET)
    for stage in range(stages):
        for place, (letter, record) in enumerate((("A", a), ("B", b))):
            if stage < len(record.events):
                y = 8 + stage * (2 * _ROW + 8) + place * _ROW
                canvas.text(_LEFT - 8, y + 14, f"stage {stage}  {letter}", 12, "end")
                _draw(canvas, record, stage, y, scale)
    return canvas.document()


def _draw(canvas: Canvas, record: Shown, stage: int, y: float, scale: float) -> None:
    height = _ROW - 4
    canvas.rect(_LEFT, y + 2, record.seconds * scale, height, GRID)
    for e in record.events[stage]:
        start, middle, end = (t - record.begin for t in (e.start_s, e.start_s + e.wait_s, e.end_s))
        tip = f"{e.action}: {NAMES[e.kind]} of micro-batch {e.micro_batch}, chunk {e.chunk};"
        tip += f" {start * 1e3:.2f} to {end * 1e3:.2f} ms, {e.wait_s * 1e3:.2f} of it waiting"
        if e.wait_s > 0:
            canvas.rect(_LEFT + start * scale, y + 2, e.wait_s * scale, height, WAIT, tip)
        width = (end - middle) * scale
        canvas.rect(_LEFT + middle * scale, y + 2, width - (0.6 if width > 3 else 0.0), height, COLOURS[e.kind], tip)
    for s in record.spans[stage]:
        start, end = s.start_s - record.begin, min(s.end_s - record.begin, record.seconds)
        if end > start:
            colour = REPLAY if s.kind == "replay" else COLLECTIVE
            tip = f"{s.kind}: {s.name}, {(s.end_s - s.start_s) * 1e3:.2f} ms"
            canvas.rect(_LEFT + start * scale, y + 2 + height * 0.55, (end - start) * scale, height * 0.45, colour, tip)


def page(a: Shown, b: Shown) -> str:
    """The picture and the table as one HTML file without network, script or font file."""
    legend = (
        (FORWARD, "forward"), (BACKWARD, "backward"), (WEIGHTS, "weight gradients"), (REPLAY, "replayed steps"),
        (COLLECTIVE, "collectives"), (WAIT, "waiting for a message"),
    )  # fmt: skip
    keys = "".join(f'<span><i style="background:{colour}"></i>{text}</span>' for colour, text in legend)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>Two timelines</title>\n<style>{STYLE} pre {{ overflow-x: auto; }}</style></head>\n<body>\n"
        f"<h1>Two timelines</h1>\n<p>A: {escape(a.title)}</p>\n<p>B: {escape(b.title)}</p>\n"
        f'<div class="legend">{keys}</div>\n<div class="scroll">{picture(a, b)}</div>\n'
        f"<pre>{escape(comparison(a, b))}</pre>\n</body></html>\n"
    )


def trace(a: Shown, b: Shown) -> dict[str, Any]:
    """Both as one trace for Perfetto or chrome://tracing: a process each, a thread for each stage's actions and one for
    what happens inside them."""
    events: list[dict[str, Any]] = []
    for process, record in enumerate((a, b)):
        events.append(_named("process_name", process, 0, f"{'AB'[process]}: {record.title}"))
        for stage, (actions, spans) in enumerate(zip(record.events, record.spans, strict=True)):
            events.append(_named("thread_name", process, 2 * stage, f"stage {stage}"))
            events.append(_named("thread_name", process, 2 * stage + 1, f"stage {stage}: inside"))
            for e in actions:
                args = {"waited_ms": e.wait_s * 1e3, "received_bytes": e.received_bytes, "sent_bytes": e.sent_bytes}
                args["kept_bytes"] = e.saved_bytes
                place = (process, 2 * stage, record)
                events.append(_slice(str(e.action), NAMES[e.kind], *place, e.start_s, e.end_s, args))
            for s in spans:
                args = {"bytes": s.size_bytes}
                events.append(_slice(s.name, s.kind, process, 2 * stage + 1, record, s.start_s, s.end_s, args))
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _slice(
    name: str, kind: str, process: int, thread: int, record: Shown, start: float, end: float, args: dict[str, Any]
) -> dict[str, Any]:
    times = {"ts": (start - record.begin) * 1e6, "dur": (end - start) * 1e6}
    return {"name": name, "cat": kind, "ph": "X", "pid": process, "tid": thread, **times, "args": args}


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}

