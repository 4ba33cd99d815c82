"""A plan's report as text: one row per stage, what each decision costs, the neighbours, the recommendation."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from megackpt.observe.plan_words import plan_lines
from megackpt.plan.accelerators import GIB, MIB
from megackpt.plan.advice import size_words
from megackpt.plan.evaluation import FIXED, Evaluation
from megackpt.plan.predict import STATE
from megackpt.plan.profile import absent_steps
from megackpt.plan.report import Report
from megackpt.plan.split import split_flags

WIDTH = 118
MOST_ROWS = 32
UNITS = {"GiB": GIB, "MiB": MIB}


def table(report: Report) -> str:
    """Everything that ``megackpt plan`` prints."""
    parts = [_head(report), stage_rows(report.given, report.budget_bytes, f"As given: {report.given.name}")]
    best = report.best
    if best is not None and best.name != report.given.name:
        parts.append(stage_rows(best, report.budget_bytes, f"Fastest that fits: {best.name}"))
    parts += [_speed(report.given), _decisions(report), _ladder(report), _advice(report)]
    return "\n".join(part for part in parts if part)


def _head(report: Report) -> str:
    e, m = report.given, report.model
    layout = e.layout
    axes = f"tp {layout.t} x cp {layout.c} x dp {layout.d} x pp {layout.p}"
    chunks = f" x {layout.v} chunks" if layout.v > 1 else ""
    attention = "fused" if m.fused_attention else "unfused"
    lines = [
        f"{m.layers} layers, hidden {m.hidden:,}, {m.heads} heads, sequence {m.seq:,}, vocabulary {m.padded_vocab:,}"
        f" (padded), {attention} attention",
        f"{e.devices:,} ranks ({axes}{chunks}), {layout.n} micro-batches of {layout.micro_batch},"
        f" sequence parallel {'on' if layout.sequence_parallel else 'off'},"
        f" optimizer {'sharded' if layout.sharded_optimizer else 'whole on each rank'}",
        f"{report.machine.name}, budget {size_words(report.budget_bytes)} a rank",
    ]
    lines += [f"note: {text}" for text in report.notices]
    return _wrapped(lines) + "\n"


def stage_rows(e: Evaluation, budget: int, title: str) -> str:
    """Per stage (all its ranks are alike): bytes at the moment of its peak, and seconds of one micro-batch."""
    unit = unit_of(e)
    header: tuple[str, ...] = (
        "stage", "layers", "state", "kept", "transient", "head", "other", "margin", f"peak {unit}", "fits", "peak at",
        "in flight", "replay", "ms/mb",
    )  # fmt: skip
    rows = [_row(e, index, budget) for index in range(len(e.stages))]
    if any(e.plan.further):
        header, rows = (*header, "slots"), [(*row, _slots(e, index)) for index, row in enumerate(rows)]
    if any(row.host_bytes for row in e.prediction.stages):
        away = [f"{row.host_bytes / UNITS[unit]:.2f}" for row in e.prediction.stages]
        header, rows = (*header, f"host {unit}"), [(*row, size) for row, size in zip(rows, away, strict=True)]
    cut = len(rows) - MOST_ROWS
    if cut > 0:
        rows = [*rows[: MOST_ROWS - 1], rows[-1]]
    text = columns([header, *rows])
    if cut > 0:
        text += f"({cut} stages in the middle are left out here; --json has all)\n"
    fits = [row.stage for row in e.prediction.stages if row.total_bytes > budget]
    verdict = "fits" if not fits else f"DOES NOT FIT: stage{'s' * (len(fits) > 1)} {_list(fits)}"
    if flags := split_flags(e.layout.pieces):
        text += f"Layers per stage as by {flags}\n"
    lines = plan_lines(e.plan, absent_steps(e.model, e.layout)) if e.replays else []
    text += _wrapped([f"- {line}" for line in lines], "  ") + "\n" if lines else ""
    return f"{title}: {verdict}\n{text}"


def _slots(e: Evaluation, stage: int) -> str:
    """How many slots of a stage's micro-batches in flight have a plan of their own."""
    return str(max(len(e.plan.slots(stage, chunk)) for chunk in range(e.layout.v)))


def unit_of(e: Evaluation) -> str:
    """The unit in which the plan's peak has at least one digit."""
    return "GiB" if e.peak_bytes >= GIB else "MiB"


def _row(e: Evaluation, index: int, budget: int) -> tuple[str, ...]:
    row, seconds = e.prediction.stages[index], e.stages[index]
    terms = row.terms
    other = sum(terms.get(name, 0) for name in FIXED if name not in (*STATE, "margin")) + terms["messages"]
    other += terms.get("lanes", 0)
    head, transient = at_the_head(e, index)
    cells = (row.state_bytes, terms["activations"], transient, head, other, terms.get("margin", 0), row.total_bytes)
    return (
        str(index),
        str(e.layout.layers_of(index)),
        *(f"{size / UNITS[unit_of(e)]:.2f}" for size in cells),
        "yes" if row.total_bytes <= budget else "NO",
        row.peak_action,
        str(row.in_flight),
        f"{seconds.replay_share:.1%}",
        f"{seconds.total * 1e3:.2f}",
    )


def at_the_head(e: Evaluation, stage: int) -> tuple[int, int]:
    """(bytes of embedding, head and loss, bytes alive for a moment elsewhere) at the stage's peak."""
    row = e.prediction.stages[stage]
    at_end = row.peak_step.startswith(("head", "embed"))
    moment = row.terms["transient"] + row.terms["weight_gradients"]
    return row.terms["ends"] + moment * at_end, moment * (not at_end)


def _speed(e: Evaluation) -> str:
    machine, layout = e.machine, e.layout
    kind = {2: "bf16", 4: "fp32", 8: "fp64"}[layout.act_bytes]
    source = machine.sources.get("peak_flops", machine.sources.get("all", "given"))
    lines = [
        f"Step {e.step_seconds:.4g} s: pipeline {e.pipeline_seconds:.4g} (bubble {e.bubble_share:.1%} of the"
        f" work, replay {e.overhead:+.1%}), data-parallel exchange {e.reduction_seconds:.3g}"
        f"{_hidden(e)}, optimizer {e.optimizer_seconds:.3g}; {e.tokens_per_s:,.0f} tokens/s",
        f"MFU {e.mfu:.1%} (useful work: 3 x forward), HFU {e.hfu:.1%} (with replayed work), of the dense {kind} peak"
        f" {e.peak_flops / 1e12:,.4g} TFLOP/s ({source})",
        "Bytes are exact for tensors; seconds are a roofline, trust them to about a quarter.",
    ]
    return _wrapped(lines) + "\n"


def _hidden(e: Evaluation) -> str:
    """What of the exchange of gradients and weights is hidden behind computing."""
    whole = e.end.reduce + e.end.gather
    return f" ({whole - e.end.exposed:.3g} more overlapped)" if whole > e.end.exposed else ""


def _decisions(report: Report) -> str:
    if not report.decisions:
        return ""
    rows = [("step", "now", "keeping it costs", "rebuilding it costs", "us per MiB")]
    for row in report.decisions:
        mib, us = row.bytes / MIB, row.seconds * 1e6
        rows.append((row.name, "kept" if row.kept else "rebuilt", f"{mib:.2f} MiB", f"{us:.1f} us", f"{us / mib:.2f}"))
    return (
        "What each decision costs, per layer, rank and micro-batch in flight\n"
        "(the given plan's leanest layer of stage 0; each decision alone, the others as they are)\n" + columns(rows)
    )


def _ladder(report: Report) -> str:
    unit = unit_of(report.given)
    rows = [("plan", f"peak {unit}", "fits", "step s", "against given", "")]
    marks: dict[str, str] = {report.given.name: "given"}
    for e, word in ((report.leaner, "next leaner"), (report.faster, "next faster"), (report.best, "recommended")):
        if e is not None:
            marks[e.name] = f"{marks[e.name]}, {word}" if e.name in marks else word
    for e in report.ladder:
        against = e.step_seconds / report.given.step_seconds - 1
        fits = "yes" if e.fits(report.budget_bytes) else "NO"
        peak, mark = f"{e.peak_bytes / UNITS[unit]:.2f}", marks.get(e.name, "")
        rows.append((e.name, peak, fits, f"{e.step_seconds:.4g}", f"{against:+.1%}", f"<- {mark}" if mark else ""))
    text = "Plans for this layout, leanest first\n" + columns(rows)
    if report.faster is None:
        text += "No plan is faster than the given one.\n"
    if report.leaner is None:
        text += "No plan needs less memory than the given one.\n"
    return text


def _advice(report: Report) -> str:
    return "Recommendation\n" + _wrapped([f"- {text}" for text in report.advice], "  ") + "\n"


def _wrapped(lines: Iterable[str], indent: str = "  ") -> str:
    return "\n".join(textwrap.fill(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False) for line in lines)


def _list(stages: Sequence[int]) -> str:
    return ", ".join(map(str, stages[:8])) + (f" and {len(stages) - 8} more" if len(stages) > 8 else "")


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first to the left, numbers to the right."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = row[0].ljust(widths[0])
        if not row[-1][:1].isdigit() and not row[-1].endswith("%"):
            cells[-1] = row[-1]  # words
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"
