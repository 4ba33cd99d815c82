"""What crosses from one stage to the next, and how a graph is cut there.

A boundary is a tuple of tensors of known shape and dtype. Only those that require a gradient get one back;
masks and token ids travel forward only.

The cut has two sides. *Departure*: of a sent output its sender keeps the edge of the graph alone, so the
tensor is free as soon as it has left. *Arrival*: a received tensor is made the output of a node of ours, not
a leaf, because a leaf's gradient accumulator would hold the tensor until the backward, even if nothing in the
stage saves it (a layer input that was offloaded, for instance).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a boundary. Raises ValueError for a dtype that cannot require a gradient but should."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = True

    def __post_init__(self) -> None:
        if self.requires_grad and not (self.dtype.is_floating_point or self.dtype.is_complex):
            raise ValueError(f"a boundary tensor of {self.dtype} cannot require a gradient")

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


Boundary = tuple[TensorSpec, ...]


def gradient_specs(boundary: Boundary) -> Boundary:
    """The part of a boundary that comes back as gradients, in order."""
    return tuple(spec for spec in boundary if spec.requires_grad)


@dataclass(frozen=True, slots=True)
class ChunkSpecs:
    """What one chunk of a stage receives and sends; () at the ends of the model."""

    received: Boundary = ()
    sent: Boundary = ()


@dataclass(frozen=True, slots=True)
class StageResult:
    """What the last stage's forward returns: the scalar to go backward from, and numbers for the user."""

    loss: Tensor  # []
    report: dict[str, Tensor] = field(default_factory=dict)


class Arrival:
    """The gradients of what one forward received; filled by the backward."""

    __slots__ = ("_boundary", "_gradients")

    def __init__(self, boundary: Boundary) -> None:
        self._boundary = gradient_specs(boundary)
        self._gradients: list[Tensor | None] = [None] * len(self._boundary)

    def fill(self, gradients: Sequence[Tensor | None]) -> None:
        self._gradients = list(gradients)

    def take(self, device: torch.device) -> list[Tensor]:
        """The gradients, once; zeros for a tensor that no gradient came back to (a None cannot be sent)."""
        pairs = zip(self._gradients, self._boundary, strict=True)
        taken = [spec.empty(device).zero_() if g is None else g for g, spec in pairs]
        self._gradients = []
        return taken


class _Arrive(torch.autograd.Function):
    """Gives tensors that came from outside a place in the graph without a leaf. `anchor` makes autograd
    record it.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, arrival: Arrival, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        ctx.arrival = arrival
        ctx.set_materialize_grads(False)
        outputs = tuple(tensors)
        tensors.clear()
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.arrival.fill(gradients)
        return None, None, None


def arrive(tensors: Sequence[Tensor], boundary: Boundary) -> tuple[tuple[Tensor, ...], Arrival]:
    """Received tensors as inputs of a forward: those whose spec says so require a gradient, which `Arrival`
    collects.

    Needs gradients enabled. The tensors must be fresh (nobody else's), as a receive makes them.
    """
    arrival = Arrival(boundary)
    wanted = [tensor for tensor, spec in zip(tensors, boundary, strict=True) if spec.requires_grad]
    if not wanted:
        return tuple(tensors), arrival
    anchor = torch.empty(0, requires_grad=True)
    entered = iter(_Arrive.apply(anchor, arrival, wanted))  # type: ignore[no-untyped-call]
    return tuple(next(entered) if spec.requires_grad else t for t, spec in zip(tensors, boundary, strict=True)), arrival


def check_outputs(outputs: object, boundary: Boundary) -> None:
    """Refuse what the next stage does not expect. Raises TypeError or ValueError naming the tensor and both
    shapes.
    """
    if not isinstance(outputs, tuple) or not all(isinstance(output, Tensor) for output in outputs):
        raise TypeError(f"a stage that is not the last returns a tuple of tensors, got {type(outputs).__name__}")
    if len(outputs) != len(boundary):
        raise ValueError(f"the stage returned {len(outputs)} tensors, the next stage expects {len(boundary)}")
    for index, (output, spec) in enumerate(zip(outputs, boundary, strict=True)):
        if tuple(output.shape) != spec.shape or output.dtype != spec.dtype:
            found = f"{list(output.shape)} {str(output.dtype).removeprefix('torch.')}"
            raise ValueError(f"output {index} of the stage is {found}, the next stage expects {spec}")
        if output.requires_grad and not spec.requires_grad:
            raise ValueError(f"output {index} of the stage requires a gradient, but the boundary returns none for it")


def depart(outputs: Sequence[Tensor], boundary: Boundary) -> list[GradientEdge | None]:
    """Edges to go backward from, one per gradient that will come back; None where the stage has nothing to
    train.
    """
    pairs = zip(outputs, boundary, strict=True)
    return [get_gradient_edge(t) if t.requires_grad else None for t, spec in pairs if spec.requires_grad]
