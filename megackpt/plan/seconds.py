"""Seconds of a step on a machine: a roofline of products and memory, collectives by bus bandwidth.

Rough on purpose (a quarter of error in an operation costs under one percent of a stage's time).  What was measured
takes precedence: the machine's own kernels (`paces.py`), and before them a profile with seconds of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megackpt.plan.accelerators import Machine
from megackpt.plan.paces import Company, Pace
from megackpt.plan.profile import LayerProfile, StepCost
from megackpt.plan.steps import DEFERRED, GATHERS

# A ring passes (t-1)/t of the tensor once to gather or scatter it, twice to add it up.
_PASSES = {None: 0, "all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}


@dataclass(frozen=True)
class StepClock:
    """Prices steps on ``machine``: ``t`` tensor-parallel ranks of a run of ``world``, numbers of ``act_bytes``."""

    machine: Machine
    act_bytes: int
    t: int = 1
    world: int = 1

    def forward(self, step: StepCost) -> float:
        if step.seconds is not None:
            return step.seconds
        kernel = self.machine.kernels.get(step.kernel)
        pace = None if kernel is None else kernel.forward
        return self._together(step, self._work(step, step.flops, step.operations, pace), step.collective)

    def backward(self, step: StepCost) -> float:
        """Without what is replayed for it."""
        if step.backward_seconds is not None:
            return step.backward_seconds
        kernel = self.machine.kernels.get(step.kernel)
        pace = None if kernel is None else kernel.backward
        work = self._work(step, step.backward_flops, step.backward_operations, pace)
        return self._together(step, work, step.backward_collective)

    def layer_forward(self, layer: LayerProfile) -> float:
        return sum(self.forward(step) for step in layer.steps)

    def layer_backward(self, layer: LayerProfile) -> float:
        """Of a layer that keeps everything but the gathered tensors, which it gathers again."""
        gathers = sum(self.forward(step) for step in layer.steps if step.name in GATHERS)
        return gathers + sum(self.backward(step) for step in layer.steps)

    def layer_weights(self, layer: LayerProfile) -> float:
        """The part of the backward that can be put off: one product per weight gradient that can wait."""
        kernel = self.machine.kernels.get("product")
        pace = None if kernel is None else kernel.backward
        return sum(self._work(step, step.flops, 2, pace) for step in layer.steps if step.name in DEFERRED)

    def send(self, size: int) -> float:
        """A message of ``size`` bytes between stages on different nodes."""
        return self._company.message_latency_s + size / self.machine.node_bytes_per_s

    def message(self, size: int) -> float:
        """What such a message takes of the processor of each of its ends."""
        return self._company.message_s + size * self.machine.overheads.message_byte_s

    def _together(self, step: StepCost, work: float, collective: str | None) -> float:
        """Work and exchange; where a step only moves data, the exchange is that move."""
        exchange = self._exchange(collective, step.collective_bytes)
        alone = step.name.endswith((".gather", ".reduce"))
        return max(work, exchange) if alone else work + exchange

    def _work(self, step: StepCost, flops: int, operations: int, pace: Pace | None) -> float:
        """As measured, else the device's work, and the host's where it is not hidden behind it."""
        if pace is not None:
            return pace.seconds(operations, flops * self._scale, step.bytes_moved)
        rate = self.machine.flops_per_s(self.act_bytes) * (
            self.machine.core_fraction if step.name == "attn.core" else 1
        )
        moved = step.bytes_moved / (self.machine.hbm_bytes_per_s * self.machine.hbm_fraction)
        return max(flops / rate, moved) + operations * self.machine.op_seconds

    @cached_property
    def _company(self) -> Company:
        return self.machine.company(self.world)

    @cached_property
    def _scale(self) -> float:
        """FLOPs of fp32 that take as long as one of this format: kernels were measured in fp32."""
        return self.machine.flops_per_s(4) / self.machine.flops_per_s(self.act_bytes)

    def _exchange(self, collective: str | None, size: int) -> float:
        if collective is None or self.t == 1:
            return 0.0
        passed = _PASSES[collective] * size * (self.t - 1) / self.t
        return self._company.collective_s + passed / self.machine.tp_bytes_per_s
