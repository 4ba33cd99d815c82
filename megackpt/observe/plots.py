"""Two pictures of a run, as self-contained SVG: how the loss fell, and what each rank's memory held.

    ┌ title ───────────────────────────────┐     layout, top to bottom: title, legend (one row, wraps),
    │ ■ train 3.21   ■ validation 3.40     │     plot area with the value grid, ticks, axis label. Text
    │ 6 ┤╲                                 │     never lies on data: series are named in the legend, and
    │ 5 ┤ ╲___ - - - - - - - - - - - - - - │     only reference lines carry a label, in a margin kept
    │ 4 ┤      ╲________                   │     free for it.
    │   └┬────┬────┬────┬─                 │
    └──────────────────────────────────────┘

The functions take plain lists and return the document's text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megackpt.observe.log_line import format_bytes
from megackpt.observe.svg import GRID, INK, QUIET, Canvas, nice_step, text_width, tick_text, ticks

Points = Sequence[tuple[float, float]]

WIDTH = 860
TRAIN, VALIDATION, REFERENCE = "#2f6fb7", "#d1622b", "#7a3e9d"
SAVED, PEAK = "#2f6fb7", "#a9cbee"
# One colour per line over iterations; ranks with equal curves share a line.
LINES = ("#2f6fb7", "#d1622b", "#3a8f5c", "#7a3e9d", "#b8901f", "#2aa0a8", "#c04a7b", "#6b7280")
MOST_POINTS = 1500


@dataclass(frozen=True)
class Axes:
    """A plot area and the values at its edges."""

    left: float
    top: float
    right: float
    bottom: float
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return self.left + (value - self.x_low) / (self.x_high - self.x_low) * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - (value - self.y_low) / (self.y_high - self.y_low) * (self.bottom - self.top)


def loss_curve(
    train: Points,
    validation: Points = (),
    references: Sequence[tuple[float, str]] = (),
    title: str = "Loss",
) -> str:
    """Loss over iterations: `train` and `validation` are (iteration, loss) by iteration, NaN makes a gap.

    `references` are (loss, label) drawn as labelled horizontal lines, such as the unigram entropy of the corpus.
    """
    finite = [y for points in (train, validation) for _, y in points if math.isfinite(y)]
    values = finite + [value for value, _ in references]
    xs = [x for points in (train, validation) for x, _ in points]
    canvas = Canvas(WIDTH, 440, title)
    entries = [(TRAIN, _named("train", train))] if train else []
    entries += [(VALIDATION, _named("validation", validation))] if validation else []
    top = _head(canvas, title, entries)
    if not values or not xs:
        canvas.text(WIDTH / 2, 230, "no loss recorded", 14, "middle", QUIET)
        return canvas.document()
    low, high = min(values), max(values)
    pad = 0.06 * (high - low) or 0.5
    axes = Axes(72, top, WIDTH - 28, 384, min(xs), max(max(xs), min(xs) + 1), low - pad, high + pad)
    _value_grid(canvas, axes, "loss (nats per token)")
    _iteration_ticks(canvas, axes)
    for points, colour, few in ((train, TRAIN, 1), (validation, VALIDATION, 60)):
        for run in _runs(points):
            places = [(axes.x(x), axes.y(y)) for x, y in _thinned(run)]
            canvas.path(places, colour, 1.6 if len(run) <= 400 else 0.9)
            if len(run) <= few:  # a lone point would leave no line
                for x, y in places:
                    canvas.circle(x, y, 3.5, colour)
    _references(canvas, axes, references, [*train, *validation])
    return canvas.document()


def memory_per_rank(
    saved: Sequence[int],
    peak: Sequence[int] | None = None,
    history: Sequence[tuple[float, Sequence[int]]] = (),
    rank_labels: Sequence[str] | None = None,
    title: str = "Activation memory per rank",
) -> str:
    """Bars of saved and measured peak activation bytes, one pair per rank; below, saved bytes over iterations.

    `saved` and `peak` have one entry per rank; `history` is (iteration, bytes per rank) and is drawn from two
    iterations on. `rank_labels` stand under the bars (default: the rank numbers). Raises ValueError when lengths
    do not match.
    """
    for name, given in (("peak", peak), ("rank_labels", rank_labels)):
        if given is not None and len(given) != len(saved):
            raise ValueError(f"{name} has {len(given)} entries for {len(saved)} ranks")
    lines = len(history) > 1
    canvas = Canvas(WIDTH, 680 if lines else 400, title)
    entries = [(SAVED, "saved for backward (the engine's count)")]
    entries += [(PEAK, "peak of activations (measured)")] if peak else []
    top = _head(canvas, title, entries)
    if not saved:
        canvas.text(WIDTH / 2, 210, "no memory recorded", 14, "middle", QUIET)
        return canvas.document()
    largest = max(1, *saved, *(peak or [0]))
    axes = Axes(84, top + 14, WIDTH - 28, 344, 0, len(saved), 0, 1.05 * largest)
    _byte_grid(canvas, axes)
    _bars(canvas, axes, saved, peak, [str(r) for r in range(len(saved))] if rank_labels is None else rank_labels)
    if lines:
        _history(canvas, history)
    return canvas.document()


def _named(name: str, points: Points) -> str:
    last = points[-1][1]
    return f"{name}, last {last:.4g}" if math.isfinite(last) else f"{name}, last {last}"


def _head(canvas: Canvas, title: str, entries: Sequence[tuple[str, str]], y: float = 28) -> float:
    """Title and legend; returns where the plot area may begin."""
    canvas.text(24, y, title, 16, weight="600")
    return _legend(canvas, entries, y + 24) + 14


def _legend(canvas: Canvas, entries: Sequence[tuple[str, str]], y: float) -> float:
    x = 24.0
    for colour, text in entries:
        width = 18 + text_width(text, 12) + 18
        if x > 24 and x + width > canvas.width - 24:
            x, y = 24.0, y + 18
        canvas.rect(x, y - 10, 11, 11, colour)
        canvas.text(x + 17, y, text, 12, fill=QUIET)
        x += width
    return y


def _value_grid(canvas: Canvas, axes: Axes, label: str) -> None:
    step = nice_step(axes.y_high - axes.y_low, 6)
    for value in ticks(axes.y_low, axes.y_high, 6):
        _grid_line(canvas, axes, value, tick_text(value, step))
    canvas.text(20, (axes.top + axes.bottom) / 2, label, 12, "middle", QUIET, turned=True)


def _byte_grid(canvas: Canvas, axes: Axes) -> None:
    """Ticks that are round in the unit in which they are written."""
    unit = _unit(axes)
    name = format_bytes(unit).split()[1]
    step = nice_step(axes.y_high / unit, 5)
    for value in ticks(0, axes.y_high / unit, 5):
        _grid_line(canvas, axes, value * unit, f"{tick_text(value, step)} {name}")


def _grid_line(canvas: Canvas, axes: Axes, value: float, text: str) -> None:
    y = axes.y(value)
    canvas.line(axes.left, y, axes.right, y, GRID)
    canvas.text(axes.left - 8, y + 4, text, 11, "end", QUIET)


def _iteration_ticks(canvas: Canvas, axes: Axes) -> None:
    canvas.line(axes.left, axes.bottom, axes.right, axes.bottom, INK)
    for value in ticks(axes.x_low, axes.x_high, 8, whole=True):
        x = axes.x(value)
        canvas.line(x, axes.bottom, x, axes.bottom + 4, INK)
        canvas.text(x, axes.bottom + 18, f"{value:.0f}", 11, "middle", QUIET)
    canvas.text((axes.left + axes.right) / 2, axes.bottom + 40, "iteration", 12, "middle", QUIET)


def _references(canvas: Canvas, axes: Axes, references: Sequence[tuple[float, str]], data: Points) -> None:
    """Dashed lines; each label stands above or below its line, on the side and at the end that the data leave free."""
    for value, label in references:
        y = axes.y(value)
        canvas.line(axes.left, y, axes.right, y, REFERENCE, 1.4, "6 4")
        width = text_width(label, 12)
        places = []
        for above in (True, False):
            baseline = y - 6 if above else y + 15
            if not axes.top <= baseline - 10 <= baseline + 3 <= axes.bottom:
                continue
            for x, anchor, left in (
                (axes.right - 4, "end", axes.right - 4 - width),
                ((axes.left + axes.right) / 2, "middle", (axes.left + axes.right - width) / 2),
                (axes.left + 8, "start", axes.left + 8),
            ):
                covered = _covered(axes, data, left, left + width, baseline - 12, baseline + 4)
                places.append((covered, x, anchor, baseline))
        best = min(places, key=lambda place: place[0], default=(0, axes.left + 8, "start", y - 6))
        canvas.text(best[1], best[3], label, 12, best[2], REFERENCE)


def _covered(axes: Axes, data: Points, left: float, right: float, top: float, bottom: float) -> int:
    inside = ((axes.x(x), axes.y(y)) for x, y in data if math.isfinite(y))
    return sum(left - 6 <= x <= right + 6 and top - 4 <= y <= bottom + 4 for x, y in inside)


def _bars(
    canvas: Canvas, axes: Axes, saved: Sequence[int], peak: Sequence[int] | None, labels: Sequence[str]
) -> None:
    slot = (axes.right - axes.left) / len(saved)
    sets = [(saved, SAVED, "saved"), *([(peak, PEAK, "peak")] if peak else [])]
    width = min(64.0, 0.8 * slot / len(sets))
    written = _bar_texts([v for values, _, _ in sets for v in values], axes, width)
    every = max(1, math.ceil(max(text_width(label, 11) + 8 for label in labels) / slot))
    for rank, label in enumerate(labels):
        middle = axes.left + (rank + 0.5) * slot
        for place, (values, colour, name) in enumerate(sets):
            x = middle + (place - len(sets) / 2) * width
            y = axes.y(values[rank])
            tip = f"rank {label}: {name} {format_bytes(values[rank])}"
            canvas.rect(x, y, width * 0.94, axes.bottom - y, colour, tip)
            if written:
                canvas.text(x + width * 0.47, y - 5, written[values[rank]], 11, "middle", INK)
        if rank % every == 0:
            canvas.text(middle, axes.bottom + 18, label, 11, "middle", QUIET)
    canvas.line(axes.left, axes.bottom, axes.right, axes.bottom, INK)
    canvas.text((axes.left + axes.right) / 2, axes.bottom + 40, "rank", 12, "middle", QUIET)


def _bar_texts(values: Sequence[int], axes: Axes, width: float) -> dict[int, str]:
    """What to write over the bars: bytes with unit, else the number in the axis's unit, else nothing."""
    unit = _unit(axes)
    for texts in ({v: format_bytes(v) for v in values}, {v: f"{v / unit:.3g}" for v in values}):
        if max(text_width(text, 11) for text in texts.values()) <= width:
            return texts
    return {}


def _unit(axes: Axes) -> float:
    return float(1024.0 ** max(0, math.floor(math.log(axes.y_high, 1024))))


def _history(canvas: Canvas, history: Sequence[tuple[float, Sequence[int]]]) -> None:
    """Saved bytes over iterations; ranks with the same curve share one line and one legend entry."""
    curves: dict[tuple[int, ...], list[int]] = {}
    for rank in range(min(len(values) for _, values in history)):
        curves.setdefault(tuple(values[rank] for _, values in history), []).append(rank)
    shown = list(curves.items())
    which = ""
    if len(shown) > len(LINES):  # no more lines than colours: the extremes, which is what one looks for
        by_size = sorted(shown, key=lambda item: max(item[0]))
        half = len(LINES) // 2
        which = f": the {half} smallest and {half} largest of {len(shown)} different ones"
        shown = by_size[:half] + by_size[-half:]
    entries = [(LINES[i], _ranks(ranks)) for i, (_, ranks) in enumerate(shown)]
    canvas.text(24, 424, f"Saved for backward over iterations{which}", 13, weight="600")
    top = _legend(canvas, entries, 446) + 14
    xs = [x for x, _ in history]
    largest = max(1, *(max(values) for values, _ in shown))
    axes = Axes(84, top, WIDTH - 28, 624, min(xs), max(max(xs), min(xs) + 1), 0, 1.08 * largest)
    _byte_grid(canvas, axes)
    _iteration_ticks(canvas, axes)
    for i, (values, _) in enumerate(shown):
        points = _thinned([(x, float(v)) for x, v in zip(xs, values, strict=True)])
        canvas.path([(axes.x(x), axes.y(v)) for x, v in points], LINES[i])


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0, 2-5` with runs of three or more shortened."""
    parts, start = [], 0
    for i in range(1, len(ranks) + 1):
        if i == len(ranks) or ranks[i] != ranks[i - 1] + 1:
            run = ranks[start:i]
            parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(r) for r in run]
            start = i
    text = ", ".join(parts[:8]) + (", …" if len(parts) > 8 else "")
    return ("rank " if len(ranks) == 1 else "ranks ") + text


def _runs(points: Points) -> list[list[tuple[float, float]]]:
    """The stretches between values that are not finite."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if math.isfinite(y):
            runs[-1].append((x, y))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _thinned(points: Points) -> list[tuple[float, float]]:
    """At most `MOST_POINTS`: of each bucket the lowest and the highest, so that no spike is lost."""
    if len(points) <= MOST_POINTS:
        return list(points)
    size = math.ceil(2 * len(points) / MOST_POINTS)
    kept: list[tuple[float, float]] = []
    for i in range(0, len(points), size):
        bucket = points[i : i + size]
        kept += sorted({min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])})
    return kept
