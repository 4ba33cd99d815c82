"""Micro-batches in order, read ahead by threads.

Threads suffice: reading a sample is a copy out of a mapped file, and a thread needs no shared memory, no start-up
and no second copy of the index. The order is fixed by the sampler; threads change only when a batch is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from types import TracebackType

from megackpt.data.dataset import Batch, SampleDataset, collate
from megackpt.data.sampler import micro_batch_samples, steps_of

_BATCHES_PER_WORKER = 2


class MicroBatchLoader:
    """Iterates over the micro-batches of one data-parallel rank, step after step.

    Each item is a dictionary of arrays [b, s]: tokens, labels, position_ids (int64), loss_mask (float32). Ends
    after the last whole global batch, whose size may depend on the samples consumed before it. `position` is the
    only state: a loader built with `consumed_samples=other.position` goes on where `other` stopped, under any dp,
    micro-batch and worker count. An error in a worker is raised by the `next()` that would have returned its batch.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        global_batch: int | Callable[[int], int],
        micro_batch: int,
        dp_index: int = 0,
        dp_size: int = 1,
        consumed_samples: int = 0,
        num_workers: int = 0,
    ) -> None:
        self._dataset = dataset
        self._batch_size = global_batch if callable(global_batch) else lambda consumed: global_batch
        self._micro_batch = micro_batch
        self._dp_index = dp_index
        self._dp_size = dp_size
        first = self._batch_size(consumed_samples)
        micro_batch_samples(0, first, micro_batch, 0, dp_index, dp_size)  # refuses sizes that do not divide
        self._position = consumed_samples
        self._left = self._micro_batches(consumed_samples)
        self._closed = False
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="data") if num_workers > 0 else None
        self._depth = _BATCHES_PER_WORKER * num_workers
        self._ahead: deque[tuple[Future[Batch], int]] = deque()

    @property
    def position(self) -> int:
        """Samples consumed by the steps that were delivered whole."""
        return self._position

    def _micro_batches(self, consumed: int) -> Iterator[tuple[range, int]]:
        """Sample numbers of each micro-batch of this rank, and `position` once it is delivered."""
        for start, size in steps_of(len(self._dataset), consumed, self._batch_size):
            number = size // (self._micro_batch * self._dp_size)
            for index in range(number):
                samples = micro_batch_samples(start, size, self._micro_batch, index, self._dp_index, self._dp_size)
                yield samples, start + size if index == number - 1 else start

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        try:
            if self._closed:
                raise StopIteration
            if self._pool is None:
                samples, position = next(self._left)
                batch = self._read(samples)
            else:
                for samples, position in islice(self._left, self._depth - len(self._ahead)):
                    self._ahead.append((self._pool.submit(self._read, samples), position))
                if not self._ahead:
                    raise StopIteration
                future, position = self._ahead.popleft()
                batch = future.result()
        except BaseException:
            self.close()
            raise
        self._position = position
        return batch

    def close(self) -> None:
        """Stop reading ahead and end the threads; the loader yields nothing afterwards."""
        self._closed = True
        self._ahead.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def __enter__(self) -> MicroBatchLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, samples: range) -> Batch:
        return collate([self._dataset[index] for index in samples])
