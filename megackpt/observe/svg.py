"""The few marks that our plots need, as SVG text: no dependency, no script, no font file.

Positions and sizes are in pixels of the picture's own coordinate system, origin at the top left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

INK = "#1f2430"
QUIET = "#5b6270"
GRID = "#e3e6eb"
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif"
# Mean advance of a character over the font size in the widest of the fonts above.
CHARACTER = 0.62


def text_width(text: str, size: float) -> float:
    """Upper estimate of a text's width, for layout without font metrics."""
    return len(text) * size * CHARACTER


class Canvas:
    """Collects marks and writes one self-contained document."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._marks: list[str] = []

    def line(
        self, x1: float, y1: float, x2: float, y2: float, stroke: str, width: float = 1, dash: str | None = None
    ) -> None:
        extra = f' stroke-dasharray="{dash}"' if dash else ""
        self._marks.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}"'
            f' stroke-width="{width}"{extra}/>'
        )

    def path(self, points: Sequence[tuple[float, float]], stroke: str, width: float = 1.6) -> None:
        if len(points) > 1:
            shape = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
            self._marks.append(
                f'<path d="{shape}" fill="none" stroke="{stroke}" stroke-width="{width}" stroke-linejoin="round"/>'
            )

    def circle(self, x: float, y: float, radius: float, fill: str) -> None:
        self._marks.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{fill}"/>')

    def rect(self, x: float, y: float, width: float, height: float, fill: str, tip: str | None = None) -> None:
        inner = f"><title>{escape(tip)}</title></rect>" if tip else "/>"
        self._marks.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{max(0.0, height):.1f}" fill="{fill}"{inner}'
        )

    def text(
        self, x: float, y: float, text: str, size: float = 12, anchor: str = "start", fill: str = INK,
        weight: str = "normal", turned: bool = False,
    ) -> None:  # fmt: skip
        turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
        self._marks.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor={quoteattr(anchor)} fill="{fill}"'
            f' font-weight="{weight}"{turn}>{escape(text)}</text>'
        )

    def document(self) -> str:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}"'
            f' width="{self.width:g}" height="{self.height:g}" role="img" font-family="{escape(FONT)}">\n'
            f"<title>{escape(self.title)}</title>\n"
            f'<rect width="100%" height="100%" fill="#ffffff"/>\n' + "\n".join(self._marks) + "\n</svg>\n"
        )


def nice_step(span: float, wanted: int, whole: bool = False) -> float:
    """The step 1, 2, 2.5 or 5 times a power of ten that gives at most `wanted` ticks over `span`."""
    raw = max(span, 1e-12) / max(1, wanted)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    return max(1.0, float(math.ceil(step))) if whole else step


def ticks(low: float, high: float, wanted: int, whole: bool = False) -> list[float]:
    """Round positions from `low` to `high`, both included when they are round themselves."""
    step = nice_step(high - low, wanted, whole)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def tick_text(value: float, step: float) -> str:
    """`value` with as many decimals as `step` needs."""
    decimals = 0
    while decimals < 6 and abs(step * 10**decimals - round(step * 10**decimals)) > 1e-6 * 10**decimals * step:
        decimals += 1
    return f"{value:.{decimals}f}"
