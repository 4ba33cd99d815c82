"""How the ranks are arranged."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megackpt.config.checks import above_zero, at_least, nearest_multiples, one_of
from megackpt.config.errors import UsageError
from megackpt.config.stage_layout import FLAG as LAYOUT
from megackpt.config.stage_layout import layer_counts

BACKENDS = ("nccl", "gloo")
DEVICES = ("cpu", "cuda")
SCHEDULES = ("1f1b", "gpipe", "zb-h1")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of the mesh axes; the data-parallel size follows from the number of processes."""

    tensor: int = 1
    pipeline: int = 1
    layers_per_chunk: int | None = None
    """Layers of a chunk, where stages have several; or ..."""
    chunks: int | None = None
    """... chunks per stage.  Neither: stages have one."""
    first_stage_layers: int | None = None
    """Layers of the first stage; the other stages share what is left."""
    last_stage_layers: int | None = None
    """Layers of the last stage."""
    count_embedding: bool = False
    """In the split, the embedding stands for a layer of the first stage."""
    count_loss: bool = False
    """In the split, the head stands for a layer of the last stage."""
    layout: str | None = None
    """What every chunk holds, in Megatron's words (see stage_layout.py)."""
    schedule: str = "1f1b"
    """The order of forwards and backwards; 1f1b is interleaved where stages have several chunks."""
    context: int = 1
    world_size: int = 1
    sequence_parallel: bool = False
    """Norms, residuals and dropout are split over tp along the sequence.  Off when tensor is 1: nothing to split."""
    distributed_optimizer: bool = False
    """Each data-parallel rank updates its share of the parameters and keeps the optimizer's state for that alone."""
    bucket_size: int | None = None
    """Elements of a bucket of gradients, at least; None = Megatron's 40 million or 1 million per data-parallel rank."""
    overlap_grad_reduce: bool = False
    """A bucket is reduced as soon as its last gradient of the step is there."""
    overlap_param_gather: bool = False
    """Updated parameters are gathered while the next forward has begun."""
    backend: str | None = None
    """None = nccl on GPUs, gloo on CPUs."""
    device: str | None = None
    """None = cuda where there is one, else cpu."""
    timeout_minutes: float = 10.0
    """A collective that takes longer than this ends the run."""

    def __post_init__(self) -> None:
        at_least("--tensor-model-parallel-size", self.tensor, 1)
        at_least("--pipeline-model-parallel-size", self.pipeline, 1)
        at_least("--num-layers-per-virtual-pipeline-stage", self.layers_per_chunk, 1)
        at_least("--num-virtual-stages-per-pipeline-rank", self.chunks, 1)
        at_least("--decoder-first-pipeline-num-layers", self.first_stage_layers, 1)
        at_least("--decoder-last-pipeline-num-layers", self.last_stage_layers, 1)
        one_of("--pipeline-schedule", self.schedule, SCHEDULES)
        at_least("--context-parallel-size", self.context, 1)
        at_least("the number of processes", self.world_size, 1)
        above_zero("--distributed-timeout-minutes", self.timeout_minutes)
        if self.backend is not None:
            one_of("--distributed-backend", self.backend, BACKENDS)
        if self.device is not None:
            one_of("--device", self.device, DEVICES)
        if self.context > 1:
            raise UsageError(
                f"--context-parallel-size {self.context} is not available in this version: only 1."
                " Long sequences: --tensor-model-parallel-size with --sequence-parallel, and --recompute-granularity."
            )
        if self.backend == "nccl" and self.device == "cpu":
            raise UsageError(
                "--distributed-backend nccl contradicts --device cpu: nccl moves GPU memory only."
                " Use --distributed-backend gloo, or leave it out."
            )
        at_least("--ddp-bucket-size", self.bucket_size, 1)
        if self.overlap_param_gather and not self.distributed_optimizer:
            raise UsageError(
                "--overlap-param-gather needs --use-distributed-optimizer: without it no rank lacks parameters."
                " Add --use-distributed-optimizer, or leave --overlap-param-gather out."
            )
        self._check_chunks()
        self._check_world()
        if self.tensor == 1:
            object.__setattr__(self, "sequence_parallel", False)

    @property
    def model(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor * self.context * self.pipeline

    @property
    def data(self) -> int:
        """Copies of the model."""
        return self.world_size // self.model

    @property
    def interleaves(self) -> bool:
        """Stages have several chunks (or might: how many chunks layers make is the model's business)."""
        several = self.layout_counts is not None and len(self.layout_counts) > self.pipeline
        return several or self.layers_per_chunk is not None or (self.chunks or 1) > 1

    @property
    def splits_backward(self) -> bool:
        """Weight gradients are actions of their own."""
        return self.schedule == "zb-h1"

    @property
    def counted_ends(self) -> int:
        """Ends of the model that stand for a layer each in the split."""
        return (self.count_embedding + self.count_loss) * (self.pipeline > 1)

    @cached_property
    def layout_counts(self) -> tuple[int, ...] | None:
        """Layers of every chunk in the order of the model, if a layout is given."""
        return None if self.layout is None else layer_counts(self.layout)

    def _check_chunks(self) -> None:
        asked = self._split_flags()
        if self.interleaves and self.pipeline == 1 and self.layout is None:
            flag = next(flag for flag in asked if "virtual" in flag)
            raise UsageError(
                f"{flag} {asked[flag]} needs several stages: on one there is no bubble that chunks could shrink."
                f" Nearest valid: --pipeline-model-parallel-size 2, or leave {flag} out."
            )
        if self.layers_per_chunk is not None and self.chunks is not None:
            raise UsageError(
                f"--num-layers-per-virtual-pipeline-stage {self.layers_per_chunk} and"
                f" --num-virtual-stages-per-pipeline-rank {self.chunks} say the same in two ways: give one of them."
            )
        if self.schedule != "1f1b" and self.interleaves:
            raise UsageError(
                f"--pipeline-schedule {self.schedule} has one chunk per stage, and several are asked for. Nearest"
                " valid: --pipeline-schedule 1f1b, or leave the chunks out."
            )
        if self.splits_backward and self.pipeline == 1:
            raise UsageError(
                f"--pipeline-schedule {self.schedule} fills the gaps between several stages. Nearest valid:"
                " --pipeline-model-parallel-size 2, or --pipeline-schedule 1f1b."
            )
        ends = [flag for flag in asked if flag.startswith("--decoder")]
        if ends and self.pipeline == 1:
            raise UsageError(
                f"{ends[0]} {asked[ends[0]]} needs several stages. Nearest valid: --pipeline-model-parallel-size 2, or"
                f" leave {ends[0]} out."
            )
        rivals = [flag for flag in asked if flag.startswith("--account") or "per-virtual" in flag]
        if ends and rivals:
            raise UsageError(
                f"{ends[0]} and {rivals[0]} both say how many layers a stage has: give one of them, and chunks by"
                " --num-virtual-stages-per-pipeline-rank."
            )
        if self.layout_counts is not None:
            self._check_layout(self.layout_counts, asked)

    def _split_flags(self) -> dict[str, object]:
        """The flags given that say how layers are dealt, the layout apart."""
        values: dict[str, object] = {
            "--num-layers-per-virtual-pipeline-stage": self.layers_per_chunk,
            "--num-virtual-stages-per-pipeline-rank": self.chunks,
            "--decoder-first-pipeline-num-layers": self.first_stage_layers,
            "--decoder-last-pipeline-num-layers": self.last_stage_layers,
            "--account-for-embedding-in-pipeline-split": self.count_embedding or None,
            "--account-for-loss-in-pipeline-split": self.count_loss or None,
        }
        return {flag: value for flag, value in values.items() if value is not None}

    def _check_layout(self, counts: tuple[int, ...], asked: dict[str, object]) -> None:
        if len(counts) % self.pipeline or (self.pipeline == 1 and len(counts) > 1):
            valid = nearest_multiples(len(counts), self.pipeline) if self.pipeline > 1 else "1"
            raise UsageError(
                f"{LAYOUT} {self.layout!r} has {len(counts)} chunks, which do not divide over"
                f" --pipeline-model-parallel-size {self.pipeline}. Nearest valid number of chunks: {valid}."
            )
        if self.chunks == len(counts) // self.pipeline:
            asked = {flag: value for flag, value in asked.items() if "per-pipeline-rank" not in flag}
        if asked:
            raise UsageError(f"{LAYOUT} says what {next(iter(asked))} says too: give one of them.")

    def _check_world(self) -> None:
        if self.world_size % self.model:
            raise UsageError(
                f"{self.world_size} process{'es' * (self.world_size > 1)} cannot be arranged as"
                f" --tensor-model-parallel-size {self.tensor} x --pipeline-model-parallel-size {self.pipeline}"
                f" = {self.model} ranks per copy of the model. Nearest valid number of processes:"
                f" {nearest_multiples(self.world_size, self.model)}."
            )
