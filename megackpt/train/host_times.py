"""Seconds of a training step beside the steps of its layers, for the planner (`plan.paces.Overheads`).

Small models train as in a run, on one rank, and what their layers take (`train/layer_times.py`) is taken off: what
stays is the executor's, the tape's, the engine's, the optimizer's.  In processor time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from megackpt.config.run import RunConfig
from megackpt.data.dataset import Batch
from megackpt.data.loader import MicroBatchLoader
from megackpt.mesh.device import DeviceSeam
from megackpt.mesh.launch import LaunchEnvironment
from megackpt.mesh.rendezvous import init_process_group, shutdown
from megackpt.observe.calibrate import HOW, Figure
from megackpt.observe.calibrate_ranks import run_ranks
from megackpt.plan.accelerators import Machine
from megackpt.plan.kept import records, replay
from megackpt.plan.paces import Overheads
from megackpt.train.build import Trainer, build
from megackpt.train.layer_times import SIZES, Flags, Watch, Watched, flags_of, measure_kernels, profile_of
from megackpt.train.loop import loader
from megackpt.train.step import Stepper

MICRO_BATCHES = 5  # of a long step; a short one has one
STEPS, FEW = 20, 5  # of a small model and of a large one
FIRST = 3  # steps that do not count


def with_layers(machine: Machine, tell: Callable[[Figure], None]) -> Machine:
    """The machine with what our layers and training steps take on a core of this host."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seam = DeviceSeam("cpu", torch.device("cpu"), "gloo")
    alone = not dist.is_initialized()

    def built(flags: Flags) -> Trainer:
        return build(RunConfig.from_flags(flags, 1), seam)

    if alone:
        init_process_group(RunConfig.from_flags(flags_of(SIZES[0], {}), 1).parallel, LaunchEnvironment.detect({}), seam)
    try:
        kernels, host, micro_batch = measure_kernels(built), *measure_overheads(built)
    finally:
        if alone:
            shutdown()
        torch.set_num_threads(threads)
    product = kernels["product"].forward
    tell(Figure("kernels", f"{len(kernels)} kinds", HOW["kernels"]))
    tell(Figure("products in layers", f"{1e-9 / product.flop_s:.0f} GFLOP/s, {1e6 * product.op_s:.1f} us", "fp32"))
    tell(Figure("an action", f"{1e6 * host.action_s:.0f} us", "forward or backward of a micro-batch less its layers"))
    tell(Figure("a replay", f"{1e6 * host.span_s:.0f} us", "of neighbouring steps, less the steps themselves"))
    ends = f"{1e3 * host.step_s:.1f} ms, {1e9 * host.parameter_s:.1f} ns a parameter"
    tell(Figure("end of a step", ends, "gradients zeroed, measured, clipped; weights updated"))
    messages = machine.overheads
    more = run_ranks(_stage, 2, ()) - micro_batch - host.batch_s - 2 * host.action_s
    message_s = max(0.0, more) / 4  # one forward, one backward, each with two ends
    tell(Figure("a message", f"{1e6 * message_s:.0f} us of each end", "processor time of two stages over one's"))
    host = replace(
        host,
        message_s=message_s,
        message_byte_s=messages.message_byte_s,
        message_latency_s=messages.message_latency_s,
    )
    return replace(machine, kernels=kernels, overheads=host)


def _stage(rank: int, meet: Path, answer: Connection) -> None:
    """One of two stages of the smallest model; answers with the processor time of both for a micro-batch."""
    torch.set_num_threads(1)
    seam = DeviceSeam("cpu", torch.device("cpu"), "gloo")
    more = {"pipeline-model-parallel-size": 2, "global-batch-size": 2 * MICRO_BATCHES}
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    timed = Timed(build(RunConfig.from_flags(flags_of(SIZES[0], more), 2), seam), time.process_time)
    for _ in range(FIRST + STEPS):
        timed.step(1, timed.short)
        timed.step(MICRO_BATCHES, timed.long)
    both = torch.tensor(timed.micro_batch, dtype=torch.float64)
    dist.all_reduce(both)
    if rank == 0:
        answer.send(both.item())
    shutdown()


def measure_overheads(built: Callable[[Flags], Trainer]) -> tuple[Overheads, float]:
    """What this host takes beside the layers of one stage, for each thing once; and for all of a micro-batch of the
    smallest model."""
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
    host = Overheads(
        action_s=action_s,
        batch_s=quick(kept.read),
        span_s=max(0.0, _span(kept, full, watch)),
        step_s=max(0.0, step_s),
        parameter_s=parameter_s,
    )
    return host, kept.micro_batch


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
