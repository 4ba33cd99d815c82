"""Where the gradients of a rank lie in its flat buffer: the arithmetic that optim/ runs and the planner counts with.

A buffer is cut into buckets, and a bucket is what one collective of data parallelism reduces (and, with a sharded
optimizer, one gathers).  Parameters follow each other in the order in which a backward finishes them, which is the
order of the model reversed, so that the first bucket can be on its way while the backward goes on::

    [ tied | head ... last layer ][ ... ][ ... layer 0 ][ tied ][ partial under sequence parallel ][ partial ]

* A **tied** parameter is a bucket of its own: its two copies lie on two stages between other neighbours, and only
  alone do both have the same place in a collective, that is, the same order of summation and the same shards.  The
  output layer's copy is finished first, the embedding's last.
* **Partial** gradients, which are first summed over tp, come last and stand together: one collective for all.  Last
  of all stand those that are partial without sequence parallelism too, so that either mode sums one piece.
* Every bucket ends at a parameter and is filled up to a multiple of `ALIGNMENT` elements per data-parallel rank, also
  where nothing is sharded: an element's place in a collective, and with it the order in which a ring adds it up, must
  not depend on how the optimizer is spread.
* Every parameter begins at a multiple of `ALIGNMENT`, so that a shard's border cuts it at one: a vectorised kernel may
  round the last elements, less than a vector, otherwise than the rest, and they must be the same ones in both modes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 16
"""Elements: kernels work on vectors of up to 16.  Sizes of real models are multiples, and nothing is filled up."""

SCRATCH = 1 << 24
"""Most elements of a 16-bit product that exist before they are added to a wider sum."""


def default_bucket_size(ranks: int) -> int:
    """Elements of a bucket over so many data-parallel ranks, as Megatron has it."""
    return max(40_000_000, 1_000_000 * ranks)


def scratch_rows(rows: int, columns: int) -> int:
    """Rows of a [rows, columns] product that are made at a time (see `SCRATCH`)."""
    return min(rows, max(1, SCRATCH // columns))


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter as the layout sees it."""

    numel: int
    partial: bool = False  # its gradient is summed over tp first, under sequence parallelism
    always: bool = False  # of partial ones: without it as well
    tied: bool = False  # another stage holds a copy
    early: bool = False  # of tied ones: the copy that a backward finishes first


@dataclass(frozen=True)
class BufferLayout:
    """Places of all parameters of a rank.

    Attributes:
        offsets: of each parameter, in the order in which `lay_out` was given them.
        buckets: of each bucket the numbers of its parameters, in the order of their places.
        bounds: bucket k is [bounds[k], bounds[k + 1]).
        first_partial: number of the first bucket of partial gradients (of buckets, if there is none).
        first_always: of those that are partial without sequence parallelism too.
        ranks: data-parallel ranks; a bucket divides into so many shards.
    """

    offsets: tuple[int, ...]
    buckets: tuple[tuple[int, ...], ...]
    bounds: tuple[int, ...]
    first_partial: int
    first_always: int
    ranks: int

    @property
    def total(self) -> int:
        """Elements of the buffer, filling included."""
        return self.bounds[-1]

    def shard(self, bucket: int, rank: int) -> tuple[int, int]:
        """[first, stop) of one data-parallel rank's part of a bucket, in the buffer."""
        start, stop = self.bounds[bucket], self.bounds[bucket + 1]
        share = (stop - start) // self.ranks
        return start + rank * share, start + (rank + 1) * share

    def part(self, member: int, numel: int, bucket: int, rank: int) -> tuple[int, int] | None:
        """[first, stop) of a parameter's flattened elements that lie in a rank's shard of its bucket; None: no one."""
        offset = self.offsets[member]
        start, stop = self.shard(bucket, rank)
        first, last = max(start - offset, 0), min(stop - offset, numel)
        return (first, last) if first < last else None


def lay_out(members: Sequence[Member], bucket_size: int, ranks: int) -> BufferLayout:
    """Places for parameters given in the order of the model.  A bucket is closed once it has `bucket_size` elements."""
    if bucket_size < 1 or ranks < 1:
        raise ValueError(f"buckets of {bucket_size} elements over {ranks} ranks")
    backward = range(len(members) - 1, -1, -1)
    groups = [
        *([i] for i in backward if members[i].tied and members[i].early),
        *_filled([i for i in backward if not members[i].tied and not members[i].partial], members, bucket_size),
        *([i] for i in backward if members[i].tied and not members[i].early),
    ]
    partial = _filled([i for i in backward if members[i].partial and not members[i].always], members, bucket_size)
    first_partial, first_always = len(groups), len(groups) + len(partial)
    groups += [*partial, *_filled([i for i in backward if members[i].always], members, bucket_size)]
    unit = ALIGNMENT * ranks
    offsets, bounds = [0] * len(members), [0]
    for group in groups:
        place = bounds[-1]
        for i in group:
            offsets[i] = place
            place += -(-members[i].numel // ALIGNMENT) * ALIGNMENT
        bounds.append(-(-place // unit) * unit)
    buckets = tuple(tuple(group) for group in groups)
    return BufferLayout(tuple(offsets), buckets, tuple(bounds), first_partial, first_always, ranks)


def _filled(order: Sequence[int], members: Sequence[Member], bucket_size: int) -> list[list[int]]:
    """Parameters in order, cut after each that brings its bucket to its size."""
    groups: list[list[int]] = []
    size = bucket_size
    for i in order:
        if size >= bucket_size:
            groups.append([])
            size = 0
        groups[-1].append(i)
        size += members[i].numel
    return groups
