"""`--split 949,50,1`: which documents train, validate and test.

As in Megatron-LM the bounds are the rounded cumulative
shares of the number of documents, so a split never cuts a document and the three parts never overlap.
"""

from __future__ import annotations

from collections.abc import Mapping

SPLITS = ("train", "valid", "test")


def split_documents(shares: tuple[float, float, float], documents: int) -> Mapping[str, range]:
    """Document range of each split; the ranges are contiguous and cover all documents."""
    ranges: dict[str, range] = {}
    low = 0.0
    for name, share in zip(SPLITS, shares, strict=True):
        high = low + share
        # The last non-zero share ends at the last document however the sum was rounded.
        stop = documents if abs(high - 1.0) < 1e-9 else round(high * documents)
        ranges[name] = range(round(low * documents), stop) if share > 0 else range(0)
        low = high
    return ranges
