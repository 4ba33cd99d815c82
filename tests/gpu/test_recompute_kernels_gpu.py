"""The replay engine around a GPU's own code: autocast, fused attention, copies to the host, whole models.

Kernels are queued, so a tier copies what is not computed yet; the thread that replays has no autocast of its own; the
fused kernel draws its dropout itself.  Every comparison is to the bit.
"""

from __future__ import annotations

import random
import time
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megackpt.mesh.sink import AutogradSink
from megackpt.model import build_chunk
from megackpt.model.core import fused_core
from megackpt.plan import ChunkPlan, Decision, Plan
from megackpt.recompute import KeptBytes, RngLedger, Stream, Tape, checkpoint, step
from megackpt.recompute.tiers import HostTier
from megackpt.tensor.context import REPLICATED, TENSOR, TensorParallel
from tests.gpu.harness import DEVICE, assert_equal, generator, late, leaves_of, numbers
from tests.recompute.harness import ONLY_OUTPUT, decisions_for, plan
from tests.recompute.models import VOCAB, B, Subject
from tests.recompute.test_random_plans import config, random_plan

pytestmark = pytest.mark.gpu
MIB = 1 << 20


# -- autocast and fused attention ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
def test_autocast(dtype: torch.dtype, inside: bool) -> None:
    """fp32 weights, one of them used outside and inside of a step: the cache is warm in the forward, cold in the
    replay, and the thread that replays has no autocast of its own."""
    x, w, v = numbers(64, 64), numbers(64, 64, seed=2) / 8, numbers(64, 64, seed=3) / 8

    def body(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        y = F.linear(x, w)
        y = step("a", lambda y, w, v: F.gelu(F.linear(F.linear(y, w), v)), y, w, v)
        y = step("b", lambda y: F.dropout(torch.softmax(y, -1), 0.2), y)
        return checkpoint(lambda y: F.linear(y, w).tanh(), y)

    def run(chunk: ChunkPlan | None) -> list[Tensor]:
        fresh = [leaf.clone().requires_grad_() for leaf in (x, w, v)]
        torch.manual_seed(7)
        with torch.autocast("cuda", dtype):
            with nullcontext() if chunk is None else Tape(chunk):
                loss = body(*fresh).float().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return [loss.detach(), *(leaf.grad for leaf in fresh if leaf.grad is not None)]

    with torch.autocast("cuda", dtype):
        assert F.linear(x, w).dtype == dtype
    for name, chunk in decisions_for("a", "b").items():
        assert_equal(run(chunk), run(None), name)


def flash() -> AbstractContextManager[object]:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("flash attention needs compute capability 8.0")
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION)


@pytest.mark.parametrize("owned", [False, True], ids=["default generator", "own stream"])
@pytest.mark.parametrize("p", [0.0, 0.2])
def test_fused_attention(p: float, owned: bool) -> None:
    """The kernel's dropout is drawn again from seed and offset; in the model the stream is lent to it."""
    a, d, s = 4, 64, 128
    x, w = numbers(s, 2, a * d, dtype=torch.bfloat16), numbers(3 * a * d, a * d, seed=2, dtype=torch.bfloat16) / 16

    def run(chunk: ChunkPlan | None) -> list[Tensor]:
        ledger = RngLedger(defaults=not owned)
        stream = ledger.register(Stream("s", 3, DEVICE))

        def core(packed: Tensor) -> Tensor:
            if owned:
                return fused_core(packed, a, p, stream)
            q, k, v = packed.permute(1, 2, 0, 3, 4).unbind(3)  # [b, a, s, d]
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
            return out.permute(2, 0, 1, 3).flatten(2)

        def body(x: Tensor, w: Tensor) -> Tensor:
            packed = step("qkv", lambda x, w: F.linear(x, w).view(s, 2, a, 3, d), x, w)
            return step("after", lambda y: y * y, step("core", core, packed))

        with flash():
            return [*leaves_of(body, [x, w], chunk, ledger=ledger), torch.tensor(stream.position)]

    plain = run(None)
    assert_equal(run(None), plain, "the kernels themselves")
    for name, chunk in decisions_for("qkv", "core", "after").items():
        assert_equal(run(chunk), plain, name)


# -- tiers and whole models ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [0.0, 0.003])
@pytest.mark.parametrize("decision", [Decision("offload_host"), Decision("keep", "offload_host"), ONLY_OUTPUT])
def test_host_tier_copies_what_the_device_has_yet_to_compute(decision: Decision, delay: float) -> None:
    x, w = numbers(512, 512), numbers(512, 512, seed=2) / 22

    def body(x: Tensor, w: Tensor) -> Tensor:
        torch.cuda._sleep(20_000_000)  # the writer gets its work long before the kernels have run
        return late(x, w)

    plain = leaves_of(late, [x, w], None)
    with HostTier(delay) as tier:
        found = leaves_of(body, [x, w], plan(decision), tiers={"offload_host": tier}, ledger=RngLedger())
    assert_equal(found, plain)


def test_host_tier_frees_the_device() -> None:
    x = torch.ones(MIB, device=DEVICE).requires_grad_()  # 4 MiB
    away = plan(Decision("offload_host"))
    with HostTier() as tier, Tape(away, tiers={"offload_host": tier}, account=KeptBytes()) as tape:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y = step("a", lambda x: x + 1.0, x)
        loss = step("b", torch.sin, y).sum()
        del y
        deadline = time.monotonic() + 10.0
        while torch.cuda.memory_allocated() - before > 4096:  # the loss, and what the allocator rounds it to
            assert time.monotonic() < deadline, f"{torch.cuda.memory_allocated() - before} bytes stay"
            time.sleep(0.001)
        assert sum(tape.kept_now().values()) == 0
    loss.backward()
    assert x.grad is not None and x.grad.device.type == "cuda"
    assert torch.equal(x.grad, (x.detach() + 1.0).cos())


class OnDevice(Subject):
    """The product's GPT on the GPU."""

    def __post_init__(self) -> None:
        self.ledger = RngLedger()
        self.ledger.register(Stream(REPLICATED, 11, DEVICE))
        self.ledger.register(Stream(TENSOR, 100, DEVICE))
        tp = TensorParallel(self.axis, False, self.ledger, AutogradSink(), self.dtype, DEVICE, 1234)
        layers = range(self.config.num_layers)
        self.chunk = build_chunk(self.config, tp, VOCAB, layers, first=True, last=True)
        ids = torch.randint(0, VOCAB, (B, self.config.seq_length + 1), generator=torch.Generator().manual_seed(5))
        self.tokens, self.labels = ids.to(DEVICE)[:, :-1], ids.to(DEVICE)[:, 1:]


def outcome(subject: Subject, chunk: ChunkPlan | None, tier: HostTier) -> list[Tensor]:
    """Loss, gradients by name, positions of the streams, state of the default generator."""
    subject.reset()
    with nullcontext() if chunk is None else Tape(chunk, subject.ledger, tiers={"offload_host": tier}):
        losses = subject.chunk(subject.tokens, subject.labels)
    loss = losses.sum()
    del losses
    loss.backward()
    named = sorted((name, p.grad.clone()) for name, p in subject.chunk.named_parameters() if p.grad is not None)
    positions = torch.tensor(list(subject.ledger.state_dict().values()))
    return [loss.detach(), *(gradient for _, gradient in named), positions, generator().get_state()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("number", range(4))
def test_random_plans(number: int, dtype: torch.dtype) -> None:
    """Both families, both cores, dropout on; random decisions, trees of groups and tiers."""
    subject = OnDevice(config(number, seq_length=12, max_position_embeddings=12), dtype=dtype)
    rng = random.Random(number)
    with HostTier() as tier:
        plain = outcome(subject, None, tier)
        assert_equal(outcome(subject, None, tier), plain, "the kernels themselves")
        for count in range(25):
            chunk = random_plan(rng, tiers=count % 3 == 0)
            assert_equal(outcome(subject, chunk, tier), plain, f"plan {count}: {Plan(((chunk,),)).dumps()}")
