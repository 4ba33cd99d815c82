"""Measured seconds of our own kernels by kind, and of the host beside them: what a roofline does not know.

Where a device computes what the host tells it, and the host is quicker, the roofline of `seconds.py` is all that
counts.  Where the host computes itself nothing hides anything, and a step of a layer costs

    operations x op_s  +  FLOPs x flop_s  +  bytes moved x byte_s

with figures for each kind of step (a norm, a product, an attention core, ...) and direction.  `megackpt calibrate`
measures them on layers of ours (`train/layer_times.py`); a machine without them is priced by the roofline alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megackpt.plan.costs import core_kernel
from megackpt.plan.numbers import Layout, ModelNumbers

PRODUCTS = ("qkv", "proj", "up", "down", "logits")


@dataclass(frozen=True)
class Pace:
    """Seconds per dispatched operation, FLOP and byte moved."""

    op_s: float
    flop_s: float = 0.0
    byte_s: float = 0.0

    def __post_init__(self) -> None:
        if min(self.op_s, self.flop_s, self.byte_s) < 0:
            raise ValueError(f"a pace has no negative seconds, got {self}")

    def seconds(self, operations: int, flops: float, moved: int) -> float:
        return operations * self.op_s + flops * self.flop_s + moved * self.byte_s


@dataclass(frozen=True)
class Kernel:
    """One kind of step, in fp32."""

    forward: Pace
    backward: Pace

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Kernel:
        return Kernel(Pace(**data["forward"]), Pace(**data["backward"]))


@dataclass(frozen=True)
class Overheads:
    """Seconds of a rank's host beside the steps of its layers, where nothing hides them; 0: the device's work does."""

    action_s: float = 0.0  # of a forward or a backward of a micro-batch: tape, graph, executor
    batch_s: float = 0.0  # of reading a micro-batch, on stages with an end
    span_s: float = 0.0  # of a replay beside its steps: record, handles, rebuilding
    step_s: float = 0.0  # of an optimizer step beside its passes over the parameters
    parameter_s: float = 0.0  # per parameter: gradients zeroed, measured and clipped, weights updated; 0: by bytes
    message_byte_s: float = 0.0  # per byte of a message between stages, for its sender and for its receiver

    def __post_init__(self) -> None:
        if any(value < 0 for value in vars(self).values()):
            raise ValueError(f"overheads are seconds of 0 and more, got {self}")


@dataclass(frozen=True)
class Company:
    """What it costs a rank that ``ranks`` run on its host, in the midst of a step.

    Work takes more of a processor whose caches others use.  Exchanges take more than alone: a rank that waits sleeps
    and must be woken and, where ranks are more than cores, be given one."""

    ranks: int
    slowdown: float  # processor seconds of work over those of a rank alone
    message_s: float  # of a message between stages: of the processor, for its sender and for its receiver
    message_latency_s: float  # of it, from its sender to its receiver
    collective_s: float  # of a collective, beside its bytes

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.slowdown < 1:
            raise ValueError(f"company is of one rank and more and slows down by a factor of 1 and more, got {self}")
        if min(self.message_s, self.message_latency_s, self.collective_s) < 0:
            raise ValueError(f"exchanges take 0 seconds and more, got {self}")


def kernel_of(name: str, model: ModelNumbers, layout: Layout) -> str:
    """The kind of the step ``name``; "" for one that has none of its own, which the roofline prices."""
    step = name.partition(".")[2]
    if step in PRODUCTS:
        return "product"
    if step in ("norm", "qknorm"):
        return model.norm if step == "norm" else f"{model.norm}, heads"
    if step == "core":
        return f"core, {core_kernel(model, layout)}"
    if step == "act":
        return model.activation
    if step == "residual":
        return "residual, dropout" if model.hidden_dropout else "residual"
    return step if step in ("rope", "lookup", "dropout", "loss") else ""
