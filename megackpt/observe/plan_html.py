"""A plan's report as one HTML file: no network, no script, no font file; it opens from a mail.

Bars and tables are HTML, which wraps by itself; the schedule is an SVG of fixed width that scrolls in its own box on
a narrow screen, so that its text keeps its size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from megackpt.observe.plan_pictures import (
    BACKWARD,
    BUDGET,
    CURVE,
    FORWARD,
    REPLAY,
    WEIGHTS,
    beginning_seconds,
    memory,
    schedule,
    shown_seconds,
    shown_stages,
)
from megackpt.observe.plan_table import at_the_head
from megackpt.observe.plan_words import plan_lines
from megackpt.observe.svg import FONT, GRID
from megackpt.plan.accelerators import GIB, MIB
from megackpt.plan.evaluation import Evaluation
from megackpt.plan.profile import absent_steps
from megackpt.plan.report import Report
from megackpt.plan.split import split_flags

BARS = (
    ("state", "#6b7280", "weights, gradients, optimizer"),
    ("kept", "#2f6fb7", "activations kept for backward"),
    ("transient", "#d1622b", "alive for a moment: rebuilt tensors, gradients"),
    ("head", "#7a3e9d", "embedding, head and loss"),
    ("other", "#b8901f", "messages, communicators, driver"),
    ("margin", "#c3c9d2", "fragmentation, and what nobody counted"),
)

STYLE = f"""
:root {{ color-scheme: light; }}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; max-width: 1140px; padding: 16px; color: #1f2430; background: #fff;
  font: 15px/1.45 {FONT}; overflow-wrap: anywhere; }}
h1 {{ font-size: 22px; margin: 0 0 4px; }} h2 {{ font-size: 18px; margin: 28px 0 6px; }}
h3 {{ font-size: 15px; margin: 18px 0 6px; }} p {{ margin: 4px 0; }} .quiet {{ color: #5b6270; }}
.cards {{ display: flex; flex-wrap: wrap; gap: 8px; margin: 12px 0; }}
.card {{ border: 1px solid #d5d9e0; border-radius: 6px; padding: 6px 12px; }}
.card b {{ display: block; font-size: 18px; }}
.good {{ color: #1d6b3a; }} .bad {{ color: {BUDGET}; }}
.scroll {{ overflow-x: auto; border: 1px solid #e3e6eb; border-radius: 6px; }}
.scroll svg {{ display: block; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; width: 100%; }}
th, td {{ padding: 3px 10px; text-align: right; border-bottom: 1px solid #e3e6eb; }}
th:first-child, td:first-child {{ text-align: left; }} th {{ font-weight: 600; }}
.legend {{ display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 6px 0; font-size: 13px; }}
.legend span {{ display: inline-flex; align-items: center; gap: 6px; }}
.legend i {{ width: 12px; height: 12px; flex: none; border-radius: 2px; }}
.bar {{ display: grid; grid-template-columns: 68px 1fr 76px; gap: 8px; align-items: center; margin: 3px 0;
  font-size: 13px; }}
.bar b {{ font-weight: 400; text-align: right; }}
.track {{ position: relative; display: flex; height: 18px; background: {GRID}; border-radius: 2px; overflow: hidden; }}
.track i {{ height: 100%; flex: none; }}
.track u {{ position: absolute; top: 0; bottom: 0; width: 2px; background: {BUDGET}; }}
.grid {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(300px, 100%), 1fr)); gap: 8px; }}
.grid svg {{ width: 100%; height: auto; border: 1px solid #e3e6eb; border-radius: 6px; display: block; }}
"""


def page(report: Report) -> str:
    """The whole document."""
    e = report.given
    sections = [_top(report), _section(e, report.budget_bytes, f"As given: {e.name}")]
    best = report.best
    if best is not None and best.name != e.name:
        sections.append(_section(best, report.budget_bytes, f"Fastest that fits: {best.name}"))
    sections += [_decisions(report), _ladder(report)]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>megackpt plan: {escape(e.name)}</title>\n<style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(sections)
        + "\n</body></html>\n"
    )


def _top(report: Report) -> str:
    e, m, layout = report.given, report.model, report.given.layout
    word, colour = ("fits", "good") if report.fits else ("does not fit", "bad")
    cards = [
        (f'<b class="{colour}">{word}</b>', f"peak {e.peak_bytes / GIB:.1f} of {report.budget_bytes / GIB:.1f} GiB"),
        (f"<b>{e.step_seconds:.4g} s</b>", f"a step, {e.tokens_per_s:,.0f} tokens/s"),
        (f"<b>{e.overhead:+.1%}</b>", "time for replay"),
        (f"<b>{e.mfu:.1%} MFU</b>", f"useful work; HFU {e.hfu:.1%} counts replay too"),
        (f"<b>{e.bubble_share:.1%}</b>", "bubble, of the work"),
    ]
    chunks = f" × {layout.v} chunks" if layout.v > 1 else ""
    return (
        "<h1>megackpt plan</h1>\n"
        f'<p class="quiet">{m.layers} layers, hidden {m.hidden:,}, sequence {m.seq:,} on {e.devices:,}'
        f" {escape(report.machine.name)}: tp {layout.t} × cp {layout.c} × dp {layout.d} × pp {layout.p}{chunks},"
        f" {layout.n} micro-batches of {layout.micro_batch}. Dense peak {e.peak_flops / 1e12:,.4g} TFLOP/s.</p>\n"
        + '<div class="cards">'
        + "".join(f'<div class="card">{big}{escape(small)}</div>' for big, small in cards)
        + "</div>\n<ul>"
        + "".join(f"<li>{escape(text)}</li>" for text in report.advice)
        + "</ul>"
        + "".join(f'<p class="quiet">Note: {escape(text)}</p>' for text in report.notices)
    )


def _section(e: Evaluation, budget: int, title: str) -> str:
    shown = shown_stages(len(e.stages))
    cut = "" if len(shown) == len(e.stages) else f" {len(shown)} of {len(e.stages)} stages are shown."
    until = shown_seconds(e)
    if until < e.pipeline_seconds * (1 - 1e-9):
        cut += f" The first {until * 1e3:,.0f} of {e.pipeline_seconds * 1e3:,.0f} ms."
    schedules = f'<div class="scroll">{schedule(e, until)}</div>'
    close = beginning_seconds(e)
    if close is not None:
        schedules += f'\n<p class="quiet">Its beginning:</p>\n<div class="scroll">{schedule(e, close)}</div>'
    top = 1.06 * max(budget, *e.timeline.peak_bytes)
    colours = [("forward", FORWARD), ("replay", REPLAY), ("backward", BACKWARD)]
    colours += [("weight gradients", WEIGHTS)] if e.layout.schedule.startswith("zb") else []
    curves = "\n".join(memory(e, index, budget, top) for index in shown)
    lines = plan_lines(e.plan, absent_steps(e.model, e.layout)) if e.replays else []
    if flags := split_flags(e.layout.pieces):
        lines.insert(0, f"layers per stage as by {flags}")
    words = "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>\n" if lines else ""
    return (
        f"<h2>{escape(title)}</h2>\n{words}"
        f"<h3>Memory of a rank at the peak of its stage, GiB</h3>\n{_bars(e, budget, shown)}\n"
        f"<h3>Schedule of one step</h3>\n{_legend([*colours, ('idle', GRID)])}\n"
        f'<p class="quiet">What a backward replays is drawn at its start; it happens layer by layer.{cut}</p>\n'
        f"{schedules}\n"
        f"<h3>Memory over one step</h3>\n"
        f'{_legend([("bytes held by a rank", CURVE), ("budget", BUDGET)])}\n<div class="grid">{curves}</div>'
    )


def _bars(e: Evaluation, budget: int, shown: Sequence[int]) -> str:
    top = 1.03 * max(budget, e.peak_bytes)
    rows = []
    for index in shown:
        row = e.prediction.stages[index]
        head, transient = at_the_head(e, index)
        sizes = {
            "state": row.state_bytes,
            "kept": row.terms["activations"],
            "transient": transient,
            "head": head,
            "margin": row.terms.get("margin", 0),
        }
        sizes["other"] = row.total_bytes - sum(sizes.values())
        pieces = "".join(
            f'<i style="width:{sizes[name] / top:.3%};background:{colour}"'
            f' title="{name} {sizes[name] / GIB:.3f} GiB"></i>'
            for name, colour, _ in BARS
        )
        over = ' class="bad"' if row.total_bytes > budget else ""
        rows.append(
            f'<div class="bar"><span>stage {index}</span><div class="track">{pieces}'
            f'<u style="left:{budget / top:.3%}" title="budget {budget / GIB:.1f} GiB"></u></div>'
            f"<b{over}>{row.total_bytes / GIB:.2f}</b></div>"
        )
    legend = [(f"{name}: {text}", colour) for name, colour, text in BARS] + [("budget", BUDGET)]
    return _legend(legend) + "\n" + "\n".join(rows)


def _decisions(report: Report) -> str:
    if not report.decisions:
        return ""
    rows = [
        (r.name, "kept" if r.kept else "rebuilt", f"{r.bytes / MIB:.2f}", f"{r.seconds * 1e6:.1f}")
        for r in report.decisions
    ]
    return (
        "<h2>What each decision costs</h2>\n"
        '<p class="quiet">Per layer, rank and micro-batch in flight; each alone, the others as they are.</p>\n'
        + _table(("step", "now", "keeping it, MiB", "rebuilding it, µs"), rows)
    )


def _ladder(report: Report) -> str:
    roles = [(report.given, "given"), (report.leaner, "next leaner"), (report.faster, "next faster")]
    roles.append((report.best, "recommended"))
    rows = []
    for e in report.ladder:
        marks = [word for other, word in roles if other is not None and other.name == e.name]
        fits = "yes" if e.fits(report.budget_bytes) else "no"
        rows.append(
            (e.name, f"{e.peak_bytes / GIB:.2f}", fits, f"{e.step_seconds:.4g}", f"{e.overhead:.1%}", ", ".join(marks))
        )
    names = ("plan", "peak GiB", "fits", "step s", "replay", "")
    return "<h2>Plans for this layout, leanest first</h2>\n" + _table(names, rows)


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    marks = "".join(f'<span><i style="background:{colour}"></i>{escape(text)}</span>' for text, colour in entries)
    return f'<div class="legend">{marks}</div>'
