"""Each collective: values forward and backward, kinds and bytes of the calls, nothing saved, nothing changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megackpt.mesh.process_mesh import Axis, single_axis
from megackpt.tensor import collectives as c
from tests.pool import run_distributed
from tests.tensor.probes import collectives, random, saved, world_axis

S, B, H = 8, 2, 3
WHOLE = S * B * H * 8  # bytes in fp64


def _run(
    function: Callable[[Tensor, Axis], Tensor], x: Tensor, grad: Tensor, axis: Axis
) -> dict[str, object]:
    x = x.clone().requires_grad_()
    before, version = x.detach().clone(), x._version
    with collectives() as forward, saved() as kept:
        y = function(x, axis)
    with collectives() as backward:
        y.backward(grad)
    assert torch.equal(x, before) and x._version == version and not kept
    return {"y": y.detach(), "grad": x.grad, "forward": forward, "backward": backward}


def _everything(rank: int, world_size: int) -> None:
    axis = world_axis(rank, world_size)
    share = slice(rank * S // world_size, (rank + 1) * S // world_size)
    whole = [random(S, B, H, seed=i) for i in range(world_size)]  # what each rank holds
    grads = [random(S, B, H, seed=10 + i) for i in range(world_size)]
    gather, scatter = ("all_gather_into_tensor", WHOLE), ("reduce_scatter_tensor", WHOLE)
    reduce = ("all_reduce", WHOLE)
    total, grad_total = sum(whole), sum(grads)
    assert isinstance(total, Tensor) and isinstance(grad_total, Tensor)

    def check(
        name: str, x: Tensor, grad: Tensor, y: Tensor, grad_x: Tensor, forward: object, backward: object
    ) -> None:
        # also from memory laid out otherwise, as transposed views and expanded gradients are
        for swap in (lambda t: t, lambda t: t.transpose(0, 1).contiguous().transpose(0, 1)):
            got = _run(getattr(c, name), swap(x), swap(grad), axis)
            torch.testing.assert_close(got["y"], y, rtol=1e-14, atol=1e-14)
            torch.testing.assert_close(got["grad"], grad_x, rtol=1e-14, atol=1e-14)
            assert (got["forward"], got["backward"]) == (forward, backward), name

    part, grad_part = whole[0][share], grads[0][share]  # shards of one tensor that all know
    check("gather_sequence", part, grads[rank], whole[0], grad_total[share], [gather], [scatter])
    check("reduce_scatter_sequence", whole[rank], grad_part, total[share], grads[0], [scatter], [gather])
    check("split_sequence", whole[0], grad_part, part, grads[0], [], [gather])
    check("reduce_from_tp", whole[rank], grads[0], total, grads[0], [reduce], [])
    check("copy_to_tp", whole[0], grads[rank], whole[0], grad_total, [], [reduce])

    assert c.split_sequence(whole[0], axis).untyped_storage().nbytes() == WHOLE // world_size
    out, work = c.launch_gather(part, axis)
    assert work is not None
    work.wait()
    assert torch.equal(out, whole[0])
    with pytest.raises(ValueError, match="sequence of 7 does not divide"):
        c.reduce_scatter_sequence(whole[0][:7], axis)
    low = c.reduce_from_tp(whole[rank].bfloat16(), axis)
    assert low.dtype == torch.bfloat16


@pytest.mark.parametrize("world_size", [2, 4])
def test_values_gradients_and_calls(world_size: int) -> None:
    run_distributed(_everything, world_size)


@pytest.mark.parametrize(
    "name", ["gather_sequence", "reduce_scatter_sequence", "split_sequence", "reduce_from_tp", "copy_to_tp"]
)
def test_one_rank_is_the_identity_itself(name: str) -> None:
    x = torch.randn(3, 2, requires_grad=True)
    assert getattr(c, name)(x, single_axis()) is x
    assert c.launch_gather(x, single_axis()) == (x, None)
