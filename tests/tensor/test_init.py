"""Initial weights: the same whole tensor however it is split, and honest statistics."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from megackpt.mesh.parameter import ParameterRecord
from megackpt.tensor import init
from megackpt.tensor.init import initialise


@dataclass(frozen=True)
class Place:
    """An axis as far as initialisation looks at it: it needs no communication, so none is there."""

    size: int
    index: int


def _shards(
    record: ParameterRecord, tp: int, kind: str = "normal", dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    shards = []
    for index in range(tp):
        parameter = Parameter(torch.full(record.local_shape(tp), float("nan"), dtype=dtype))
        initialise(parameter, record, kind, 0.02, 1234, Place(tp, index))  # type: ignore[arg-type]
        shards.append(parameter.detach())
    return shards


def _whole(record: ParameterRecord, tp: int) -> Tensor:
    shards = _shards(record, tp)
    return shards[0] if record.shard_dim is None else torch.cat(shards, record.shard_dim)


SPLITS = [
    ((96, 40), 0),
    ((40, 96), 1),
    ((2, 48, 40), 1),  # gated
    ((2, 48, 40), 2),
    ((64, 8), None),
    ((96,), 0),
]


@pytest.mark.parametrize("block", [64, 1000, 1 << 18])
@pytest.mark.parametrize(("shape", "shard_dim"), SPLITS)
def test_shards_join_to_the_same_bits_at_every_size(
    shape: tuple[int, ...], shard_dim: int | None, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(init, "BLOCK_ELEMENTS", block)
    record = ParameterRecord(shape, "layers.0.w", shard_dim)
    whole = _whole(record, 1)
    assert torch.isfinite(whole).all()
    for tp in (2, 4):
        assert torch.equal(_whole(record, tp), whole)
        if shard_dim is None:
            assert all(
                torch.equal(shard, whole) for shard in _shards(record, tp)
            )  # replicated: equal everywhere
        else:
            shards = _shards(record, tp)
            assert all(not torch.equal(shards[0], shard) for shard in shards[1:])


def test_padded_rows_are_zero_and_the_others_do_not_depend_on_padding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(init, "BLOCK_ELEMENTS", 100)
    results = []
    for padded, tp in ((50, 1), (64, 1), (64, 2), (64, 4), (96, 4)):
        whole = _whole(ParameterRecord((padded, 10), "embedding.word.weight", 0, valid=50), tp)
        assert not whole[50:].any() and whole[:50].all()
        results.append(whole[:50])
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_padded_columns_are_zero_and_the_others_do_not_depend_on_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "BLOCK_ELEMENTS", 100)
    results = [_whole(ParameterRecord((20, 30), "proj.weight", 1), 1)]
    for padded, tp in ((32, 1), (32, 2), (40, 4), (60, 4)):
        whole = _whole(ParameterRecord((20, padded), "proj.weight", 1, valid=30), tp)
        assert not whole[:, 30:].any()
        results.append(whole[:, :30])
    assert results[0].all() and all(torch.equal(results[0], other) for other in results[1:])


def test_a_shard_of_nothing_but_padding_is_zero() -> None:
    record = ParameterRecord((64, 10), "w", 0, valid=10)
    assert not torch.cat(_shards(record, 4)[1:]).any()
    for kind, value in (("ones", 1.0), ("zeros", 0.0)):
        whole = torch.cat(_shards(record, 4, kind))
        assert (whole[:10] == value).all() and not whole[10:].any()


def test_statistics_and_independence() -> None:
    record = ParameterRecord((1024, 512), "layers.0.w", 0)
    first, second = _shards(record, 2)
    whole = torch.cat([first, second])
    assert abs(whole.std() / 0.02 - 1) < 0.02 and abs(whole.mean()) < 2e-4
    correlation = (first * second).mean() / 0.02**2
    assert abs(correlation) < 0.01
    # other blocks, names and seeds are other numbers
    assert len({float(block[0, 0]) for block in whole.split(init.BLOCK_ELEMENTS // 512)}) == 2
    renamed = _whole(ParameterRecord((1024, 512), "layers.1.w", 0), 1)
    reseeded = Parameter(torch.empty(1024, 512))
    initialise(reseeded, record, "normal", 0.02, 1235, Place(1, 0))  # type: ignore[arg-type]
    for other in (renamed, reseeded.detach()):
        assert abs((whole * other).mean() / 0.02**2) < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_hold_the_same_numbers_rounded(dtype: torch.dtype) -> None:
    record = ParameterRecord((32, 16), "w", 1)
    wide = torch.cat(_shards(record, 2), 1)
    assert torch.equal(torch.cat(_shards(record, 2, dtype=dtype), 1), wide.to(dtype))


def test_only_needed_blocks_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    real = init._draw
    monkeypatch.setattr(init, "BLOCK_ELEMENTS", 80)
    monkeypatch.setattr(init, "_draw", lambda block, *rest: drawn.append(block) or real(block, *rest))
    parameter = Parameter(torch.empty(2, 8, 10))
    initialise(parameter, ParameterRecord((2, 32, 10), "w", 1), "normal", 1.0, 1, Place(4, 1))  # type: ignore[arg-type]
    assert drawn == [range(8, 16), range(40, 48)]


def test_refusals() -> None:
    parameter = Parameter(torch.empty(4, 4))
    with pytest.raises(ValueError, match="unknown kind 'uniform'; choose normal, zeros or ones"):
        initialise(parameter, ParameterRecord((4, 4), "w"), "uniform", 1.0, 1, Place(1, 0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs its global name"):
        initialise(parameter, ParameterRecord((4, 4)), "normal", 1.0, 1, Place(1, 0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is not a shard of \\(8, 4\\) over 1 ranks"):
        initialise(parameter, ParameterRecord((8, 4), "w", 0), "normal", 1.0, 1, Place(1, 0))  # type: ignore[arg-type]
