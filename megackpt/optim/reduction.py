"""From the sums of one rank to the gradients of the step.

    1. over tp     the partial gradients: each rank has the part of its heads and, under sequence parallelism, of its
                   part of the sequence
    2. over dp     bucket by bucket: one all-reduce, or with a sharded optimizer one reduce-scatter
    3. over pp     a tied weight, first and last stage only
    4. times `scale`

Why in this order: copies of a parameter must stay bitwise equal for the whole run, although a ring all-reduce
of three or more ranks sums in an order that depends on an element's place in its bucket.  Replicated parameters have
the same place on all tp ranks, so 1 and 2 treat them alike; the two copies of a tied weight are a bucket of their own
each, so that 2 treats them alike, and are summed last, between two ranks, where a + b is the same on both.

**Overlap.**  A bucket's reduction starts when its last gradient of the step has arrived.  How many arrive is not
guessed from the schedule (a zero-bubble schedule hands over weight gradients long after their backward) nor from
autograd (a tied weight, a loss in chunks hand over several per micro-batch): it is what arrived in the step before,
per micro-batch.  So the first step of a process overlaps nothing; neither does a bucket whose count was not a whole
number, and its reduction starts at the end.  Buckets start strictly in their order, on all ranks alike; a gradient
that arrives after its bucket has left is an error, never a silent loss.  The partial gradients wait for 1, and so for
the end: they are the last that a backward finishes, and few.

**Same bits.**  gloo's reduce-scatter and all-reduce add the elements of a bucket in one order (measured for 2 to 4
ranks in all formats; a test holds it), and both modes cut the same buckets, so a sharded run equals an unsharded one
bit for bit, and any run its repetition.  NCCL gives the second always and the first for two ranks.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from megackpt.mesh.process_mesh import ProcessMesh
from megackpt.optim.buffer import GradientBuffer


class GradientReduction:
    """Reduces the gradients of a buffer, once per step."""

    def __init__(
        self, buffer: GradientBuffer, mesh: ProcessMesh, *, sequence_parallel: bool = False, overlap: bool = False
    ) -> None:
        if buffer.dp.size != mesh.dp.size:
            raise ValueError(f"a buffer over {buffer.dp.size} data-parallel ranks on a mesh with {mesh.dp.size}")
        self.buffer, self.mesh = buffer, mesh
        self._partial = buffer.partial(sequence_parallel) if mesh.tp.size > 1 else buffer.flat[:0]
        self._overlap = overlap and buffer.dp.size > 1
        self._launched = 0
        self._works: list[dist.Work] = []
        self._micro_batches = 0
        self._arrived = [0] * len(buffer.entries)
        self._per_micro_batch: list[int | None] = [None] * len(buffer.entries)
        self._expected: list[int | None] = []
        self._missing: list[int] = []
        if self._overlap:
            buffer.on_arrival = self._note

    def start(self, micro_batches: int, *, early: bool = True) -> None:
        """Begin a step of so many micro-batches with gradients of zero.

        `early=False`: reduce nothing before `finish`, as someone wants to see what this rank alone has summed.
        """
        self.buffer.zero_()
        self._launched, self._works = 0, []
        if not self._overlap:
            return
        self._micro_batches = micro_batches
        self._arrived = [0] * len(self._arrived)
        self._expected = [None if k is None or not early else k * micro_batches for k in self._per_micro_batch]
        self._missing = [0] * len(self.buffer.buckets)
        for entry, expected in zip(self.buffer.entries, self._expected, strict=True):
            self._missing[entry.bucket] += expected != 0

    def finish(self, scale: float | Tensor = 1.0) -> None:
        """Sum the gradients over all ranks that hold a part of them and multiply by `scale`.

        Call it once per step, on all ranks.  `scale` turns sums into means: 1 / (tokens in the global batch) if
        losses were sums over tokens.  A tensor scale has one element, is on the buffer's device and equal on all
        ranks.
        """
        buffer, mesh = self.buffer, self.mesh
        if self._overlap:
            self._learn()
        if self._partial.numel():
            dist.all_reduce(self._partial, group=mesh.tp.group)
        if buffer.dp.size > 1:
            for bucket in range(self._launched, len(buffer.buckets)):
                self._launch(bucket)
            for work in self._works:
                work.wait()
            self._launched, self._works = len(buffer.buckets), []
        if mesh.embedding.size > 1:
            tied = [entry for entry in buffer.entries if entry.record.tied]
            for entry in sorted(tied, key=lambda entry: entry.record.name):  # one order on both stages
                gradient = buffer.shard(entry.bucket) if buffer.sharded else entry.gradient
                dist.all_reduce(gradient, group=mesh.embedding.group)
        buffer.scale_(scale)

    # -- overlap -------------------------------------------------------------------------------------------------

    def _note(self, number: int) -> None:
        """A gradient has been added to an entry."""
        self._arrived[number] = arrived = self._arrived[number] + 1
        expected, bucket = self._expected[number] if self._expected else None, self.buffer.entries[number].bucket
        if expected is None or arrived < expected:
            return
        if arrived == expected:
            self._missing[bucket] -= 1
            while self._launched < self.buffer.layout.first_partial and not self._missing[self._launched]:
                self._launch(self._launched)
        elif bucket < self._launched:
            raise RuntimeError(
                f"gradient {arrived} of parameter {self.buffer.entries[number].record.name} came after its bucket was"
                f" reduced: the step before had {expected} in {self._micro_batches} micro-batches. A model that does"
                " not use its parameters alike in every step cannot run with --overlap-grad-reduce."
            )

    def _learn(self) -> None:
        """How many gradients of each parameter one micro-batch brings."""
        n = self._micro_batches
        self._per_micro_batch = [None if n == 0 or count % n else count // n for count in self._arrived]
        self._expected = []  # what arrives outside of a step counts for nothing

    def _launch(self, bucket: int) -> None:
        buffer = self.buffer
        group, gradients = buffer.dp.group, buffer.buckets[bucket]
        if buffer.sharded:
            work = dist.reduce_scatter_tensor(buffer.shard(bucket), gradients, group=group, async_op=True)
        else:
            work = dist.all_reduce(gradients, group=group, async_op=True)
        self._works.append(work)
        self._launched = bucket + 1
