"""What follows the last backward of a step: gradients are summed over data-parallel ranks, weights updated.

    plain                  all-reduce of gradients                          2 (r-1)/r of their bytes
    distributed optimizer  reduce-scatter of gradients, all-gather of weights  (r-1)/r of each

over r = d c ranks in a ring.  Overlapped, a bucket of gradients goes as soon as its last one is there, in the backward
of the last micro-batch, and weights arrive during the first forward: what is longer than that, and at least one
bucket, stays exposed.  The update reads gradients and weights and rewrites the optimizer's state once, on a sharded
optimizer each rank its share; where a machine was measured, it takes what a parameter took there.

All ranks meet twice in every step, over its loss and over the norm of its gradients.  A tied embedding on two stages
is summed over both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megackpt.plan.accelerators import Machine
from megackpt.plan.numbers import Layout
from megackpt.plan.predict import StagePrediction

BUCKET, BUCKET_OF_RANK = 40_000_000, 1_000_000  # elements, Megatron's default
MEETINGS = 2


@dataclass(frozen=True)
class StepEnd:
    """Seconds of the slowest stage."""

    reduce: float = 0.0  # all of the exchange of gradients
    gather: float = 0.0  # all of the exchange of weights
    exposed: float = 0.0  # of both: what nothing hides
    model: float = 0.0  # over the ranks of one copy of the model: meetings, tied weights
    optimizer: float = 0.0

    @property
    def reduction(self) -> float:
        """Every exchange that nothing hides."""
        return self.exposed + self.model


def step_end(
    layout: Layout, machine: Machine, row: StagePrediction, forward: float, backward: float, tied_bytes: int = 0
) -> StepEnd:
    """Of one stage; ``forward`` and ``backward`` are seconds of one micro-batch through its layers, ``tied_bytes``
    the gradients of weights that another stage has too."""
    ranks = layout.d * layout.c
    share = ranks if layout.sharded_optimizer else 1
    terms = row.terms
    read = (terms["gradients"] + terms["weights"]) / share
    optimizer = (read + 2 * (terms["masters"] + terms["moments"])) / (machine.hbm_bytes_per_s * machine.hbm_fraction)
    host = machine.overheads
    if host.parameter_s:
        optimizer = host.step_s + row.parameters / share * host.parameter_s
    optimizer *= machine.company(layout.world).slowdown / machine.speed(layout.world)  # all ranks are at it at once
    model = _model(layout, machine, tied_bytes)
    if ranks == 1:
        return StepEnd(model=model, optimizer=optimizer)
    size = layout.bucket_size or max(BUCKET, BUCKET_OF_RANK * ranks)
    buckets = max(1, -(-row.parameters // size))
    inside = layout.t * ranks <= machine.per_node
    rate = machine.tp_bytes_per_s if inside else machine.node_bytes_per_s
    pass_ = (ranks - 1) / ranks / rate
    wait = buckets * machine.company(layout.world).collective_s
    reduce = terms["gradients"] * pass_ * (1 if layout.sharded_optimizer else 2) + wait
    gather = terms["weights"] * pass_ + wait if layout.sharded_optimizer else 0.0
    exposed = _exposed(reduce, buckets, backward if layout.overlap_grad_reduce else 0.0)
    exposed += _exposed(gather, buckets, forward if layout.overlap_param_gather else 0.0)
    return StepEnd(reduce, gather, exposed, model, optimizer)


def slowest(ends: Sequence[StepEnd]) -> StepEnd:
    """The stage that ends last, were all to begin together."""
    return max(ends, key=lambda end: end.reduction + end.optimizer)


def _model(layout: Layout, machine: Machine, tied_bytes: int) -> float:
    """A ring of two passes each half of the bytes twice."""
    world, collective = layout.world, machine.company(layout.world).collective_s
    rate = machine.tp_bytes_per_s if world <= machine.per_node else machine.node_bytes_per_s
    tied = collective + tied_bytes / rate if tied_bytes else 0.0
    return MEETINGS * collective * (world > 1) + tied


def _exposed(seconds: float, buckets: int, hidden: float) -> float:
    return max(seconds - hidden, seconds / buckets) if hidden else seconds
