"""What the tests of this room share: records, a mesh of one rank, a buffer over given tensors."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megackpt.config.optimizer import OptimizerConfig
from megackpt.mesh.layout import MeshShape
from megackpt.mesh.parameter import ParameterRecord
from megackpt.mesh.process_mesh import ProcessMesh, single_axis
from megackpt.optim import GradientBuffer, MasterOptimizer

BETAS = (0.9, 0.95)


def one_rank() -> ProcessMesh:
    axis = single_axis()
    return ProcessMesh(MeshShape(), 0, MeshShape().coordinates(0), *[axis] * (len(fields(ProcessMesh)) - 3))


def record(name: str, parameter: Tensor, **fields: object) -> ParameterRecord:
    return ParameterRecord(tuple(parameter.shape), name, **fields)  # type: ignore[arg-type]


def buffer_of(parameters: dict[str, Tensor], **fields: dict[str, object]) -> GradientBuffer:
    """A buffer over `parameters`; `fields` are those of the records, by name."""
    pairs = [(as_parameter(p), record(name, p, **fields.get(name, {}))) for name, p in parameters.items()]
    buffer = GradientBuffer()
    buffer.attach(pairs)
    return buffer


def as_parameter(tensor: Tensor) -> Parameter:
    return tensor if isinstance(tensor, Parameter) else Parameter(tensor)


def adamw(buffer: GradientBuffer, **fields: Any) -> MasterOptimizer:
    settings: dict[str, Any] = {"lr": 1.0, "weight_decay": 0.1, "adam_beta1": BETAS[0], "adam_beta2": BETAS[1]}
    return MasterOptimizer(buffer, OptimizerConfig(**(settings | fields)))


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
