"""A stack of transformer layers twice: ours (blocks of the trainer on a tape) and plain PyTorch's (`bench_plain.py`).

Both start from the same weights and must give the same numbers.  s sequence, b micro-batch, h hidden, a heads, d head
size, t tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.flop_counter import FlopCounterMode

from megackpt.config.model import ModelConfig
from megackpt.mesh.process_mesh import Axis, single_axis
from megackpt.mesh.sink import AutogradSink
from megackpt.model.gpt import Block
from megackpt.plan import ChunkPlan, chunk_plan
from megackpt.recompute import RngLedger, Stream, Tape, chain
from megackpt.tensor.context import REPLICATED, TENSOR, TensorParallel
from tools.bench_plain import Layer, Model

Fn = Callable[[Tensor], Tensor]
SEED = 1234

PLANS: dict[str, dict[str, object]] = {
    "none": {"granularity": "none"},
    "free": {"granularity": "free"},
    "selective": {"granularity": "selective"},
    "full": {"granularity": "full"},
    "full, layer-input": {"granularity": "full", "keep": "layer-input"},
}
"""Our policies, by the name in the tables."""


class OurStack:
    """Blocks of the trainer, [s/t, b, h] -> [s/t, b, h]."""

    def __init__(self, model: Model, axis: Axis | None = None, sequence_parallel: bool = False) -> None:
        axis = single_axis() if axis is None else axis
        config = ModelConfig(
            num_layers=model.layers, hidden_size=model.hidden, num_attention_heads=model.heads, seq_length=model.seq,
            hidden_dropout=model.dropout, attention_dropout=model.dropout, fused_attention=model.fused,
        )  # fmt: skip
        self.ledger = RngLedger(defaults=False)
        self.ledger.register(Stream(REPLICATED, SEED))
        self.ledger.register(Stream(TENSOR, SEED + 1 + axis.index))
        tp = TensorParallel(
            axis, sequence_parallel, self.ledger, AutogradSink(), torch.float32, torch.device("cpu"), SEED
        )
        self.blocks = nn.ModuleList(Block(config, tp, i) for i in range(model.layers))
        self.layers = range(model.layers)

    def plan(self, policy: str) -> ChunkPlan:
        return chunk_plan(self.layers, **PLANS[policy])

    def __call__(self, x: Tensor, plan: ChunkPlan | None) -> Tensor:
        """The blocks one after another; without a plan no tape is opened."""
        with nullcontext() if plan is None else Tape(plan, self.ledger):
            return chain(list(enumerate(self.blocks)), x)  # type: ignore[arg-type]


NAMES = {"norm1": "attn.norm", "proj": "attn.proj", "norm2": "mlp.norm", "up": "mlp.up", "down": "mlp.down"}
"""Modules of a plain layer and of ours that have the same parameters."""


def qkv_parts(block: nn.Module, kind: str, heads: int) -> Tensor:
    """Our projection's rows, which go by head, as all queries, all keys, all values: [3, a d, ...]."""
    rows = block.get_parameter(f"attn.qkv.{kind}").detach()
    return rows.view(heads, 3, -1, *rows.shape[1:]).transpose(0, 1).flatten(1, 2)


@torch.no_grad()
def copy_common(block: nn.Module, layer: nn.Module, names: Mapping[str, str]) -> None:
    """Give a plain layer the weights of ours, except the attention's first projection."""
    for mine, ours in names.items():
        for kind in ("weight", "bias"):
            layer.get_parameter(f"{mine}.{kind}").copy_(block.get_parameter(f"{ours}.{kind}"))


@torch.no_grad()
def plain_layers(stack: OurStack, model: Model, recompute: str) -> nn.ModuleList:
    """Plain layers with the weights of a stack on one process."""
    layers = nn.ModuleList(Layer(model, recompute) for _ in stack.layers)
    for block, layer in zip(stack.blocks, layers, strict=True):
        copy_common(block, layer, NAMES)
        for kind in ("weight", "bias"):
            layer.qkv.get_parameter(kind).copy_(qkv_parts(block, kind, model.heads).flatten(0, 1))
    return layers


def in_turn(layers: Iterable[Fn], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


class Training:
    """Forward and backward of something, again and again; gradients are there before, and are added to."""

    def __init__(self, forward: Fn, parameters: Iterable[Parameter], x: Tensor, slope: Tensor) -> None:
        """``x`` enters (and gets a gradient), ``slope`` is the output's gradient."""
        self.forward, self.parameters = forward, list(parameters)
        self.x, self.slope = x.detach().clone().requires_grad_(), slope
        self.zero_gradients()

    def zero_gradients(self) -> None:
        for tensor in (self.x, *self.parameters):
            tensor.grad = torch.zeros_like(tensor)

    def loss(self) -> Tensor:
        return (self.forward(self.x) * self.slope).sum()

    def step(self) -> float:
        loss = self.loss()
        loss.backward()
        return loss.item()

    def repeat(self, times: int) -> None:
        for _ in range(times):
            self.loss().backward()


# -- FLOPs -----------------------------------------------------------------------------------------------------------


def _fused(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: object, **__: object) -> int:
    b, a, s, d = q
    return 2 * b * a * s * k[2] * (d + v[3])


def _fused_backward(_: object, q: Sequence[int], k: Sequence[int], v: Sequence[int], *__: object, **___: object) -> int:
    """Five products: the scores once more, and two for each of the forward's two."""
    b, a, s, d = q
    return 2 * b * a * s * k[2] * (3 * d + 2 * v[3])


def _add_product(_: object, a: Sequence[int], b: Sequence[int], **__: object) -> int:
    return 2 * a[0] * a[1] * b[1]


CPU_KERNELS = {
    torch.ops.aten.addmm_: _add_product,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _fused,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _fused_backward,
}
"""What torch's counter does not know: a product added in place, and fused attention on a CPU, which counts without the
causal half, as its others do."""


def flops_of(work: Callable[[], object]) -> int:
    """By torch's counter."""
    with FlopCounterMode(display=False, custom_mapping=CPU_KERNELS) as counter:
        work()
    return counter.get_total_flops()
