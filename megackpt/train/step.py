"""One optimizer step, and one evaluation.

Losses are sums over unmasked tokens.  Backward starts from the sum divided by a constant (the tokens of a full global
batch), so that no micro-batch needs to know another's mask; the finished gradients are then multiplied by constant
over real number of tokens, exactly 1 when nothing is masked.  The mean is thus over tokens, whatever the micro-batch
size, the number of micro-batches, the stages or the data-parallel ranks, and a masked micro-batch contributes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megackpt.data.dataset import Batch, document_lengths
from megackpt.data.loader import MicroBatchLoader
from megackpt.mesh.process_mesh import ProcessMesh
from megackpt.model.documents import Documents
from megackpt.model.ends import masked_loss
from megackpt.optim.norm import clip_, gradient_statistics, params_norm
from megackpt.pipeline.boundary import StageResult, TensorSpec
from megackpt.pipeline.executor import Executor
from megackpt.pipeline.stages import chunk_specs
from megackpt.plan.events import StepRecord
from megackpt.plan.schedule import generator
from megackpt.plan.slots import slots_of
from megackpt.recompute import Tape
from megackpt.recompute.tiers import HostTier
from megackpt.train.build import Trainer
from megackpt.train.seal import Seal


@dataclass(frozen=True)
class StepOutcome:
    """What one step did, the same on all ranks.  ``skipped``: the gradient was not finite and nothing was updated;
    the loss scale is that of the next step, as Megatron prints it."""

    loss: float
    tokens: int
    grad_norm: float
    num_zeros: int | None
    params_norm: float | None
    learning_rate: float
    decoupled_learning_rate: float | None
    loss_scale: float
    samples: int
    skipped: bool


class Stepper:
    """Runs steps and evaluations of one rank through the pipeline."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        config = trainer.config
        self.samples = config.batch.global_batch_size  # of the step under way
        self.count_bytes = False
        self.phase = "start"
        self.seal: Seal | None = None  # broken around each update
        self.record: StepRecord | None = None  # of the step under way, if it is recorded
        self.on_replay: Callable[[str, float, float], None] | None = None
        self._batches: Iterator[Batch] = iter(())
        self._held: dict[int, tuple[dict[str, Tensor], Documents]] = {}  # micro-batches that later chunks need
        self._slots: Mapping[tuple[int, int], int] = {}
        length = config.model.seq_length
        if config.parallel.sequence_parallel:
            length //= trainer.mesh.tp.size
        shape = (length, config.batch.micro_batch_size, config.model.hidden_size)  # [s/t, b, h]
        self.executor = Executor(
            trainer.mesh,
            self._forward,
            [chunk_specs(piece, (TensorSpec(shape, trainer.precision.params_dtype),)) for piece in trainer.pieces],
            schedule=generator(config.parallel.schedule, len(trainer.chunks)),
            deferred=trainer.deferred,
            open_tape=self._open_tape,
            device=trainer.seam.device,
            timeout_s=config.parallel.timeout_minutes * 60,
        )

    def doing(self) -> str:
        """In words, for a rank that is asked from outside."""
        progress = self.executor.progress
        return self.phase if progress is None else progress.words()

    # -- what the pipeline calls ---------------------------------------------------------------------------------

    def _open_tape(self, chunk: int, micro_batch: int) -> Tape:
        trainer = self.trainer
        for tier in trainer.tiers.values():
            if isinstance(tier, HostTier):  # of one forward at a time tensors are on their way out
                tier.settle()
        plan = trainer.plan.chunk(trainer.mesh.pp.index, chunk, self._slots[micro_batch, chunk])
        account = trainer.account if self.count_bytes else None
        label, verify = f"micro-batch {micro_batch}", trainer.config.recompute.verify
        return Tape(
            plan,
            trainer.ledger,
            account=account,
            tiers=trainer.tiers,
            label=label,
            verify=verify,
            on_replay=self.on_replay,
            layers=trainer.pieces[chunk].layers,
        )

    def _forward(
        self, chunk: int, micro_batch: int, received: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...] | StageResult:
        piece, model = self.trainer.pieces[chunk], self.trainer.chunks[chunk]
        batch, documents = self._batch(chunk, micro_batch)
        x = batch["tokens"] if piece.is_first else received[0]
        if not piece.is_last:
            return (model(x, documents=documents),)
        total, tokens = masked_loss(model(x, batch["labels"], documents), batch["loss_mask"])
        seed = total / (self.nominal_tokens / self.trainer.scaler.scale)
        return StageResult(seed, {"total": total.double(), "tokens": tokens})

    def _batch(self, chunk: int, micro_batch: int) -> tuple[dict[str, Tensor], Documents | None]:
        """What a chunk needs of a micro-batch: the ends read it, and with documents of their own all layers do."""
        data, pieces = self.trainer.config.data, self.trainer.pieces
        if not (data.reset_position_ids or data.reset_attention_mask):
            return (self._next_batch() if pieces[chunk].is_first or pieces[chunk].is_last else {}), None
        if micro_batch not in self._held:  # the rank's first chunk comes to it first
            self._held[micro_batch] = self._next_documents()
        last = chunk == len(pieces) - 1
        return self._held.pop(micro_batch) if last else self._held[micro_batch]

    def _next_documents(self) -> tuple[dict[str, Tensor], Documents]:
        arrays = next(self._batches)
        batch = self._on_device(arrays)
        positions = batch["position_ids"] if self.trainer.config.data.reset_position_ids else None
        lengths = document_lengths(arrays["segments"]) if "segments" in arrays else ()
        return batch, Documents(positions, batch.get("segments"), lengths)

    def _next_batch(self) -> dict[str, Tensor]:
        return self._on_device(next(self._batches))

    def _on_device(self, arrays: Batch) -> dict[str, Tensor]:
        return {name: self.trainer.seam.bring(torch.from_numpy(array)) for name, array in arrays.items()}

    # -- what the loop calls -------------------------------------------------------------------------------------

    def train(self, batches: MicroBatchLoader | Iterator[Batch], consumed_samples: int) -> StepOutcome:
        """Forward and backward of one global batch, reduction, clipping, update."""
        totals = self.accumulate(batches, self.trainer.config.batch.size_at(consumed_samples))
        return self.update(totals, consumed_samples)

    @property
    def nominal_tokens(self) -> int:
        """Tokens of the step's global batch if none is masked."""
        return self.samples * self.trainer.config.model.seq_length

    def accumulate(self, batches: Iterator[Batch], samples: int | None = None) -> tuple[float, int]:
        """Gradients of one global batch in the buffer, summed over micro-batches and ranks and divided by the number
        of tokens.  Returns the sum of the losses and that number.  ``samples``: the size of the batch, if not full."""
        trainer, batch = self.trainer, self.trainer.config.batch
        self.samples = samples or batch.global_batch_size
        micro_batches = self.samples // (batch.micro_batch_size * trainer.mesh.dp.size)
        self._training(True)
        trainer.reduction.start(micro_batches, early=not trainer.health.last_chance)
        self.phase = "reading data"
        total, tokens = self._run(batches, micro_batches, forward_only=False)
        if trainer.health.last_chance:
            self._look()
        self.phase = "reducing gradients"
        scale = self.nominal_tokens / tokens / trainer.scaler.scale if tokens else 0.0
        trainer.reduction.finish(scale)
        return total, tokens

    def update(self, totals: tuple[float, int], consumed_samples: int) -> StepOutcome:
        """Measure, clip and apply the gradients in the buffer; leave the step out if they are not finite."""
        trainer, logging = self.trainer, self.trainer.config.logging
        self.phase = "measuring gradients"
        statistics = gradient_statistics(trainer.buffer, trainer.mesh, count_zeros=logging.log_num_zeros_in_grad)
        total, tokens = totals
        rates = trainer.learning_rate(consumed_samples)
        healthy = statistics.finite and math.isfinite(total)
        self.phase = "updating parameters"
        if healthy:
            clip_(trainer.buffer, statistics.norm, trainer.config.optimizer.clip_grad)
            if self.seal is not None:
                self.seal.open()
            trainer.optimizer.step(rates.rate, rates.decoupled)
            if self.seal is not None:
                self.seal.close()
        curable = trainer.scaler.can_fall
        trainer.scaler.update(not healthy)
        trainer.health.update(healthy, curable)
        if trainer.health.hopeless and trainer.health.suspects is None:
            self._look()
        norm = None
        if logging.log_params_norm:
            norm = params_norm(trainer.optimizer.masters(), trainer.mesh, sharded=trainer.optimizer.sharded)
        self.phase = "between steps"
        return StepOutcome(
            loss=total / tokens if tokens else 0.0,
            tokens=tokens,
            grad_norm=statistics.norm,
            num_zeros=statistics.num_zeros,
            params_norm=norm,
            learning_rate=rates.rate,
            decoupled_learning_rate=rates.decoupled,
            loss_scale=trainer.scaler.scale,
            samples=self.samples,
            skipped=not healthy,
        )

    def evaluate(self, batches: MicroBatchLoader, iterations: int) -> float:
        """Mean loss per token over ``iterations`` global batches.  Draws nothing: training goes on unchanged."""
        trainer = self.trainer
        self._training(False)
        total, tokens = 0.0, 0
        for _ in range(iterations):
            one, count = self._run(batches, trainer.config.micro_batches, forward_only=True)
            total, tokens = total + one, tokens + count
        self._training(True)
        return total / tokens if tokens else 0.0

    def _look(self) -> None:
        gradients = self.trainer.buffer.gradients()
        self.trainer.health.look((record, gradients[record.name]) for _, record in self.trainer.parameters)

    def _training(self, on: bool) -> None:
        for chunk in self.trainer.chunks:
            if chunk.training is not on:  # it goes through all modules
                chunk.train(on)

    def _run(self, batches: Iterator[Batch], micro_batches: int, *, forward_only: bool) -> tuple[float, int]:
        self._batches = batches
        events = self.record.events if self.record is not None and not forward_only else None
        pp = self.trainer.mesh.pp
        self._slots = slots_of(self.executor.schedule(pp.size, pp.index, micro_batches))
        try:
            reports = self.executor.run(micro_batches, forward_only=forward_only, events=events)
        finally:
            self._batches = iter(())
            self._held.clear()
        self.phase = "adding up losses"
        return world_totals(reports, self.trainer.mesh, self.trainer.seam.device)


def world_totals(reports: list[dict[str, Tensor]], mesh: ProcessMesh, device: torch.device) -> tuple[float, int]:
    """Sums of losses and tokens over all data-parallel ranks, known on every rank: one small all-reduce."""
    values = torch.zeros(2, dtype=torch.float64, device=device)
    if reports and mesh.tp.index == 0:
        totals = torch.stack([r["total"] for r in reports]).sum()
        counts = torch.stack([r["tokens"] for r in reports]).sum()
        values = torch.stack([totals, counts]).to(torch.float64)
    if mesh.world.size > 1:
        dist.all_reduce(values, group=mesh.world.group)
    total, tokens = values.tolist()
    return total, round(tokens)
