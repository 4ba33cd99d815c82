"""What the loop tells: start-up summary, log lines, metrics, dashboards, pictures.  One rank speaks for all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import torch
import torch.distributed as dist

from megackpt.config.errors import UsageError
from megackpt.config.model import padding_words
from megackpt.observe.console import Console
from megackpt.observe.host_memory import host_memory
from megackpt.observe.log_line import evaluation_line, format_bytes, iteration_line
from megackpt.observe.metrics import MetricsWriter
from megackpt.observe.progress import Progress
from megackpt.observe.record import EvaluationRecord, IterationRecord, MemoryCounters, summarise
from megackpt.observe.report import METRICS, draw_run
from megackpt.observe.throughput import peak_tflops, throughput
from megackpt.observe.writers import build_writers, logging_rank, warn_stderr
from megackpt.train.build import Trainer
from megackpt.train.checkpoint import Position
from megackpt.train.foresight import foresee, step_flops
from megackpt.train.step import StepOutcome


class Reporter:
    """Everything that leaves the process as text, numbers or pictures."""

    def __init__(self, trainer: Trainer, start: Position) -> None:
        self.trainer = trainer
        config = trainer.config
        self.speaks = trainer.mesh.rank == logging_rank(trainer.mesh.world_size)
        self._console = Console(warn_stderr)
        self.run_dir = Path(config.logging.run_dir) if config.logging.run_dir else None
        self._last = config.last_iteration(start.iteration, start.consumed_samples)
        self.progress = Progress(self._last, start.iteration)
        self._pending: list[IterationRecord] = []
        self._flops, self._hardware_flops = step_flops(trainer)
        self._peak = config.logging.peak_tflops
        if self._peak is None:
            self._peak = peak_tflops(trainer.seam.name, config.precision.params_dtype)
        if self.speaks and self.run_dir is not None:
            try:
                self.run_dir.mkdir(parents=True, exist_ok=True)
                (self.run_dir / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
                self._write_plan()
            except OSError as error:
                raise UsageError(f"--run-dir {self.run_dir}: {error.strerror or error}") from error
        self._metrics = [MetricsWriter(path) for path in self._metric_files()] if self.speaks else []
        self._writers = build_writers(
            is_logging_rank=self.speaks,
            tensorboard_dir=config.logging.tensorboard_dir,
            wandb_project=config.logging.wandb_project,
            wandb_exp_name=config.logging.wandb_exp_name,
            directory=str(self.run_dir or "."),
            config=config,
        )

    def _metric_files(self) -> list[Path]:
        named = self.trainer.config.logging.metrics_file
        files = [Path(named)] if named else []
        if self.run_dir is not None and not (named and Path(named).resolve() == (self.run_dir / METRICS).resolve()):
            files.append(self.run_dir / METRICS)
        return files

    def say(self, text: str) -> None:
        if self.speaks:
            self._console.line(text)

    def start(self, messages: Sequence[str]) -> None:
        """Who runs what: once, before the first step."""
        trainer, shape = self.trainer, self.trainer.mesh.shape
        count = sum(record_size(record) for _, record in trainer.parameters if record.counted)
        counts = torch.tensor([count if trainer.mesh.tp.index == trainer.mesh.dp.index == 0 else 0])
        counts = counts.to(trainer.seam.device)
        if trainer.mesh.world_size > 1:
            dist.all_reduce(counts)
        self.say(
            f"megackpt: {int(counts.item()):,} parameters ({trainer.config.precision.params_dtype}), vocabulary"
            f" {trainer.vocab}, on {trainer.mesh.world_size} {trainer.seam.kind} ranks ({trainer.seam.backend}):"
            f" tp {shape.tp} x pp {shape.pp} x dp {shape.dp}"
            f"{', sequence parallel' if trainer.config.parallel.sequence_parallel else ''};"
            f" {trainer.config.micro_batches} micro-batches per step; recompute: {trainer.plan.name}"
        )
        model = trainer.config.model
        padding = [padding_words(model)] if model.unpadded_query_groups < model.num_query_groups else []
        for message in (*padding, *foresee(trainer), *trainer.datasets.notes, *messages):
            self.say(f"megackpt: {message}")

    def replan(self, trainer: Trainer, why: str) -> None:
        """Another plan from the next iteration on: work and the run folder follow it."""
        self.trainer = trainer
        self._flops, self._hardware_flops = step_flops(trainer)
        self.say(f"megackpt: {why}")
        for message in foresee(trainer):
            self.say(f"megackpt: {message}")
        with self._spared("plan.json"):
            self._write_plan()

    def _write_plan(self) -> None:
        if self.speaks and self.run_dir is not None:
            (self.run_dir / "plan.json").write_text(self.trainer.plan.dumps(), encoding="utf-8")

    @contextmanager
    def _spared(self, what: str) -> Iterator[None]:
        """The run folder is for people: a full disk or a damaged file in it must not end a run that has trained."""
        try:
            yield
        except (OSError, ValueError, TypeError, KeyError) as error:
            warn_stderr(f"--run-dir {self.run_dir}: no {what}: {error}")

    def iteration(
        self,
        where: Position,
        outcome: StepOutcome,
        seconds: float,
        saved_bytes: Sequence[int] | None,
        peak_bytes: Sequence[int] | None,
    ) -> None:
        """One step is done."""
        self.progress.mark(where.iteration)
        if not self.speaks:
            return
        record = self._record(where, outcome, seconds, saved_bytes, peak_bytes)
        for metrics in self._metrics:
            metrics.iteration(record)
        self._writers.iteration(record)
        self._pending.append(record)
        if where.iteration % self.trainer.config.logging.log_interval == 0:
            throughput_too = self.trainer.config.logging.log_throughput
            self._console.line(iteration_line(summarise(self._pending), datetime.now(), throughput_too))
            self._pending.clear()

    def _record(
        self,
        where: Position,
        outcome: StepOutcome,
        seconds: float,
        saved_bytes: Sequence[int] | None,
        peak_bytes: Sequence[int] | None,
    ) -> IterationRecord:
        trainer = self.trainer
        devices = trainer.mesh.world_size
        share = outcome.samples / trainer.config.batch.global_batch_size
        flops, hardware_flops = self._flops * share, self._hardware_flops * share
        rates = throughput(outcome.tokens, seconds, devices, flops, hardware_flops, self._peak)
        return IterationRecord(
            iteration=where.iteration,
            train_iters=self._last,
            consumed_samples=where.consumed_samples,
            global_batch_size=outcome.samples,
            iteration_time_s=seconds,
            learning_rate=outcome.learning_rate,
            decoupled_learning_rate=outcome.decoupled_learning_rate,
            loss_scale=outcome.loss_scale,
            lm_loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            num_zeros=outcome.num_zeros,
            params_norm=outcome.params_norm,
            skipped_iterations=int(outcome.skipped),
            nan_iterations=int(not math.isfinite(outcome.loss)),
            world_size=devices,
            tokens_per_s=rates.tokens_per_s,
            tflops_per_device=rates.tflops_per_device,
            mfu=rates.mfu,
            hfu=rates.hfu,
            replay_overhead=rates.replay_overhead,
            saved_activation_bytes=saved_bytes,
            peak_activation_bytes=peak_bytes,
            memory=device_memory(trainer),
            time_left_s=self.progress.left(),
        )

    def evaluation(self, where: Position, loss: float, seconds: float, split: str = "valid", name: str = "") -> None:
        """One evaluation is done."""
        if not self.speaks:
            return
        config = self.trainer.config
        samples = config.train.eval_iters * config.batch.global_batch_size
        record = EvaluationRecord(where.iteration, where.consumed_samples, loss, split, name, samples, seconds)
        for metrics in self._metrics:
            metrics.evaluation(record)
        self._writers.evaluation(record)
        self._console.line(evaluation_line(record))

    def finish(self) -> None:
        """Close files; draw what was measured."""
        for metrics in self._metrics:
            metrics.close()
        self._writers.close()
        if self.speaks and self.run_dir is not None:
            with self._spared("pictures"):
                for picture in draw_run(self.run_dir):
                    self._console.line(f"megackpt: wrote {picture}")


def record_size(record: object) -> int:
    """Elements of the whole tensor, padding left out."""
    shape = list(record.global_shape)  # type: ignore[attr-defined]
    if record.valid is not None:  # type: ignore[attr-defined]
        shape[record.padded_dim] = record.valid  # type: ignore[attr-defined]
    size = 1
    for extent in shape:
        size *= extent
    return size


def device_memory(trainer: Trainer) -> MemoryCounters:
    """Memory of this rank: the device's allocator, or the process where there is none."""
    allocated, peak = trainer.seam.allocated_bytes(), trainer.seam.peak_bytes()
    if allocated is None or peak is None:
        return host_memory()
    return MemoryCounters(allocated, peak)


def over_ranks(value: int, trainer: Trainer) -> list[int]:
    """One number of every rank, in rank order, on every rank."""
    mine = torch.tensor([value], dtype=torch.int64, device=trainer.seam.device)
    if trainer.mesh.world_size == 1:
        return [value]
    everyone = torch.empty(trainer.mesh.world_size, dtype=torch.int64, device=trainer.seam.device)
    dist.all_gather_into_tensor(everyone, mine)
    return everyone.tolist()


__all__ = ["Reporter", "format_bytes", "over_ranks"]
