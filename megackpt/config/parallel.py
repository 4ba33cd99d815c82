"""How the ranks are arranged."""

from __future__ import annotations

from dataclasses import dataclass

from megackpt.config.checks import above_zero, at_least, nearest_multiples, one_of
from megackpt.config.errors import UsageError

BACKENDS = ("nccl", "gloo")
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of the mesh axes; the data-parallel size follows from the number of processes."""

    tensor: int = 1
    pipeline: int = 1
    layers_per_chunk: int | None = None
    """Layers of a chunk, where stages have several; or ..."""
    chunks: int | None = None
    """... chunks per stage.  Neither: stages have one."""
    context: int = 1
    world_size: int = 1
    sequence_parallel: bool = False
    """Norms, residuals and dropout are split over tp along the sequence.  Off when tensor is 1: nothing to split."""
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
        return self.layers_per_chunk is not None or (self.chunks or 1) > 1

    def _check_chunks(self) -> None:
        if self.layers_per_chunk is not None and self.chunks is not None:
            raise UsageError(
                f"--num-layers-per-virtual-pipeline-stage {self.layers_per_chunk} and"
                f" --num-virtual-stages-per-pipeline-rank {self.chunks} say the same in two ways: give one of them."
            )
        if self.interleaves and self.pipeline == 1:
            flag, value = "--num-virtual-stages-per-pipeline-rank", self.chunks
            if self.layers_per_chunk is not None:
                flag, value = "--num-layers-per-virtual-pipeline-stage", self.layers_per_chunk
            raise UsageError(
                f"{flag} {value} needs several stages: on one there is no bubble that chunks could shrink. Nearest"
                f" valid: --pipeline-model-parallel-size 2, or leave {flag} out."
            )

    def _check_world(self) -> None:
        if self.world_size % self.model:
            raise UsageError(
                f"{self.world_size} process{'es' * (self.world_size > 1)} cannot be arranged as"
                f" --tensor-model-parallel-size {self.tensor} x --pipeline-model-parallel-size {self.pipeline}"
                f" = {self.model} ranks per copy of the model. Nearest valid number of processes:"
                f" {nearest_multiples(self.world_size, self.model)}."
            )
