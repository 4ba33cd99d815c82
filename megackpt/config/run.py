"""The whole of a run: the sections, and the checks that need more than one of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megackpt.config.batch import BatchConfig
from megackpt.config.checks import nearest_divisors, nearest_multiples
from megackpt.config.data import DataConfig
from megackpt.config.errors import UsageError
from megackpt.config.model import ModelConfig
from megackpt.config.observe import LoggingConfig
from megackpt.config.optimizer import OptimizerConfig
from megackpt.config.parallel import ParallelConfig
from megackpt.config.persist import CheckpointConfig, check_torch_format
from megackpt.config.precision import PrecisionConfig
from megackpt.config.recompute import RecomputeConfig
from megackpt.config.resolve import SECTION_TYPES, sections
from megackpt.config.schedule import TrainConfig
from megackpt.config.sources import Source, expand, read_mapping
from megackpt.config.stage_checks import check_split, chunks_of
from megackpt.config.stored import dump_sections


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run that can start: every contradiction was refused when this was made."""

    model: ModelConfig
    parallel: ParallelConfig
    batch: BatchConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    recompute: RecomputeConfig
    precision: PrecisionConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig

    def __post_init__(self) -> None:
        self._check_tensor_parallel()
        check_split(self.parallel, self.model.num_layers)
        self.batch.micro_batches(self.parallel.data)
        self._check_schedule()
        if self.recompute.distribute and self.parallel.sequence_parallel:
            raise UsageError(
                "--distribute-saved-activations contradicts --sequence-parallel: with it boundaries are split along the"
                " sequence already. Leave --distribute-saved-activations out."
            )
        if self.checkpoint.save and self.checkpoint.format == "torch" and self.checkpoint.save_optim:
            check_torch_format(self.parallel)
        if self.train.deterministic_mode and self.model.compile:
            raise UsageError(
                "--deterministic-mode contradicts --compile: the compiler chooses kernels by their time, and another"
                " run may get others. Leave --compile out."
            )
        if "attn.rope" in self.recompute.modules and self.model.position_embedding_type != "rope":
            raise UsageError(
                "--recompute-modules attn.rope contradicts --position-embedding-type"
                f" {self.model.position_embedding_type}: this model rotates nothing."
            )
        if "attn.qknorm" in self.recompute.modules and not self.model.qk_layernorm:
            raise UsageError("--recompute-modules attn.qknorm needs --qk-layernorm: this model norms no heads.")

    @classmethod
    def from_flags(cls, flags: Mapping[str, object], world_size: int = 1) -> RunConfig:
        """A run from flag names (``num_layers``, ``--num-layers``; flat or by section) and values, as a YAML file
        would give them.  Raises UsageError on unknown and refused flags too."""
        source = Source()
        read_mapping(flags, source)
        problems = [*source.unknown, *source.refused, *source.errors]
        if problems:
            raise UsageError("\n".join(problems))
        return cls(**sections(expand(source.values), world_size))  # type: ignore[arg-type]

    @property
    def chunks(self) -> int:
        """Chunks (virtual stages) of every pipeline stage."""
        return chunks_of(self.parallel, self.model.num_layers)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one step on each data-parallel rank."""
        return self.batch.micro_batches(self.parallel.data)

    @property
    def total_iterations(self) -> int:
        """Optimizer steps of the whole run."""
        return self.last_iteration(0, 0)

    def last_iteration(self, iteration: int, consumed_samples: int) -> int:
        """Where a run ends that goes on after ``iteration``.  With --train-samples that depends on the samples which
        are left: the steps before may have had another --global-batch-size."""
        if self.train.train_samples is not None:
            return iteration + self.batch.steps(consumed_samples, self.train.train_samples)[0]
        assert self.train.train_iters is not None
        return self.train.train_iters

    def last_sample(self, iteration: int, consumed_samples: int) -> int:
        """Samples consumed at the end of a run that goes on after ``iteration``."""
        if self.train.train_samples is not None:
            return self.batch.steps(consumed_samples, self.train.train_samples)[1]
        left = max(0, self.last_iteration(iteration, consumed_samples) - iteration)
        return consumed_samples + left * self.batch.global_batch_size

    def to_yaml(self) -> str:
        """YAML of flag names by section; ``--config`` reads it back to an equal run (at the same world size)."""
        return dump_sections({section: getattr(self, section) for section in SECTION_TYPES})

    def _check_tensor_parallel(self) -> None:
        model, tensor = self.model, self.parallel.tensor
        split = (
            ("--num-attention-heads", model.num_attention_heads),
            ("--num-query-groups", model.num_query_groups),
            ("--ffn-hidden-size", model.ffn_hidden_size),
        )
        for flag, value in split:
            _divides(flag, value, tensor, "", "" if flag == "--ffn-hidden-size" else _padding(model, tensor))
        if self.parallel.sequence_parallel:
            _divides("--seq-length", model.seq_length, tensor, " (with --sequence-parallel)")

    def _check_schedule(self) -> None:
        unit, wrong = ("samples", "iters") if self.train.by_samples else ("iters", "samples")
        length: int = getattr(self.train, f"train_{unit}")
        schedule = self.optimizer
        for what in ("decay", "warmup", "wsd-decay"):
            given = getattr(schedule, f"lr_{what.replace('-', '_')}_{wrong}")
            if given:
                raise UsageError(
                    f"--lr-{what}-{wrong} {given} contradicts --train-{unit} {length}: the schedule is counted as"
                    f" training is. Use --lr-{what}-{unit}."
                )
        if self.batch.ramp is not None and not self.train.by_samples:
            raise UsageError(
                f"--rampup-batch-size {' '.join(self.batch.rampup_batch_size)} needs --train-samples: with a batch that"
                f" grows, --train-iters {length} says neither how long the run nor how long its schedule is."
            )
        if self.total_iterations < 1:
            first = self.batch.sizes[0]
            which = "--global-batch-size" if self.batch.ramp is None else "--rampup-batch-size"
            raise UsageError(
                f"--train-samples {length} is less than one step of {which} {first}. Nearest valid:"
                f" --train-samples {first}."
            )
        given_decay: int | None = getattr(schedule, f"lr_decay_{unit}")
        decay = given_decay or length
        warmup: int = getattr(schedule, f"lr_warmup_{unit}")
        if warmup >= decay:
            flag = f"--lr-decay-{unit}" if given_decay else f"--train-{unit}"
            raise UsageError(
                f"--lr-warmup-{unit} {warmup} must be less than the decay length, {flag} {decay}."
                f" Nearest valid: --lr-warmup-{unit} {decay - 1}."
            )
        last: int = getattr(schedule, f"lr_wsd_decay_{unit}") or 0
        flag = f"--lr-warmup-{unit} {warmup}"
        if schedule.lr_warmup_fraction is not None:
            warmup = math.ceil(schedule.lr_warmup_fraction * decay)
            flag = f"--lr-warmup-fraction {schedule.lr_warmup_fraction} (of {decay})"
        if last + warmup > decay:
            raise UsageError(
                f"--lr-wsd-decay-{unit} {last} and {flag} overlap: together they are longer than the decay length"
                f" {decay}. Nearest valid: --lr-wsd-decay-{unit} {decay - warmup}."
            )


def _padding(model: ModelConfig, tensor: int) -> str:
    """How the heads can be made to divide."""
    padded = model.with_query_groups(-(-model.unpadded_query_groups // tensor) * tensor)
    grouped = model.num_query_groups != model.num_attention_heads
    groups = f" --group-query-attention --num-query-groups {padded.num_query_groups}" if grouped else ""
    return (
        f" Or keep the model and pad it with heads that are zero: --num-attention-heads {padded.num_attention_heads}"
        f"{groups} --unpadded-query-groups {model.unpadded_query_groups} --kv-channels {model.kv_channels}, which loads"
        f" its checkpoints as they are (megackpt convert --target-tensor-parallel-size {tensor} sets them for you)."
    )


def _divides(flag: str, value: int, tensor: int, when: str, otherwise: str = "") -> None:
    if value % tensor:
        raise UsageError(
            f"{flag} {value} is not divisible by --tensor-model-parallel-size {tensor}{when}. Nearest valid:"
            f" {flag} {nearest_multiples(value, tensor)}, or --tensor-model-parallel-size"
            f" {nearest_divisors(tensor, value)}.{otherwise}"
        )
