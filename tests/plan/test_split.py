"""Every layer on exactly one stage (PP-01), the remainder in the middle."""

from __future__ import annotations

import pytest

from megackpt.observe.numbers import split_of
from megackpt.plan.split import split, split_by_counts, split_flags, split_layers
from tests.config.base import run


def sizes(num_layers: int, stages: int) -> list[int]:
    return [len(layers) for layers in split_layers(num_layers, stages)]


def test_every_layer_exactly_once_or_refusal() -> None:
    for num_layers in range(1, 33):
        for stages in range(1, 13):
            if num_layers < stages:
                with pytest.raises(ValueError, match=f"{num_layers} layers? cannot fill {stages} pipeline stages"):
                    split_layers(num_layers, stages)
                continue
            ranges = split_layers(num_layers, stages)
            assert [layer for layers in ranges for layer in layers] == list(range(num_layers))
            counts = [len(layers) for layers in ranges]
            assert len(counts) == stages and max(counts) - min(counts) <= 1
            assert counts[-1] == min(counts), "the last stage has the head"
            assert stages == 1 or counts[0] == min(counts) or min(counts[:-1]) > counts[-1], "first before the middle"


@pytest.mark.parametrize(
    ("num_layers", "stages", "expected"),
    [
        (30, 4, [7, 8, 8, 7]),  # 28 were trained once elsewhere
        (29, 4, [7, 7, 8, 7]),
        (31, 4, [8, 8, 8, 7]),
        (28, 4, [7, 7, 7, 7]),
        (7, 2, [4, 3]),
        (5, 3, [2, 2, 1]),
        (4, 3, [1, 2, 1]),
        (80, 32, [2] * 8 + [3] * 16 + [2] * 8),
        (6, 1, [6]),
        (4, 4, [1, 1, 1, 1]),
    ],
)
def test_who_gets_the_remainder(num_layers: int, stages: int, expected: list[int]) -> None:
    assert sizes(num_layers, stages) == expected


def test_senseless_stage_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        split_layers(4, 0)


def counts(*args: int, **details: int | bool) -> list[list[int]]:
    """Layers by [stage][chunk]; every layer is in one piece, in the order of the model."""
    found = split(*args, **details)  # type: ignore[arg-type]
    order = [layer for chunk in zip(*found, strict=True) for layers in chunk for layer in layers]
    assert order == list(range(args[0]))
    return [[len(layers) for layers in stage] for stage in found]


def test_ends_that_count_as_layers() -> None:
    assert counts(30, 4, embedding=True, loss=True) == [[7], [8], [8], [7]]
    assert counts(15, 4, loss=True) == [[4], [4], [4], [3]]
    assert counts(2, 4, embedding=True, loss=True) == [[0], [1], [1], [0]]
    assert counts(14, 4, 2, embedding=True, loss=True) == [[1, 2], [2, 2], [2, 2], [2, 1]]
    assert counts(3, 1, embedding=True, loss=True) == [[3]]


def test_first_and_last_stage_by_number() -> None:
    assert counts(10, 4, first=1) == [[1], [3], [3], [3]]
    assert counts(10, 4, last=1) == [[3], [3], [3], [1]]
    assert counts(11, 4, first=2, last=1) == [[2], [4], [4], [1]]
    assert counts(7, 2, first=5, last=2) == [[5], [2]]
    assert counts(11, 3, 2, first=2, last=3) == [[1, 1], [3, 3], [2, 1]]
    for rest in ({"first": 9}, {"first": 4, "last": 5}, {"last": 8}):
        with pytest.raises(ValueError, match="layers cannot fill"):
            split(10, 4, **rest)
    with pytest.raises(ValueError, match="number of pipeline stages must be at least 1, got 0"):
        split(10, 2, first=4, last=5)


@pytest.mark.parametrize(
    ("counts", "flags"),
    [
        ([[2], [3], [2]], ""),
        ([[1], [3], [3]], "--decoder-first-pipeline-num-layers 1"),
        ([[3], [3], [1]], "--decoder-last-pipeline-num-layers 1"),
        ([[1], [3], [1]], "--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1"),
        ([[1], [2], [5], [2]], "--pipeline-model-parallel-layout 'Et|t*2|t*5|t*2L'"),
        ([[0], [4], [1]], "--pipeline-model-parallel-layout 'E|t*4|tL'"),
        ([[1, 2], [3, 1]], "--pipeline-model-parallel-layout 'Et|t*3|t*2|tL'"),
        ([[1, 2], [2, 1]], ""),
    ],
)
def test_the_flags_of_a_split_give_it(counts: list[list[int]], flags: str) -> None:
    """Through the trainer's own reading of its flags."""
    order = [row[chunk] for chunk in range(len(counts[0])) for row in counts]
    pieces = split_by_counts(order, len(counts))
    assert split_flags(pieces) == flags
    chunks = f" --num-virtual-stages-per-pipeline-rank {len(counts[0])}" if len(counts[0]) > 1 and not flags else ""
    flags = flags.replace("'", "")
    line = f"--num-layers {sum(order)} --pipeline-model-parallel-size {len(counts)} {flags}{chunks}"
    config = run(line, drop="--num-layers", world_size=len(counts))
    assert split_of(config) == pieces
