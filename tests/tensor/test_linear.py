"""Our linear against F.linear, what it saves, the sink, and both layers against the unsplit layer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from megackpt.mesh.parameter import gather_full, record_of, records
from megackpt.mesh.process_mesh import single_axis
from megackpt.mesh.sink import AutogradSink, GradientSink
from megackpt.tensor import linear as module
from megackpt.tensor.collectives import gather_sequence, reduce_from_tp, reduce_scatter_sequence
from megackpt.tensor.linear import ColumnLinear, RowLinear, linear
from tests.pool import run_distributed
from tests.tensor.probes import collectives, error, random, saved, tensor_parallel, world_axis

S, B, IN, OUT = 6, 3, 8, 12


def _inputs(dtype: torch.dtype, *, contiguous: bool) -> tuple[Tensor, Parameter, Parameter]:
    x = random(S, B, IN, seed=1, dtype=dtype)
    if not contiguous:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    return (
        x.requires_grad_(),
        Parameter(random(OUT, IN, seed=2, dtype=dtype)),
        Parameter(random(OUT, seed=3, dtype=dtype)),
    )


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equals_torch(dtype: torch.dtype, with_bias: bool, contiguous: bool) -> None:
    grad = random(S, B, OUT, seed=4, dtype=dtype)
    results = []
    for ours in (True, False):
        x, weight, bias = _inputs(dtype, contiguous=contiguous)
        b = bias if with_bias else None
        y = linear(x, weight, b, AutogradSink()) if ours else F.linear(x, weight, b)
        assert y.is_contiguous()
        y.backward(grad)
        assert x.grad is not None and weight.grad is not None
        results.append([y.detach(), x.grad, weight.grad, *([bias.grad] if with_bias else [])])
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    for got, wanted in zip(*results, strict=True):
        assert got.dtype == dtype and error(got.double(), wanted.double()) <= tolerance


def test_saves_the_input_as_passed_and_the_weight() -> None:
    x, weight, bias = _inputs(torch.float32, contiguous=False)
    with saved() as kept:
        linear(x, weight, bias, AutogradSink())
    assert [t.untyped_storage().data_ptr() for t in kept] == [
        x.untyped_storage().data_ptr(),
        weight.untyped_storage().data_ptr(),
    ]
    assert (kept[0].shape, kept[0].stride()) == (x.shape, x.stride())


def test_gradients_that_nobody_needs_are_not_computed() -> None:
    class Refusing(GradientSink):
        def weight_gradient(self, weight: Parameter, grad_output: Tensor, input: Tensor) -> Tensor | None:
            raise AssertionError("a frozen weight has no gradient")

    x, weight, bias = _inputs(torch.float32, contiguous=True)
    weight.requires_grad_(False)
    linear(x, weight, bias, Refusing()).sum().backward()
    assert x.grad is not None and bias.grad is not None and weight.grad is None

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        products = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
            return func(*args, **(kwargs or {}))

    for needs_input_gradient in (True, False):
        x, weight, bias = _inputs(torch.float32, contiguous=True)
        x = x.detach().requires_grad_(needs_input_gradient)
        y = linear(x, weight, bias, AutogradSink())
        with Counting() as counter:
            y.sum().backward()
        assert counter.products == 1 + needs_input_gradient


def test_the_sink_gets_the_parameter_and_two_matrices_even_under_hooks() -> None:
    calls = []

    class Keeping(GradientSink):
        def weight_gradient(self, weight: Parameter, grad_output: Tensor, input: Tensor) -> Tensor | None:
            calls.append((weight, grad_output.shape, input.shape))
            return None

    x = random(S, B, IN, seed=1, dtype=torch.float32)
    weight = Parameter(random(2, OUT // 2, IN, seed=2, dtype=torch.float32))
    with saved():
        y = linear(x, weight, None, Keeping())
    assert torch.equal(y, F.linear(x, weight.view(OUT, IN)))
    y.sum().backward()
    assert len(calls) == 1 and calls[0][0] is weight and weight.grad is None
    assert calls[0][1:] == ((S * B, OUT), (S * B, IN))


def test_an_unwanted_product_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(module, "product_wanted", lambda packs: asked.append(packs))  # None: not wanted
    monkeypatch.setattr(torch, "addmm", None)
    x, weight, bias = _inputs(torch.float32, contiguous=True)
    with saved() as kept:
        y = linear(x, weight, bias, AutogradSink())
    assert y.shape == (S, B, OUT) and asked == [2] == [len(kept)]


# -- split layers ------------------------------------------------------------------------------------------------


def _mlp(rank: int, world_size: int, sp: bool, gated: bool, bias: bool) -> dict[str, object]:
    """Column, a nonlinearity, row, reduction, bias: forward, backward, gathered gradients."""
    axis = world_axis(rank, world_size)
    tp = tensor_parallel(axis, sequence_parallel=sp and world_size > 1)
    up = ColumnLinear(tp, 8, 32, name="mlp.up", std=0.5, gated=gated, bias=bias)
    down = RowLinear(tp, 16 if gated else 32, 8, name="mlp.down", std=0.5, bias=bias)
    with torch.no_grad():
        for parameter in (up.bias, down.bias):
            if parameter is not None:
                record = record_of(parameter, "b")
                full = random(*record.global_shape, seed=5)
                dim = record.shard_dim
                parameter.copy_(full if dim is None else full.chunk(world_size, dim)[rank])
    s = 8
    share = (
        slice(rank * s // world_size, (rank + 1) * s // world_size) if tp.sequence_parallel else slice(None)
    )
    x = random(s, 2, 8, seed=6)[share].clone().requires_grad_()
    grad = random(s, 2, 8, seed=7)[share]
    with collectives() as forward:
        hidden = up(gather_sequence(x, axis) if tp.sequence_parallel else x)
        if gated:
            gate, value = hidden.chunk(2, -1)
            hidden = F.silu(gate) * value
        else:
            hidden = F.gelu(hidden)
        y = down(hidden)
        y = reduce_scatter_sequence(y, axis) if tp.sequence_parallel else reduce_from_tp(y, axis)
        if down.bias_after is not None:
            y = y + down.bias_after
    with collectives() as backward:
        y.backward(grad)
    gradients = {}
    for parameter, record in records([*up.named_parameters("up"), *down.named_parameters("down")]):
        assert parameter.grad is not None
        value = parameter.grad
        if record.partial_under_sp and tp.sequence_parallel:
            torch.distributed.all_reduce(value)
        gradients[record.name] = gather_full(value, record, axis)
    rows = (y.detach(), x.grad) if tp.sequence_parallel else (y.detach()[:], x.grad)
    return {"y": rows[0], "x": rows[1], "gradients": gradients, "forward": forward, "backward": backward}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("world_size", "sp"), [(2, False), (2, True), (4, True)])
def test_column_and_row_equal_the_unsplit_layers(world_size: int, sp: bool, gated: bool, bias: bool) -> None:
    (whole,) = run_distributed(_mlp, 1, sp, gated, bias)
    parts = run_distributed(_mlp, world_size, sp, gated, bias)
    assert whole["forward"] == whole["backward"] == []
    size = 8 * 2 * 8 * 8  # bytes of [s, b, h] in fp64
    for part in parts:
        if sp:
            gather, scatter = ("all_gather_into_tensor", size), ("reduce_scatter_tensor", size)
            assert part["forward"] == [gather, scatter]
            assert part["backward"] == [gather, scatter]
        else:
            assert part["forward"] == part["backward"] == [("all_reduce", size)]
        for name, gradient in whole["gradients"].items():
            assert error(part["gradients"][name], gradient) <= 1e-12, name
    for key in ("y", "x"):
        joined = [torch.cat([part[key] for part in parts])] if sp else [part[key] for part in parts]
        assert all(error(one, whole[key]) <= 1e-12 for one in joined)


def test_records_of_the_layers() -> None:
    tp = tensor_parallel(single_axis())
    column = ColumnLinear(tp, 4, 12, name="up", std=0.1, gated=True)
    row = RowLinear(tp, 6, 4, name="down", std=0.1)
    found = {
        record.name: record
        for _, record in records([*column.named_parameters("up"), *row.named_parameters("down")])
    }
    assert {
        name: (r.global_shape, r.shard_dim, r.partial_under_sp, r.decay) for name, r in found.items()
    } == {
        "up.weight": ((2, 6, 4), 1, False, True),
        "up.bias": ((2, 6), 1, False, False),
        "down.weight": ((4, 6), 1, False, True),
        "down.bias": ((4,), None, True, False),
    }
    head = ColumnLinear(tp, 4, 8, name="head", std=None, bias=False, tied=True, counted=False, valid=5)
    record = record_of(head.weight, "head.weight")  # the record stands although nothing was initialised
    assert (record.tied, record.counted, record.valid) == (True, False, 5)
    with pytest.raises(ValueError, match="up: 10 output features do not divide into 2 x 2 shards"):
        two = tensor_parallel(world_axis_of_two())
        ColumnLinear(two, 4, 10, name="up", std=None, gated=True)
    with pytest.raises(ValueError, match="down: 5 input features do not divide into 2 shards"):
        RowLinear(tensor_parallel(world_axis_of_two()), 5, 4, name="down", std=None)


def world_axis_of_two():  # type: ignore[no-untyped-def]
    class Lonely:
        size, index, ranks, group = 2, 0, (0, 1), None

    return Lonely()
