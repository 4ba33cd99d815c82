"""RUN: schedules executed. Actions -> receive, forward on a tape, send, free; receive, backward, send."""

from megackpt.pipeline.boundary import ChunkSpecs, StageResult, TensorSpec
from megackpt.pipeline.errors import PipelineError
from megackpt.pipeline.executor import Executor
from megackpt.pipeline.stages import Piece, chunk_specs, pieces
from megackpt.pipeline.tape import NoTape, OpenTape, TapeLike

__all__ = [
    "ChunkSpecs",
    "Executor",
    "NoTape",
    "OpenTape",
    "Piece",
    "PipelineError",
    "StageResult",
    "TapeLike",
    "TensorSpec",
    "chunk_specs",
    "pieces",
]
