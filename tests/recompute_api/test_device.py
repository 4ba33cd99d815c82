"""The library face on a GPU: Philox offsets, autocast, the device's own backward thread, the allocator's peak."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megackpt.plan import ChunkPlan, Decision, SaveSet
from megackpt.recompute import RngLedger, Tape, VerifyError, checkpoint, fit, measure, step
from megackpt.recompute.verify import RNG
from tests.recompute_api.oracle import by_torch, plainly

pytestmark = pytest.mark.gpu
DROP = ChunkPlan({"": SaveSet({}, Decision("keep", "replay"))})


def block(width: int = 64) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.3),
                         nn.Linear(4 * width, width), nn.Dropout(0.1)).cuda()  # fmt: skip


def leaves(loss_of: Any, parameters: list[Tensor], call: Any) -> list[Tensor]:
    torch.manual_seed(7)
    gradients = torch.autograd.grad(loss_of(call), parameters)
    return [*gradients, torch.cuda.get_rng_state()]


@pytest.mark.parametrize("autocast", [False, True])
def test_dropout_and_autocast(autocast: bool) -> None:
    net = block()
    x = torch.randn(8, 64, device="cuda", requires_grad=True)

    def loss(call: Any) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            return call(net, call(net, x)).float().pow(2).sum()

    plain = leaves(loss, [x, *net.parameters()], plainly)
    for call in (checkpoint, by_torch):
        assert all(torch.equal(a, b) for a, b in zip(plain, leaves(loss, [x, *net.parameters()], call), strict=True))


def test_fused_attention_with_dropout() -> None:
    x = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def attention(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q * 2, q, dropout_p=0.2, is_causal=True)

    plain = leaves(lambda call: call(attention, x).float().sum(), [x], plainly)
    ours = leaves(lambda call: call(attention, x).float().sum(), [x], checkpoint)
    assert torch.equal(plain[-1], ours[-1])  # the generator ends where it would
    assert torch.allclose(plain[0].float(), ours[0].float(), atol=1e-2)  # its backward adds in any order


def test_a_side_stream() -> None:
    """The forward ran on another stream than the default one; autograd takes its backward, and so the replay, there."""
    net = block().eval()
    x = torch.randn(8, 64, device="cuda", requires_grad=True)
    plain = torch.autograd.grad(net(x).sum(), x)[0]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        loss = checkpoint(net, x).sum()
    torch.cuda.current_stream().wait_stream(stream)
    gradient = torch.autograd.grad(loss, x)[0]
    torch.cuda.synchronize()
    assert torch.equal(plain, gradient)


def test_measured_and_under_budget() -> None:
    modules = [block() for _ in range(6)]
    net = nn.Sequential(*modules)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    x = torch.randn(512, 64, device="cuda")
    profile = measure(modules[0], x).modules[0]
    assert profile.output_bytes == 512 * 64 * 4 and profile.forward_flops == 2 * 2 * 512 * 64 * 256
    everything = fit(modules, x, budget_bytes=1 << 60)
    assert everything.predicted is not None
    budget = (everything.least_bytes() + everything.predicted.peak_bytes) // 2
    fitted = fit(modules, x, budget_bytes=budget)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated() - x.nbytes
    torch.cuda.reset_peak_memory_stats()
    out = fitted(x)
    loss = out.sum()
    del out
    loss.backward()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= budget + 512 * 64  # the allocator rounds each tensor to 512


def test_verify_names_the_generator() -> None:
    x = torch.randn(8, 64, device="cuda", requires_grad=True)
    with Tape(DROP, RngLedger(defaults=False), verify=True):
        loss = step("a", lambda t: F.dropout(t.sin(), 0.5).sum(), x)
    with pytest.raises(VerifyError) as error:
        loss.backward()
    assert error.value.cause == RNG
