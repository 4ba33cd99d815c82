"""Which samples a data-parallel rank reads, as a pure function of the samples consumed so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator


def micro_batch_samples(
    consumed: int, global_batch: int, micro_batch: int, micro_batch_index: int, dp_index: int, dp_size: int
) -> range:
    """Sample numbers of one micro-batch: consumed + (m * dp + d) * b + i for i in 0 … b - 1.

    Together the ranks read samples consumed … consumed + global_batch - 1 in one step, whatever dp and the
    micro-batch are, so a run may resume under another layout and sees the same samples in the same steps.
    """
    per_round = micro_batch * dp_size
    if global_batch % per_round:
        raise ValueError(f"global batch {global_batch} is not a multiple of micro-batch {micro_batch} x dp {dp_size}")
    if not 0 <= micro_batch_index < global_batch // per_round or not 0 <= dp_index < dp_size:
        raise ValueError(f"micro-batch {micro_batch_index} of dp rank {dp_index} is outside the step")
    first = consumed + (micro_batch_index * dp_size + dp_index) * micro_batch
    return range(first, first + micro_batch)


def steps_of(samples: int, consumed: int, batch_size: Callable[[int], int]) -> Iterator[tuple[int, int]]:
    """(samples consumed before it, global batch size) of every step that `samples` samples fill from `consumed` on.

    `batch_size` gives the size of the step that starts after so many samples. A tail that fills no step is left out,
    on every rank alike.
    """
    while consumed + (size := batch_size(consumed)) <= samples:
        yield consumed, size
        consumed += size
