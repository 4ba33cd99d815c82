"""Micro-batches in order, read ahead by threads.

Threads suffice: reading a sample is a copy out of a mapped file, and a thread needs no shared memory, no start-up
and no second copy of the index. The order is fixed by the sampler; threads change only when a batch is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from megackpt.data.dataset import Batch, SampleDataset, collate
from megackpt.data.sampler import micro_batch_samples, whole_steps

_BATCHES_PER_WORKER = 2


class MicroBatchLoader:
    """Iterates over the micro-batches of one data-parallel rank, step after step.

    Each item is a dictionary of arrays [b, s]: tokens, labels, position_ids (int64), loss_mask (float32). Ends
    after the last whole global batch. `position` is the only state: a loader built with
    `consumed_samples=other.position` goes on where `other` stopped, under any dp, micro-batch and worker count.
    An error in a worker is raised by the `next()` that would have returned its batch.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        global_batch: int,
        micro_batch: int,
        dp_index: int = 0,
        dp_size: int = 1,
        consumed_samples: int = 0,
        num_workers: int = 0,
    ) -> None:
        self._dataset = dataset
        self._global_batch = global_batch
        self._micro_batch = micro_batch
        self._dp_index = dp_index
        self._dp_size = dp_size
        micro_batch_samples(0, global_batch, micro_batch, 0, dp_index, dp_size)  # refuses sizes that do not divide
        self.micro_batches_per_step = global_batch // (micro_batch * dp_size)
        self._start = consumed_samples
        self._delivered = 0
        self._asked = 0
        self._total = whole_steps(len(dataset), consumed_samples, global_batch) * self.micro_batches_per_step
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="data") if num_workers > 0 else None
        self._depth = _BATCHES_PER_WORKER * num_workers
        self._ahead: deque[Future[Batch]] = deque()

    @property
    def position(self) -> int:
        """Samples consumed by the steps that were delivered whole."""
        return self._start + self._delivered // self.micro_batches_per_step * self._global_batch

    def samples(self, number: int) -> range:
        """Sample numbers of the `number`-th micro-batch of this loader."""
        step, micro_batch_index = divmod(number, self.micro_batches_per_step)
        consumed = self._start + step * self._global_batch
        return micro_batch_samples(
            consumed, self._global_batch, self._micro_batch, micro_batch_index, self._dp_index, self._dp_size
        )

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._delivered >= self._total:
            self.close()
            raise StopIteration
        if self._pool is None:
            batch = self._read(self._delivered)
        else:
            while self._asked < min(self._total, self._delivered + self._depth):
                self._ahead.append(self._pool.submit(self._read, self._asked))
                self._asked += 1
            try:
                batch = self._ahead.popleft().result()
            except BaseException:
                self.close()
                raise
        self._delivered += 1
        return batch

    def close(self) -> None:
        """Stop reading ahead and end the threads; the loader yields nothing afterwards."""
        self._total = self._delivered
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

    def _read(self, number: int) -> Batch:
        return collate([self._dataset[index] for index in self.samples(number)])
