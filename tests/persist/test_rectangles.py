"""A flat range is exactly its rectangles, in order, and no more of them than the shape makes necessary."""

from __future__ import annotations

from math import prod

import pytest
import torch

from megackpt.persist.rectangles import flat_rectangles
from megackpt.persist.tensor_reader import runs

SHAPES = [(), (1,), (7,), (3, 5), (1, 4), (4, 1), (2, 3, 5), (2, 1, 3), (1, 1, 1), (2, 3, 2, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_range_is_its_rectangles(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(prod(shape)).view(shape)
    for start in range(prod(shape) + 1):
        for stop in range(start, prod(shape) + 1):
            boxes = flat_rectangles(shape, start, stop)
            found = [
                numbers[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.lengths, strict=True))].flatten()
                for box in boxes
            ]
            assert torch.cat([torch.empty(0, dtype=torch.int64), *found]).tolist() == list(range(start, stop))
            assert len(boxes) <= max(1, 2 * len(shape) - 1)
            assert all(box.size for box in boxes)


def test_the_staircase_of_the_docstring() -> None:
    boxes = flat_rectangles((4, 5), 3, 14)
    assert [(box.offsets, box.lengths) for box in boxes] == [
        ((0, 3), (1, 2)),
        ((1, 0), (1, 5)),
        ((2, 0), (1, 4)),
    ]
    assert [(b.offsets, b.lengths) for b in flat_rectangles((4, 5), 5, 15)] == [((1, 0), (2, 5))]
    assert boxes[0].moved((8, 0)).offsets == (8, 3)


def test_a_range_outside_is_refused() -> None:
    for start, stop in ((-1, 2), (2, 1), (0, 7)):
        with pytest.raises(ValueError, match="is not inside a tensor of 6 elements"):
            flat_rectangles((2, 3), start, stop)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape], ids=str)
def test_the_runs_of_every_box(shape: tuple[int, ...]) -> None:
    """Stretches in the file, in the order of the box, and as few as there can be."""
    numbers = torch.arange(prod(shape)).view(shape)
    boxes = [
        (tuple(min(o, n - 1) for o, n in zip(offsets, shape, strict=True)), cut)
        for offsets in ((0,) * len(shape), (1,) * len(shape))
        for cut in (0, 1)
    ]
    for offsets, cut in boxes:
        lengths = tuple(max(1, n - o - cut) for o, n in zip(offsets, shape, strict=True))
        box = numbers[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))].flatten()
        found = list(runs(shape, offsets, lengths))
        assert [i for start, length in found for i in range(start, start + length)] == box.tolist()
        if lengths == shape:
            assert found == [(0, prod(shape))]
