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
from megackpt.plan.split import split_layers


@dataclass(frozen=True, slots=True)
class Piece:
    """One chunk of one stage."""

    stage: int
    chunk: int
    layers: range  # global layer indices
    is_first: bool  # owns the embedding
    is_last: bool  # owns the final norm, the head and the loss


def pieces(num_layers: int, stages: int, chunks: int = 1) -> list[Piece]:
    """All pieces in model order; every layer is in exactly one. ValueError if one would have no layer."""
    ranges = split_layers(num_layers, stages * chunks)
    last = len(ranges) - 1
    return [Piece(k % stages, k // stages, layers, k == 0, k == last) for k, layers in enumerate(ranges)]


def pieces_of_stage(num_layers: int, stages: int, stage: int, chunks: int = 1) -> list[Piece]:
    """The pieces of one stage, by chunk."""
    return [piece for piece in pieces(num_layers, stages, chunks) if piece.stage == stage]


def chunk_specs(piece: Piece, boundary: Boundary) -> ChunkSpecs:
    """What a piece receives and sends when all boundaries of the model look the same (as in GPT)."""
    return ChunkSpecs(() if piece.is_first else boundary, () if piece.is_last else boundary)
