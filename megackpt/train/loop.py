"""The training loop: steps, evaluations, saves, in the order a Megatron user expects."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta

import torch
from torch.distributed import ProcessGroup

from megackpt.config.errors import UsageError
from megackpt.config.parse import say_once
from megackpt.config.run import RunConfig
from megackpt.data.build import Datasets
from megackpt.data.dataset import SampleDataset
from megackpt.data.loader import MicroBatchLoader
from megackpt.mesh.board import Board
from megackpt.mesh.device import DeviceSeam
from megackpt.mesh.launch import LaunchEnvironment
from megackpt.mesh.process_mesh import ProcessMesh
from megackpt.mesh.rendezvous import init_process_group, leave_broken, shutdown
from megackpt.observe.memory_tracker import ActivationPeak
from megackpt.observe.timeline import TimelineRecorder
from megackpt.persist import CheckpointError, claimed, coordination_group
from megackpt.pipeline.errors import PipelineError, reason_of
from megackpt.train.adapt import Adapter, Peaks
from megackpt.train.agree import together
from megackpt.train.auto import auto_task
from megackpt.train.build import Trainer, build, build_data, refuse_ahead
from megackpt.train.checkpoint import Position, Saves, load_run, run_state
from megackpt.train.ending import Ending
from megackpt.train.foresight import prediction_of
from megackpt.train.guard import Guard
from megackpt.train.health import TrainingStopped
from megackpt.train.report import Reporter, over_ranks
from megackpt.train.seal import Seal
from megackpt.train.step import StepOutcome, Stepper

SAID_BY_ALL = (UsageError, CheckpointError, TrainingStopped)  # raised on every rank alike


def run(config: RunConfig, launch: LaunchEnvironment) -> int:
    """Train as ``config`` says; returns the exit code of this rank.  2: the run was refused."""
    began = time.monotonic()
    try:
        seam = DeviceSeam.create(config.parallel.device, launch.local_rank, config.parallel.backend)
        if seam.kind == "cpu" and launch.world_size > 1:
            torch.set_num_threads(1)  # ranks share the cores
        if config.train.deterministic_mode:
            seam.make_deterministic(os.environ)
        refuse_ahead(config, seam)
        init_process_group(config.parallel, launch, seam)
        try:
            launcher = os.getppid() if launch.source == "torchrun" else None
            asks = signal.Signals[config.train.exit_signal] if config.train.exit_signal_handler else None
            with Board(launch.rank, launch.world_size, launcher=launcher, asks=asks) as board:
                return _watched(config, seam, board, began)
        finally:
            shutdown()
    except SAID_BY_ALL as error:
        say_once(error, launch.rank)
        return 2 if isinstance(error, UsageError) else 1


def _watched(config: RunConfig, seam: DeviceSeam, board: Board, began: float) -> int:
    """Train; if a rank fails that others wait for, say what each of them was doing."""
    try:
        train(build(config, seam), board, began)
    except SAID_BY_ALL:
        raise
    except PipelineError as error:
        board.failed(str(error), f"it failed ({error.action or 'start'})")
        # This rank's own fault, which a traceback explains, unless it is in the user's files.
        own = error.peer is None and not isinstance(error.__cause__, UsageError)
        leave_broken(error if own else None)
        if own:
            raise
        return 1
    except CollectiveError as error:
        board.failed(str(error), "its collective failed")
        leave_broken()
        return 1
    except Exception as error:
        board.failed(f"{board.place}: {type(error).__name__}: {error}", f"it failed ({type(error).__name__})")
        leave_broken(error)
        raise
    return 0


class CollectiveError(RuntimeError):
    """A collective did not end: a rank that takes part is gone or stands still."""


def train(trainer: Trainer, board: Board | None = None, began: float | None = None) -> Position:
    """Run from where ``--load`` left off to the end, or to where flags, a signal that ``board`` has seen or the minutes
    since ``began`` (by ``time.monotonic``; None: now) end it; returns where the run stands."""
    began = time.monotonic() if began is None else began
    config = trainer.config
    group = coordination_group(timedelta(minutes=config.parallel.timeout_minutes))
    with claimed(config.checkpoint.save, group) as messages:
        ending = Ending(config.train, group, began, lambda: board is not None and board.asked)
        return _train(trainer, board, group, messages, ending)


def _train(
    trainer: Trainer, board: Board | None, group: ProcessGroup | None, messages: list[str], ending: Ending
) -> Position:
    config = trainer.config
    start = load_run(trainer, group)
    trainer = replace(trainer, learning_rate=start.learning_rate, datasets=enough_data(trainer, start.position))
    reporter = together(lambda: Reporter(trainer, start.position))
    reporter.start([*messages, *start.messages])
    stepper = Stepper(trainer)
    loop = Loop(trainer, reporter, stepper, start.position)
    if board is not None:
        board.says(place(trainer.mesh), loop.doing)
    consumed = start.position.consumed_samples
    batches = loader(trainer, trainer.datasets.train, consumed, config.batch.size_at)
    with batches, Saves(trainer, reporter.say, group) as saves:
        why = ending.reason(trained=False)  # a signal while the run was built: there is nothing to save
        while loop.where.iteration < loop.last and not why:
            with loop.named():
                loop.step(batches)
                saves.look()
                why = ending.reason()
                ends = loop.ends or why is not None
                if not why and (loop.due(config.train.eval_interval) or ends):
                    loop.evaluate(trainer.datasets.valid, "valid")
                    for name, dataset in trainer.datasets.valid_sets:
                        loop.evaluate(dataset, "valid", name)
                if config.checkpoint.save and (loop.due(config.checkpoint.save_interval) or ends):
                    loop.guard.check(f"before iteration {loop.where.iteration} is saved")
                    saves.use(loop.trainer)
                    saves.save(loop.where)
            if ends:
                break
        if why:
            reporter.say(f"megackpt: {why}: ending after iteration {loop.where.iteration} of {loop.last}")
        elif loop.where.iteration == loop.last:
            loop.evaluate(trainer.datasets.test, "test")
    reporter.finish()
    return loop.where


class Loop:
    """Where the run stands, and what one iteration does."""

    def __init__(self, trainer: Trainer, reporter: Reporter, stepper: Stepper, where: Position) -> None:
        self.trainer, self.reporter, self.stepper = trainer, reporter, stepper
        self.where = where
        self.last = trainer.config.last_iteration(where.iteration, where.consumed_samples)
        self.guard = guard_of(trainer)
        stepper.seal = self.guard.seal
        self._first = where.iteration + 1
        self.recorder = together(lambda: recorder(trainer, self._first + 2))
        self._saved_bytes: list[int] | None = None
        self._compared = False
        config = trainer.config.recompute
        self.adapter = None
        if config.adapt:
            self.adapter = Adapter(auto_task(trainer.config, trainer.vocab, trainer.seam), trainer.plan, self._first)

    @property
    def ends(self) -> bool:
        """This was the last iteration of the process."""
        exits = self.trainer.config.train.exit_interval
        return self.where.iteration == self.last or self.due(exits)

    def doing(self) -> str:
        """Where this rank is, in words, whatever thread asks."""
        return f"iteration {self.where.iteration + 1}, {self.stepper.doing()}"

    def due(self, interval: int | None) -> bool:
        return interval is not None and self.where.iteration % interval == 0

    def step(self, batches: MicroBatchLoader) -> None:
        """One optimizer step.  The bytes kept are counted once (they repeat), the peak when it is asked for."""
        trainer, config = self.trainer, self.trainer.config
        number = self.where.iteration + 1
        measures = self._measures(number) or (self.adapter is not None and self.adapter.looks(number))
        records = self.recorder is not None and self.recorder.wants(number)
        self.stepper.count_bytes = self._saved_bytes is None or measures or records
        if self.stepper.count_bytes:
            trainer.account.reset_peak()
        start = time.perf_counter()
        peak = ActivationPeak(trainer.seam) if measures else None
        with self._recording(number) if records else nullcontext():
            with peak or nullcontext():
                totals = self.stepper.accumulate(batches, config.batch.size_at(self.where.consumed_samples))
            outcome = self.stepper.update(totals, self.where.consumed_samples)
        trainer.seam.synchronize()
        seconds = time.perf_counter() - start
        self.where = Position(number, self.where.consumed_samples + outcome.samples)
        if self.stepper.count_bytes:
            self._saved_bytes = over_ranks(trainer.account.peak, trainer)
        peaks = over_ranks(peak.bytes, trainer) if peak is not None else None
        self._report(outcome, seconds, peaks)
        if trainer.health.hopeless:
            trainer.health.stop(trainer.mesh, number, outcome.loss, outcome.loss_scale)
        if self.due(config.train.check_replicas_interval):
            self.guard.check(f"after iteration {number}")
        if peaks is not None and number > self._first and outcome.samples == config.batch.global_batch_size:
            self._compare(number, peaks)

    def _compare(self, number: int, by_rank: Sequence[int]) -> None:
        """The measured peak beside the predicted one, once and whenever the plan changes; and perhaps another plan."""
        trainer, adapter = self.trainer, self.adapter
        adapts = adapter is not None and adapter.looks(number)
        if self._compared and not adapts:
            return
        peaks = Peaks.of(by_rank, trainer.mesh.shape, prediction_of(trainer))
        if not self._compared:
            self.reporter.say(f"megackpt: peak of activations in iteration {number}: {peaks}")
        self._compared = True
        changed = adapter.look(number, peaks) if adapter is not None and adapts else None
        if adapter is not None and changed is not None:
            self.trainer = self.stepper.trainer = replace(trainer, plan=adapter.plan)
            self.reporter.replan(self.trainer, changed)
            self._compared, self._saved_bytes = False, None

    @contextmanager
    def _recording(self, number: int) -> Iterator[None]:
        """Let the step enter the event record."""
        assert self.recorder is not None
        with self.recorder.recording(number) as step:
            self.stepper.record, self.stepper.on_replay = step, self.recorder.replayed(step)
            try:
                yield
            finally:
                self.stepper.record = self.stepper.on_replay = None

    @contextmanager
    def named(self) -> Iterator[None]:
        """A collective that fails (a rank died or stands still) says which rank waited, where, and in which
        iteration."""
        try:
            yield
        except (PipelineError, *SAID_BY_ALL):
            raise
        except RuntimeError as error:
            raise CollectiveError(f"{place(self.trainer.mesh)} failed in {self.doing()}: {reason_of(error)}") from error

    def _measures(self, number: int) -> bool:
        interval = self.trainer.config.logging.memory_track_interval
        return number == self._first + 1 if interval is None else number % interval == 0

    def _report(self, outcome: StepOutcome, seconds: float, peaks: Sequence[int] | None) -> None:
        self.reporter.iteration(self.where, outcome, seconds, self._saved_bytes, peaks)

    def evaluate(self, dataset: SampleDataset | None, split: str, name: str = "") -> None:
        """Mean loss of a split, if there is any to evaluate; always over the same samples."""
        iterations = self.trainer.config.train.eval_iters
        if dataset is None or iterations == 0:
            return
        start = time.perf_counter()
        with loader(self.trainer, dataset, 0) as batches:
            loss = self.stepper.evaluate(batches, iterations)
        self.reporter.evaluation(self.where, loss, time.perf_counter() - start, split, name)


def guard_of(trainer: Trainer) -> Guard:
    """The guard of a run, with a seal where checks are asked for at an interval."""
    state, settle, seal = run_state(trainer, optimizer=True, rng=False).tensors, trainer.optimizer.settle, None
    if trainer.config.train.check_replicas_interval is not None:
        copied = [shard.local for shard in state if shard.key.startswith("model.")]
        seal = Seal(trainer.optimizer, copied, settle)
    return Guard(trainer.mesh, state, settle, seal)


def recorder(trainer: Trainer, first: int) -> TimelineRecorder | None:
    """The event record that ``--timeline`` asks for, beginning with iteration ``first``."""
    logging, mesh = trainer.config.logging, trainer.mesh
    if logging.timeline is None:
        return None
    about = {"name": f"{trainer.plan.name} on {mesh.world_size} ranks", "stages": mesh.pp.size}
    steps = logging.timeline_steps
    try:
        return TimelineRecorder(logging.timeline, mesh.rank, mesh.pp.index, first=first, steps=steps, about=about)
    except OSError as error:
        raise UsageError(f"--timeline {logging.timeline} cannot be written: {error.strerror or error}") from error


def place(mesh: ProcessMesh) -> str:
    """A rank as users know it."""
    return (
        f"rank {mesh.rank} of {mesh.world_size} (tp {mesh.tp.index}, dp {mesh.dp.index}, stage {mesh.pp.index} of"
        f" {mesh.pp.size})"
    )


def enough_data(trainer: Trainer, where: Position) -> Datasets:
    """The datasets, with training data to the end of a run that goes on from ``where``.

    Those that were built count this run's global batch from sample 0 on; the steps before ``where`` may have had a
    larger one.  The order of samples does not depend on their number.
    """
    config = trainer.config
    needed = config.last_sample(where.iteration, where.consumed_samples)
    if needed <= len(trainer.datasets.train):
        return trainer.datasets
    return together(lambda: build_data(config, trainer.vocab, trainer.tokenizer, train_samples=needed))


def loader(
    trainer: Trainer, dataset: SampleDataset, consumed: int, batch_size: Callable[[int], int] | None = None
) -> MicroBatchLoader:
    """The micro-batches of this data-parallel rank from sample ``consumed`` on, in full global batches unless
    ``batch_size`` says how many samples the step after so many has."""
    config, mesh = trainer.config, trainer.mesh
    return MicroBatchLoader(
        dataset,
        batch_size or config.batch.global_batch_size,
        config.batch.micro_batch_size,
        mesh.dp.index,
        mesh.dp.size,
        consumed_samples=consumed,
        num_workers=config.data.num_workers,
    )
