"""What else people wrap around a model, or put into it: DDP, FSDP2, torch.compile, custom functions, tied weights."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from megackpt.recompute import (
    ReplayError,
    Tape,
    apply,
    checkpoint,
    save_nothing,
    save_only_these_names,
    sequential,
    step,
)
from tests.pool import run_distributed
from tests.recompute_api.oracle import assert_same, by_torch, outcome, plainly


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(self.up(self.norm(x)).sin()))


class Tied(nn.Module):
    """Tied embeddings (AR-09), a parameter nobody uses, two blocks run under ``call``."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Parameter(torch.randn(11, 8) / 3)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.spare = nn.Parameter(torch.randn(3))
        self.call = call

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table[ids]
        for block in self.blocks:
            x = self.call(block, x)
        return self.call(torch.matmul, x, self.table.t())


def whole_sequential(fn: Any, *args: Any) -> Any:
    return sequential([fn], *args, segments=1) if len(args) == 1 else checkpoint(fn, *args)


WAYS = {"plain": plainly, "torch": by_torch, "checkpoint": checkpoint, "sequential": whole_sequential}


def two_micro_batches(model: nn.Module, rank: int) -> list[Tensor | None]:
    """Gradients after two micro-batches with accumulation, DDP's buckets reduced in the second."""
    for micro_batch in range(2):
        torch.manual_seed(10 * rank + micro_batch)
        ids = torch.randint(0, 11, (5,))
        sync = micro_batch == 1 or not isinstance(model, DistributedDataParallel)
        with torch.enable_grad() if sync else model.no_sync():  # type: ignore[operator]
            model(ids).log_softmax(-1)[:, 0].sum().backward()
    return [p.grad for p in model.parameters()]


def ddp(rank: int, world_size: int) -> dict[str, list[Tensor | None]]:
    return {
        name: two_micro_batches(DistributedDataParallel(Tied(call), find_unused_parameters=True), rank)
        for name, call in WAYS.items()
    }


def test_ddp() -> None:
    results = run_distributed(ddp, 2)
    for gradients in results:
        for name in WAYS:
            assert same(gradients[name], results[0]["plain"]), name
    single = Tied(plainly)
    sums: list[Tensor] = []
    for rank in range(2):
        single.zero_grad()
        sums.append(two_micro_batches(single, rank)[0].clone())  # type: ignore[union-attr]
    assert torch.allclose((sums[0] + sums[1]) / 2, results[0]["plain"][0])


def same(a: list[Tensor | None], b: list[Tensor | None]) -> bool:
    return all((x is None) == (y is None) and (x is None or torch.equal(x, y)) for x, y in zip(a, b, strict=True))


class Stack(nn.Module):
    """Blocks between two linear layers; each block is called through ``call``."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(8, 4)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.call(block, x)
        return self.last(x)


def fsdp(rank: int, world_size: int) -> dict[str, list[Tensor]]:
    """Recompute around each wrapped block (its hooks gather parameters in the replay), in its forward, and by a plan
    for what is inside."""
    results = {}
    for name in (*WAYS, "in its forward", "plan"):
        model = Stack(WAYS.get(name, plainly))
        if name == "plan":
            apply(save_only_these_names("down"), model, ["blocks.*.*"])
        for block in model.blocks:
            if name == "in its forward":
                block.forward = recomputed(block.forward)  # type: ignore[method-assign]
            fully_shard(block)
        fully_shard(model)
        assert isinstance(model, FSDPModule)
        for micro_batch in range(2):
            torch.manual_seed(10 * rank + micro_batch)
            model(torch.randn(4, 8)).pow(2).sum().backward()
        results[name] = [p.grad.full_tensor() for p in model.parameters()]  # type: ignore[union-attr]
    return results


def recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: checkpoint(forward, *args)


def test_fsdp2() -> None:
    for gradients in run_distributed(fsdp, 2):
        for name, values in gradients.items():
            assert all(torch.equal(a, b) for a, b in zip(values, gradients["plain"], strict=True)), name


class TestCompile:
    """RC-10: the function of a step is compiled once and serves forward and replay; a step inside a compiled function
    breaks the graph and nothing else."""

    @pytest.fixture(autouse=True)
    def _fresh(self) -> Any:
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    def test_the_function_of_a_region(self) -> None:
        torch.manual_seed(1)
        block, x = Block().eval(), torch.randn(4, 8, requires_grad=True)
        compiled = torch.compile(block, backend="aot_eager")
        leaves = [x, *block.parameters()]
        assert_same(lambda call: call(compiled, call(compiled, x)).pow(2).sum(), leaves, torch_too=False)

    def test_a_region_inside_a_compiled_function(self) -> None:
        torch.manual_seed(1)
        block, x = Block().eval(), torch.randn(4, 8, requires_grad=True)

        def fn(call: Any, a: Tensor) -> Tensor:
            return call(block, a.sin() * 2).cos() + a

        def loss(call: Any) -> Tensor:
            return (fn(plainly, x) if call is plainly else torch.compile(fn, backend="aot_eager")(call, x)).sum()

        plain = outcome(loss, [x, *block.parameters()], plainly)
        outcome(loss, [x, *block.parameters()], checkpoint).assert_equal(plain)

    def test_steps_and_their_tape_inside_a_compiled_function(self) -> None:
        torch.manual_seed(1)
        block, x = Block().eval(), torch.randn(4, 8, requires_grad=True)

        def fn(a: Tensor) -> Tensor:
            with Tape(save_only_these_names("second")):
                return step("second", block, step("first", block, a.sin() * 2).cos())

        plain = outcome(lambda _: block(block(x.sin() * 2).cos()).sum(), [x, *block.parameters()], None)
        compiled = torch.compile(fn, backend="aot_eager")
        outcome(lambda _: compiled(x).sum(), [x, *block.parameters()], None).assert_equal(plain)


class Scale(torch.autograd.Function):
    """Saves its input and output, and something on the context that no hook sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        out = x.sin() * factor
        ctx.save_for_backward(x, out)
        ctx.factor = factor
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        x, out = ctx.saved_tensors
        return grad * x.cos() * ctx.factor + out * 0, None


def test_custom_functions() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    assert_same(lambda call: call(lambda a: Scale.apply(Scale.apply(a.exp(), 2.0).tanh(), 3.0), x).sum(), [x])


def test_frozen_parameters_and_prefixes() -> None:
    torch.manual_seed(1)
    blocks = nn.ModuleList(Block() for _ in range(3))
    blocks[0].requires_grad_(False)
    blocks[2].up.requires_grad_(False)
    x = torch.randn(4, 8)

    def loss(call: Any) -> Tensor:
        h = x
        for block in blocks:
            h = call(block, h)
        return h.pow(2).sum()

    assert_same(loss, list(blocks.parameters()))
    assert blocks[0].norm.weight.grad is None and blocks[2].up.weight.grad is None


def test_freezing_between_forward_and_backward_is_noticed() -> None:
    """The replay would save another number of tensors."""
    block = Block()
    loss = checkpoint(block, torch.randn(4, 8, requires_grad=True)).sum()
    block.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"checkpoint\(Block\)"):
        loss.backward()


def test_tied_parameters_inside_and_outside() -> None:
    torch.manual_seed(1)
    linear, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)

    def loss(call: Any) -> Tensor:
        return linear(call(lambda a: linear(linear(a).sin()), linear(x))).exp().sum()

    assert_same(loss, [x, *linear.parameters()])


def test_recurrent_cells_and_attention() -> None:
    torch.manual_seed(1)
    gru, attention = nn.GRU(8, 8, 2, dropout=0.3), nn.MultiheadAttention(8, 2, dropout=0.1)
    x = torch.randn(5, 3, 8, requires_grad=True)

    def loss(call: Any) -> Tensor:
        out, hidden = call(gru, x)
        mixed, weights = call(attention, out, out, out)  # one tensor three times: `query is key` must stay true
        return mixed.sin().sum() + hidden.exp().sum() + weights.pow(2).sum()

    leaves = [x, *gru.parameters(), *attention.parameters()]
    plain = outcome(loss, leaves, plainly)
    outcome(loss, leaves, checkpoint).assert_equal(plain)


def test_anomaly_mode_and_accumulation() -> None:
    torch.manual_seed(1)
    block = Block()

    def loss(call: Any) -> Tensor:
        with torch.autograd.set_detect_anomaly(True):
            first = call(block, torch.ones(4, 8)).sum()
            first.backward()
        return call(block, torch.full((4, 8), 2.0)).pow(2).sum()

    assert_same(loss, list(block.parameters()))


def test_parameters_that_functional_call_gives() -> None:
    """They are gone when the replay runs, which would use the module's own without a word.  As arguments they are as
    any other, through steps of an optimizer too that are differentiated themselves."""
    torch.manual_seed(1)
    block, x = Block(), torch.randn(4, 8, requires_grad=True)
    block.drop.p = 0.0
    doubled = {name: (2 * p.detach()).requires_grad_() for name, p in block.named_parameters()}
    inside = nn.ModuleDict({"block": block})
    inside.forward = lambda x: checkpoint(block, x)  # type: ignore[method-assign]
    given = {f"block.{name}": p for name, p in doubled.items()}
    with pytest.raises(ReplayError, match="is a parameter, in forward it was a tensor in its place"):
        torch.func.functional_call(inside, given, (x,)).sum().backward()
    with apply(save_nothing(), block), pytest.raises(ReplayError, match="is a parameter, in forward it was"):
        torch.func.functional_call(block, doubled, (x,)).sum().backward()

    def loss(call: Any) -> Tensor:
        weights: dict[str, Tensor] = dict(block.named_parameters())
        for _ in range(2):
            inner = call(torch.func.functional_call, block, weights, (x,)).pow(2).sum()
            steps = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
            weights = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), steps, strict=True)}
        outer: Tensor = call(torch.func.functional_call, block, weights, (x,)).pow(2).sum()
        return outer

    assert_same(loss, [x, *block.parameters()])


def test_partial_gradients() -> None:
    """`torch.autograd.grad` of one input replays what it needs, and again for another."""
    torch.manual_seed(1)
    x, y = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    out = checkpoint(lambda a, b: (a.sin() * b.cos()).exp(), x, y).sum()
    first = torch.autograd.grad(out, x, retain_graph=True)[0]
    second = torch.autograd.grad(out, y)[0]
    plain = torch.autograd.grad((x.sin() * y.cos()).exp().sum(), [x, y])
    assert torch.equal(first, plain[0]) and torch.equal(second, plain[1])


def test_a_plan_on_a_model_of_others_with_everything() -> None:
    """`nn.TransformerEncoder`, untouched: dropout, nested tensors off, several policies."""
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(2, 5, 8, requires_grad=True)
    mask = torch.tensor([[False] * 5, [False, False, False, True, True]])

    def loss(_: Any) -> Tensor:
        return model(x, src_key_padding_mask=mask).pow(2).sum()

    plain = outcome(loss, [x, *model.parameters()], None)
    for steps in (["layers.*"], ["layers.*.self_attn", "layers.*.linear1", nn.Dropout, nn.LayerNorm]):
        for policy in (save_nothing(), save_only_these_names("linear1")):
            with apply(policy, model, steps):
                outcome(loss, [x, *model.parameters()], None).assert_equal(plain)
