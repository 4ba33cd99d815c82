"""The model cut in pieces: which layers, and which of the model's ends, each chunk of each stage owns.

Piece c*p + i is chunk c of stage i; with p = 2 stages of v = 2 chunks and 6 layers::

    piece          0           1           2           3
    stage.chunk   0.0         1.0         0.1         1.1
    layers        [0]        [1, 2]      [3, 4]       [5]
                  first                               last
"""

from __future__ import annotations

from dataclasses import dataclass

from megackpt.pipeline.boundary import Boundary, ChunkSpecs
from megackpt.plan.split import Split


@dataclass(frozen=True, slots=True)
class Piece:
    """One chunk of one stage."""

    stage: int
    chunk: int
    layers: range  # global layer indices
    is_first: bool  # owns the embedding
    is_last: bool  # owns the final norm, the head and the loss


def pieces(split: Split) -> tuple[tuple[Piece, ...], ...]:
    """All pieces by [stage][chunk]; the first one has the model's beginning, the last one its end."""
    stages, chunks = len(split), len(split[0])
    return tuple(
        tuple(
            Piece(
                stage, chunk, layers, stage == chunk == 0, (stage, chunk) == (stages - 1, chunks - 1)
            )
            for chunk, layers in enumerate(row)
        )
        for stage, row in enumerate(split)
    )


def chunk_specs(piece: Piece, boundary: Boundary) -> ChunkSpecs:
    """What a piece receives and sends when all boundaries of the model look the same (as in GPT)."""
    return ChunkSpecs(() if piece.is_first else boundary, () if piece.is_last else boundary)
