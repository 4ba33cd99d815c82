"""Every layer on exactly one stage (PP-01), the remainder in the middle."""

from __future__ import annotations

import pytest

from megackpt.plan.split import split_layers


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
