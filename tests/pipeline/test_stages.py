"""The cut of a model: every layer once, ends where they belong (PP-01)."""

from __future__ import annotations

import pytest
import torch

from megackpt.pipeline import ChunkSpecs, Piece, TensorSpec, chunk_specs, pieces
from megackpt.plan.split import even_split


def test_every_layer_is_in_one_piece_or_the_cut_is_refused() -> None:
    for num_layers in range(1, 13):
        for stages in range(1, 5):
            for chunks in range(1, 4):
                if num_layers < stages * chunks:
                    with pytest.raises(ValueError, match="cannot fill"):
                        even_split(num_layers, stages, chunks)
                    continue
                by_stage = pieces(even_split(num_layers, stages, chunks))
                assert [[(p.stage, p.chunk) for p in own] for own in by_stage] == [
                    [(stage, chunk) for chunk in range(chunks)] for stage in range(stages)
                ]
                cut = [by_stage[k % stages][k // stages] for k in range(stages * chunks)]
                assert [layer for piece in cut for layer in piece.layers] == list(range(num_layers))
                assert [(piece.is_first, piece.is_last) for piece in cut] == [
                    (k == 0, k == len(cut) - 1) for k in range(len(cut))
                ]


def test_the_table_of_the_module() -> None:
    assert pieces(even_split(6, 2, 2)) == (
        (Piece(0, 0, range(0, 1), True, False), Piece(0, 1, range(3, 5), False, False)),
        (Piece(1, 0, range(1, 3), False, False), Piece(1, 1, range(5, 6), False, True)),
    )


def test_the_ends_of_the_model_have_no_boundary() -> None:
    boundary = (TensorSpec((2, 3), torch.float32),)
    first, middle, last = (chunk_specs(piece, boundary) for (piece,) in pieces(even_split(3, 3)))
    assert (first, middle, last) == (
        ChunkSpecs((), boundary),
        ChunkSpecs(boundary, boundary),
        ChunkSpecs(boundary, ()),
    )
    assert chunk_specs(pieces(even_split(3, 1))[0][0], boundary) == ChunkSpecs((), ())
    assert boundary[0].nbytes == 24
