"""Parameter records, shards and the default gradient sink."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn import Linear, Module, Parameter

from megackpt.mesh.parameter import ParameterRecord, annotate, gather_full, local_shard, record_of, records
from megackpt.mesh.process_mesh import Axis, single_axis
from megackpt.mesh.sink import AutogradSink, GradientSink
from tests.pool import run_distributed


class Pair(Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = annotate(
            Parameter(torch.zeros(2, 3)), global_shape=(2, 12), shard_dim=1, tied=True, counted=False
        )
        self.b = annotate(Parameter(torch.zeros(3)), decay=False, partial_under_sp=True)


def test_records_carry_global_names_in_order() -> None:
    root = Module()
    root.layer = Pair()
    found = records(root.named_parameters())
    assert [parameter is p for (parameter, _), p in zip(found, root.parameters(), strict=True)] == [
        True,
        True,
    ]
    assert [record for _, record in found] == [
        ParameterRecord((2, 12), "layer.a", shard_dim=1, tied=True, counted=False),
        ParameterRecord((3,), "layer.b", partial_under_sp=True, decay=False),
    ]
    assert found[0][1].local_shape(4) == (2, 3)
    assert found[1][1].local_shape(4) == (3,)


def test_a_parameter_without_a_record_is_an_error() -> None:
    with pytest.raises(ValueError, match="'weight' of shape \\(2, 2\\) has no record"):
        records(Linear(2, 2).named_parameters())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"global_shape": (4, 8), "shard_dim": None}, "no shard of"),
        ({"global_shape": (5, 3), "shard_dim": 0}, "no shard of"),
        ({"global_shape": (2, 3, 1), "shard_dim": 0}, "no shard of"),
        ({"global_shape": (2, 3), "shard_dim": 2}, "no dimension 2"),
        ({"shard_dim": 0}, "needs its global shape"),
        ({"valid": 3}, "3 of dimension 0 valid"),
        ({"valid": 4, "global_shape": (2, 3), "shard_dim": 1}, "4 of dimension 1 valid"),
    ],
)
def test_impossible_records_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        annotate(Parameter(torch.zeros(2, 3)), **fields)  # type: ignore[arg-type]


def _gather(rank: int, world_size: int, shape: tuple[int, ...], shard_dim: int | None) -> bool:
    axis = Axis(world_size, rank, tuple(range(world_size)), dist.group.WORLD)
    full = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    record = ParameterRecord(shape, "w", shard_dim)
    shard = local_shard(full, record, axis)
    assert tuple(shard.shape) == record.local_shape(world_size)
    whole = gather_full(Parameter(shard.clone()), record, axis)
    assert not whole.requires_grad
    strided = gather_full(
        shard.t() if shard.dim() == 2 else shard, ParameterRecord(shape[::-1], "w", 0), axis
    )
    return torch.equal(whole, full) and (shard.dim() != 2 or shard_dim != 1 or torch.equal(strided, full.t()))


@pytest.mark.parametrize(
    ("shape", "shard_dim"), [((8, 3), 0), ((3, 8), 1), ((2, 8, 3), 1), ((8,), 0), ((3, 5), None)]
)
def test_shards_gather_into_the_whole(shape: tuple[int, ...], shard_dim: int | None) -> None:
    assert run_distributed(_gather, 4, shape, shard_dim) == [True] * 4


def test_gathering_on_one_rank_needs_no_group() -> None:
    local = torch.arange(6.0).reshape(2, 3)
    assert gather_full(local, ParameterRecord((2, 3), "w", 0), single_axis()).data_ptr() == local.data_ptr()


def test_autograd_sink_returns_the_product_shaped_like_the_weight() -> None:
    weight = Parameter(torch.zeros(2, 3, 4))
    grad, x = torch.randn(5, 6), torch.randn(5, 4)
    got = AutogradSink().weight_gradient(weight, grad, x)
    assert got is not None and torch.equal(got, (grad.t() @ x).reshape(2, 3, 4))
    with pytest.raises(TypeError):
        GradientSink()  # type: ignore[abstract]


def test_records_survive_a_change_of_type() -> None:
    module = Pair()
    before = record_of(module.a, "a")
    module.to(torch.float64)
    assert record_of(module.a, "a") == before
