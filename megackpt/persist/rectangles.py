"""Flat ranges as rectangles: how a slice of a flattened tensor lies in the tensor.

A sharded optimizer cuts its flat buffer wherever the bytes divide evenly, in the middle of a row if need be. In the
tensor's own dimensions such a range is a staircase of few rectangles, and rectangles are what can be resharded::

    range 3:14 of [4, 5]      . . . 1 1      1  end of the first row it begins in
                              2 2 2 2 2      2  whole rows
                              3 3 3 3 .      3  beginning of the last row
                              . . . . .
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Rectangle:
    """A box of a tensor."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return prod(self.lengths)

    def moved(self, by: tuple[int, ...]) -> Rectangle:
        """The same box in a tensor of which this one is a part that begins at `by`."""
        return Rectangle(tuple(a + b for a, b in zip(self.offsets, by, strict=True)), self.lengths)


def flat_rectangles(shape: tuple[int, ...], start: int, stop: int) -> list[Rectangle]:
    """The elements `start` to `stop` of the flattened tensor, in their order; at most 2 per dimension but one.

    Raises ValueError if the range is not inside the tensor.
    """
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(f"range {start}:{stop} is not inside a tensor of {prod(shape)} elements")
    if start == stop:
        return []
    return [Rectangle(offsets, lengths) for offsets, lengths in _boxes(shape, start, stop)]


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    if stop - start == prod(shape):
        return [((0,) * len(shape), shape)]
    row, inner = prod(shape[1:]), shape[1:]
    first, last = start // row, (stop - 1) // row
    if first == last:
        return _in_row(inner, first, start - first * row, stop - first * row)
    boxes = []
    if start % row:
        boxes += _in_row(inner, first, start % row, row)
        first += 1
    whole = stop // row
    if first < whole:
        boxes.append(((first, *(0,) * len(inner)), (whole - first, *inner)))
    if stop % row:
        boxes += _in_row(inner, whole, 0, stop % row)
    return boxes


def _in_row(
    inner: tuple[int, ...], row: int, start: int, stop: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [((row, *offsets), (1, *lengths)) for offsets, lengths in _boxes(inner, start, stop)]
