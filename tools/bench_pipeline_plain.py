"""The other side of `bench_pipeline.py`: torch.distributed.pipelining's 1F1B, as its documentation has it.

Each stage is a plain module with the same layers as ours; recompute is torch's own around each layer, without reentry.
With tensor parallelism the layers are spread by DTensor (`bench_recompute_tp.py`), sequences included, and the loss is
taken on the shards of the vocabulary.

b samples, s sequence, h hidden, V vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, loss_parallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from megackpt.mesh.process_mesh import ProcessMesh
from megackpt.model import GPTChunk
from megackpt.pipeline.stages import Piece
from tools.bench_plain import Layer, Model
from tools.bench_recompute_tp import Layer as SpreadLayer
from tools.bench_recompute_tp import spread
from tools.bench_stacks import NAMES, copy_common, qkv_parts

_SPREAD_NAMES = {"norm1": "attn.norm", "attn.proj": "attn.proj", "norm2": "mlp.norm", "mlp.up": "mlp.up",
                 "mlp.down": "mlp.down"}  # fmt: skip


class StageModule(nn.Module):
    """What a stage holds: ids [b, s] or [b, s/t, h] to [b, s/t, h] or logits [b, s, V/t]."""

    def __init__(self, model: Model, piece: Piece, again: bool, part: slice, kind: type[nn.Module]) -> None:
        super().__init__()
        first, last = piece.is_first, piece.is_last
        self.word = nn.Embedding(model.vocab, model.hidden) if first else None
        self.position = nn.Embedding(model.seq, model.hidden) if first else None
        self.layers = nn.ModuleList(Layer(model, "none") if kind is Layer else kind(model) for _ in piece.layers)
        self.norm = nn.LayerNorm(model.hidden) if last else None
        self.head = nn.Linear(model.hidden, model.vocab, bias=False) if last else None
        self.again, self.part = again, part

    def forward(self, x: Tensor) -> Tensor:
        if self.word is not None and self.position is not None:
            x = self.word(x[:, self.part]) + self.position.weight[self.part]
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False) if self.again else layer(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x

    @torch.no_grad()
    def take_weights(self, chunk: GPTChunk, model: Model) -> None:
        """``chunk``: ours of the same stage, with whole weights."""
        theirs = dict(chunk.named_parameters())
        names = {"word": "embedding.word", "position": "embedding.position", "head": "head"}
        for mine, ours in names.items():
            if (module := getattr(self, mine)) is not None:
                module.weight.copy_(theirs[f"{ours}.weight"])
        if self.norm is not None:
            for kind in ("weight", "bias"):
                self.norm.get_parameter(kind).copy_(theirs[f"head.norm.{kind}"])
        for block, layer in zip(chunk.layers.values(), self.layers, strict=True):
            copy_common(block, layer, NAMES if isinstance(layer, Layer) else _SPREAD_NAMES)
            for kind in ("weight", "bias"):
                parts = qkv_parts(block, kind, model.heads)
                if isinstance(layer, Layer):
                    layer.qkv.get_parameter(kind).copy_(parts.flatten(0, 1))
                    continue
                for name, rows in zip(("query", "key", "value"), parts, strict=True):
                    layer.get_parameter(f"attn.{name}.{kind}").copy_(rows)


class PlainPipeline:
    """One rank's stage, its schedule and its optimizer."""

    def __init__(
        self, model: Model, chunk: GPTChunk, piece: Piece, mesh: ProcessMesh, micro_batch: int, count: int,
        again: bool, lr: float,
    ) -> None:  # fmt: skip
        """``chunk``: ours of the same ``piece`` with whole weights; ``count`` micro-batches a step."""
        self.piece, self.mesh, self.t = piece, mesh, mesh.tp.size
        length = model.seq // self.t
        part = slice(mesh.tp.index * length, (mesh.tp.index + 1) * length)
        self.module = StageModule(model, piece, again, part, Layer if self.t == 1 else SpreadLayer)
        self.module.take_weights(chunk, model)
        self.device_mesh: DeviceMesh | None = None
        if self.t > 1:
            assert mesh.tp.group is not None
            self.device_mesh = DeviceMesh.from_group(mesh.tp.group, "cpu")
            self._spread(self.device_mesh)
        hidden = torch.zeros(micro_batch, length, model.hidden, requires_grad=True)
        tokens = torch.zeros(micro_batch, model.seq, dtype=torch.int64)
        stage = PipelineStage(
            self.module, mesh.pp.index, mesh.pp.size, torch.device("cpu"),
            input_args=(tokens if piece.is_first else hidden,),
            output_args=(torch.zeros(micro_batch, model.seq, model.vocab // self.t) if piece.is_last else hidden,),
            group=mesh.pp.group,
        )  # fmt: skip
        self.schedule = Schedule1F1B(stage, count, loss_fn=self._loss)
        self.parameters = list(self.module.parameters())
        groups = []
        for spread_out, decays in itertools.product((False, True), repeat=2):  # one kernel takes one kind of tensor
            kind = [p for p in self.parameters if (isinstance(p, DTensor), p.dim() >= 2) == (spread_out, decays)]
            groups += [{"params": kind, "weight_decay": 0.01 * decays}] if kind else []
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.999), eps=1e-8, fused=True)

    def _spread(self, mesh: DeviceMesh) -> None:
        for layer in self.module.layers:
            parallelize_module(layer, mesh, spread())
        if self.piece.is_last:
            head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=True)
            parallelize_module(self.module, mesh, {"norm": SequenceParallel(), "head": head})

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        flat = logits.flatten(0, 1)
        if self.device_mesh is not None:
            flat = DTensor.from_local(flat, self.device_mesh, [Shard(1)], run_check=False)
        loss = F.cross_entropy(flat, labels.flatten())
        return loss.to_local() if isinstance(loss, DTensor) else loss

    def forward_backward(self, tokens: Tensor, labels: Tensor) -> float:
        """All micro-batches of a step, [n b, s] ids; the mean loss on the last stage, else 0."""
        losses: list[Tensor] = []
        ends: dict[str, Any] = {"target": labels, "losses": losses} if self.piece.is_last else {}
        with loss_parallel() if self.t > 1 else nullcontext():
            self.schedule.step(*([tokens] if self.piece.is_first else []), **ends, return_outputs=False)
        return float(sum(losses) / len(losses)) if losses else 0.0

    def step(self, tokens: Tensor, labels: Tensor) -> float:
        """One optimizer step; returns the loss before it, on every rank."""
        loss = self.forward_backward(tokens, labels)
        self._clip(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        everywhere = torch.tensor(loss)
        dist.all_reduce(everywhere, group=self.mesh.world.group)
        return everywhere.item() / self.t

    def _clip(self, most: float) -> None:
        gradients = [_local(p.grad) for p in self.parameters]
        split = [isinstance(p, DTensor) and not isinstance(p.placements[0], Replicate) for p in self.parameters]
        for p, gradient in zip(self.parameters, gradients, strict=True):
            if self.t > 1 and not isinstance(p, DTensor):  # the embedding's, each rank's from its part of the sequence
                dist.all_reduce(gradient, group=self.mesh.tp.group)
        squares = torch.stack(torch._foreach_norm(gradients)).square()
        counted = torch.tensor([1.0 if whole else 1.0 / self.t for whole in split])
        total = (squares * counted).sum()
        dist.all_reduce(total, group=self.mesh.world.group)
        factor = (most / (total.sqrt() + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, factor)


def _local(gradient: Tensor | None) -> Tensor:
    """The shard of a distributed gradient; what is partial becomes whole first."""
    assert gradient is not None
    if not isinstance(gradient, DTensor):
        return gradient
    return gradient.to_local()


