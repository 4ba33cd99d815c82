"""Small datasets for the tests of this room."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megackpt.data.indexed import IndexedDataset
from megackpt.data.indexed_writer import IndexedWriter


def write_documents(prefix: Path, documents: Sequence[Sequence[int]], dtype: str = "<u2") -> IndexedDataset:
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for tokens in documents:
            writer.add(tokens)
    return IndexedDataset(prefix)


def numbered(lengths: Sequence[int]) -> list[list[int]]:
    """Documents of these lengths in which every token is different: 0, 1, 2, …"""
    out, start = [], 0
    for length in lengths:
        out.append(list(range(start, start + length)))
        start += length
    return out
