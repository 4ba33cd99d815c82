"""What is kept now: bytes by tape (a micro-batch), layer and step, as data and as a table."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megackpt.recompute.tape import Tape

_GROUP = re.compile(r"layers \d+ to \d+")  # replayed as one step


@dataclass(frozen=True)
class Row:
    """Bytes that one step of one forward keeps for its backward; each storage counts for the step that kept it
    first."""

    tape: str
    layer: str
    step: str
    nbytes: int


@dataclass(frozen=True)
class Report:
    """Rows in the order of the forward."""

    rows: tuple[Row, ...]

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.rows)

    def by_tape(self) -> dict[str, int]:
        return self._sums("tape")

    def by_layer(self) -> dict[str, int]:
        return self._sums("layer")

    def by_step(self) -> dict[str, int]:
        return self._sums("step")

    def _sums(self, field: str) -> dict[str, int]:
        sums: dict[str, int] = {}
        for row in self.rows:
            key = getattr(row, field)
            sums[key] = sums.get(key, 0) + row.nbytes
        return sums

    def to_json(self) -> list[dict[str, object]]:
        return [{"tape": r.tape, "layer": r.layer, "step": r.step, "bytes": r.nbytes} for r in self.rows]

    def __str__(self) -> str:
        """A table: one line a row, a sum below."""
        cells = [(r.tape, r.layer, r.step, f"{r.nbytes:,}") for r in self.rows]
        lines = [("tape", "layer", "step", "bytes"), *cells, ("sum", "", "", f"{self.nbytes:,}")]
        t, s, n, b = (max(len(line[i]) for line in lines) for i in range(4))
        return "\n".join(f"{x[0]:{t}}  {x[1]:{s}}  {x[2]:{n}}  {x[3]:>{b}}" for x in lines)


def report(tapes: Tape | Iterable[Tape]) -> Report:
    """What the given tapes keep at this moment: after a forward all that its backward needs, after the backward
    nothing.  Parameters and random states are not counted; a tape counts if it was opened with an ``account``.  Tapes
    without a label are numbered."""
    listed: list[Tape] = list(tapes) if isinstance(tapes, Iterable) else [tapes]
    rows = []
    for place, tape in enumerate(listed):
        for where, nbytes in tape.kept_now().items():
            layer, _, step = (where, "", "") if _GROUP.fullmatch(where) else where.rpartition(" ")
            rows.append(Row(tape.label or str(place), layer, step, nbytes))
    return Report(tuple(rows))
