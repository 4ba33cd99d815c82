"""Seconds of a training step beside the steps of its layers, for the planner (`plan.paces.Overheads`).

Small models train as in a run, on one rank, and what their layers take (`train/layer_times.py`) is taken off: what
stays is the executor's, the tape's, the engine's, the optimizer's.  In processor time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence

from megackpt.data.dataset import Batch
from megackpt.data.loader import MicroBatchLoader
from megackpt.plan.kept import records, replay
from megackpt.plan.paces import Overheads
from megackpt.train.build import Trainer
from megackpt.train.layer_times import SIZES, Flags, Watch, Watched, flags_of, profile_of
from megackpt.train.loop import loader
from megackpt.train.step import Stepper

MICRO_BATCHES = 5  # of a long step; a short one has one
STEPS, FEW = 20, 5  # of a small model and of a large one
FIRST = 3  # steps that do not count


def measure_overheads(built: Callable[[Flags], Trainer]) -> Overheads:
    """What this host takes beside the layers of one stage, for each thing once."""
    size = {"global-batch-size": 2 * MICRO_BATCHES}
    kept = Timed(built(flags_of(SIZES[0], size)))
    full = Timed(built(flags_of(SIZES[0], size | {"recompute-granularity": "full"})))
    large = Timed(built(flags_of(SIZES[-1], size)))
    layers = Watched(kept.trainer)
    for turn in range(FIRST + STEPS):  # in turns: what changes on the host changes for all
        for one in (kept, full):
            one.step(1, one.short)
            one.step(MICRO_BATCHES, one.long)
        if turn == FIRST:
            layers.watch = Watch()
        for _ in range(MICRO_BATCHES):
            layers.run()
    for _ in range(FIRST + FEW):
        large.step(1, large.short)
    watch = layers.watch
    parameter_s = max(0.0, large.end - kept.end) / (large.parameters - kept.parameters)
    action_s = max(0.0, kept.micro_batch - quick(kept.read) - layers_of(watch)) / 2
    step_s = kept.end - parameter_s * kept.parameters + quick(kept.short[FIRST:]) - kept.micro_batch
    return Overheads(
        action_s=action_s,
        batch_s=quick(kept.read),
        span_s=max(0.0, _span(kept, full, watch)),
        step_s=max(0.0, step_s),
        parameter_s=parameter_s,
    )


class Timed:
    """A trainer, and the seconds of its steps' parts."""

    def __init__(self, trainer: Trainer, clock: Callable[[], float] = time.thread_time) -> None:
        self.trainer, self.stepper, self.clock = trainer, Stepper(trainer), clock
        self.parameters = sum(parameter.numel() for parameter, _ in trainer.parameters)
        self.short: list[float] = []  # forward and backward of one micro-batch
        self.long: list[float] = []  # of MICRO_BATCHES
        self.zero: list[float] = []  # gradients of zero, which a step begins with
        self.update: list[float] = []
        self.read: list[float] = []

    def step(self, micro_batches: int, into: list[float]) -> None:
        """A step of so many micro-batches, always the same data."""
        trainer, start = self.trainer, self.clock()
        trainer.buffer.zero_()
        self.zero.append(self.clock() - start)
        with loader(trainer, trainer.datasets.train, 0) as batches:
            start = self.clock()
            totals = self.stepper.accumulate(self._reading(batches), 2 * micro_batches)
            into.append(self.clock() - start)
        start = self.clock()
        self.stepper.update(totals, 0)
        self.update.append(self.clock() - start)

    def _reading(self, batches: MicroBatchLoader) -> Iterator[Batch]:
        while True:
            start = self.clock()
            batch = next(batches)
            self.read.append(self.clock() - start)
            yield batch

    @property
    def micro_batch(self) -> float:
        return (quick(self.long[FIRST:]) - quick(self.short[FIRST:])) / (MICRO_BATCHES - 1)

    @property
    def end(self) -> float:
        """Every pass over the parameters."""
        return quick(self.zero[FIRST:]) + quick(self.update[FIRST:])


def quick(seconds: Sequence[float]) -> float:
    """The lower quartile: differences of what is measured apart bear nothing that others do on the host."""
    return statistics.quantiles(seconds, n=4)[0]


def layers_of(watch: Watch) -> float:
    """All steps of one micro-batch, forward and backward."""
    count = len(watch.forward["head.loss"])
    each = [seconds for direction in (watch.forward, watch.backward) for seconds in direction.values()]
    return sum(quick(seconds) * len(seconds) for seconds in each) / count


def _span(kept: Timed, full: Timed, watch: Watch) -> float:
    """Of a replay of one record, beside its steps."""
    config = full.trainer.config
    block = profile_of(config, full.trainer.vocab).block
    save_set = full.trainer.plan.chunk(0, 0).save_set("layers.0")
    again = sum(quick(watch.forward[name]) for name in replay(block, save_set).steps)
    added = (quick(full.long[FIRST:]) - quick(kept.long[FIRST:])) / MICRO_BATCHES / config.model.num_layers
    return (added - again) / records(block, save_set)
