"""A chain of small blocks that can be cut anywhere, and the same chain by hand: the measure of the executor."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megackpt.config.parallel import ParallelConfig
from megackpt.mesh.device import DeviceSeam
from megackpt.mesh.process_mesh import ProcessMesh
from megackpt.mesh.sink import GradientSink
from megackpt.pipeline import ChunkSpecs, StageResult, TensorSpec, chunk_specs, pieces
from megackpt.plan.split import even_split
from megackpt.tensor.linear import linear

ROWS, WIDTH, LAYERS = 3, 5, 6
SPEC = TensorSpec((ROWS, WIDTH), torch.float64)


def pipeline_mesh(stages: int, chunks: int = 1) -> ProcessMesh:
    return ProcessMesh.create(
        ParallelConfig(pipeline=stages, world_size=stages, chunks=chunks),
        DeviceSeam("cpu", torch.device("cpu"), "gloo"),
    )


def boundary_specs(stage: int, stages: int, boundary: tuple[TensorSpec, ...], chunks: int = 1) -> list[ChunkSpecs]:
    return [chunk_specs(piece, boundary) for piece in pieces(even_split(stages * chunks, stages, chunks))[stage]]


def layer(index: int) -> nn.Linear:
    generator = torch.Generator().manual_seed(100 + index)
    block = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    return block


def batch(micro_batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(micro_batch)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)


class Stage(nn.Module):
    """Layers of one stage; called as the executor calls.  With a sink the products are those of our linear."""

    def __init__(
        self,
        stage: int,
        stages: int,
        micro_batches: int,
        chunks: int = 1,
        layers: int = LAYERS,
        sink: GradientSink | None = None,
    ) -> None:
        super().__init__()
        self.sink = sink
        self.pieces = pieces(even_split(layers, stages, chunks))[stage]
        self.layers = nn.ModuleDict({str(i): layer(i) for piece in self.pieces for i in piece.layers})
        self.micro_batches = micro_batches

    def forward(self, chunk: int, micro_batch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...] | StageResult:
        piece = self.pieces[chunk]
        (x,) = (batch(micro_batch),) if piece.is_first else received
        for index in piece.layers:
            block = self.layers[str(index)]
            x = x + torch.tanh(block(x) if self.sink is None else linear(x, block.weight, block.bias, self.sink))
        if not piece.is_last:
            return (x,)
        loss = x.square().mean()
        return StageResult(loss / self.micro_batches, {"loss": loss})

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.named_parameters() if p.grad is not None}


def by_hand(micro_batches: int, layers: int = LAYERS) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and gradients of the whole chain, without any executor."""
    whole = Stage(0, 1, micro_batches, layers=layers)
    losses = []
    for m in range(micro_batches):
        result = whole(0, m, ())
        result.loss.backward()
        losses.append(result.report["loss"].detach())
    return losses, whole.gradients()
