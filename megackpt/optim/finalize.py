"""From the sums of one rank to the gradients of the step: at most one collective per axis.

    1. over tp     the leading slice, if sequence parallelism left each rank a part of the sequence in it
    2. over dp     the whole buffer
    3. over pp     a tied weight, first and last stage only
    4. times `scale`

Why in this order: copies of a parameter must stay bitwise equal for the whole run, although a ring all-reduce
of three or more ranks sums in an order that depends on an element's place in the buffer.  Replicated
parameters have the same place on all tp ranks, so 1 and 2 treat them alike; the two copies of a tied weight
have different places on their stages, so they are summed last, between two ranks, where a + b is the same on
both.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from megackpt.mesh.process_mesh import ProcessMesh
from megackpt.optim.buffer import GradientBuffer


def finish(
    buffer: GradientBuffer, mesh: ProcessMesh, *, sequence_parallel: bool, scale: float | Tensor = 1.0
) -> None:
    """Sum the gradients in `buffer` over all ranks that hold a part of them and multiply by `scale`.

    Call it once per step, on all ranks.  `scale` turns sums into means: 1 / (tokens in the global batch) if
    losses were sums over tokens.  A tensor scale has one element, is on the buffer's device and equal on all
    ranks.
    """
    if sequence_parallel and mesh.tp.size > 1 and buffer.partial.numel():
        dist.all_reduce(buffer.partial, group=mesh.tp.group)
    if mesh.dp.size > 1 and buffer.flat.numel():
        dist.all_reduce(buffer.flat, group=mesh.dp.group)
    if mesh.embedding.size > 1:
        tied = [entry for entry in buffer.entries if entry.record.tied]
        for entry in sorted(tied, key=lambda entry: entry.record.name):  # one order on both stages
            dist.all_reduce(entry.gradient, group=mesh.embedding.group)
    buffer.scale_(scale)
