"""A producer can rebuild dropped output storages: by replaying a step, or by fetching what was put elsewhere."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence

from megackpt.recompute.handle import Box, Cell
from megackpt.recompute.lanes import Lane


class Producer(ABC):
    """What a cell asks.  It is alive exactly as long as something can still ask it, and holds no handle strongly."""

    __slots__ = ("where", "cells", "lane", "__weakref__")

    lasting = False  # what it rebuilt may outlive the backward that asked for it

    def __init__(self, where: str) -> None:
        self.where = where
        self.lane: Lane | None = None  # the stream it works on; None on a CPU
        self.cells: dict[int, weakref.ref[Cell]] | None = None  # made when the first is asked for

    @abstractmethod
    def missing(self) -> Sequence[Producer]:
        """The producers that must go first."""

    @abstractmethod
    def rebuild(self) -> None:
        """Fill every box (and slot) that is alive."""

    def wanted(self) -> bool:
        """Whether anything of it is alive and still empty."""
        return bool(self.wanted_boxes())

    @property
    def begins(self) -> bool:
        """Whether `ahead` can begin anything."""
        return True

    def ahead(self) -> None:
        """Begin what can be begun before anybody waits (a copy, a collective); nothing, where nothing can."""
        return None

    def cell(self, index: int) -> Cell:
        """The identity of output storage ``index``: one object as long as anyone holds it."""
        if self.cells is None:
            self.cells = {}
        ref = self.cells.get(index)
        cell = ref() if ref is not None else None
        if cell is None:
            cell = Cell(self, index)
            self.cells[index] = weakref.ref(cell)
        return cell

    def wanted_boxes(self) -> dict[int, Box]:
        boxes: dict[int, Box] = {}
        if self.cells is None:
            return boxes
        for index, ref in self.cells.items():
            cell = ref()
            box = cell.box() if cell is not None and cell.box is not None else None
            if box is not None and box.value is None:
                boxes[index] = box
        return boxes

    def clear(self) -> None:
        """Forget what was rebuilt (end of a backward that retains its graph)."""
        for ref in () if self.cells is None else self.cells.values():
            cell = ref()
            if cell is not None and cell.box is not None and (box := cell.box()) is not None:
                box.value = None
