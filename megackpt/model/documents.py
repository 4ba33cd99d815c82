"""Several documents in one sample: positions that count anew, and attention that stays inside a document.

s sequence, b micro-batch.  This is data of a micro-batch, not an activation: nothing here has a gradient or changes, so
a replay that is given the same object computes the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class Documents:
    """Of one micro-batch.  What a run does not reset is None.

    ``positions`` [b, s]: place of each token in its document.  ``segments`` [b, s]: number of its document.
    ``lengths``: tokens of the documents of each sample, in order; known on the host, so that nobody waits for a GPU.
    """

    def __init__(self, positions: Tensor | None, segments: Tensor | None, lengths: Sequence[Sequence[int]]) -> None:
        self.positions, self.segments = positions, segments
        self.lengths = tuple(tuple(of_sample) for of_sample in lengths)
        self._tables: Tensor | None = None

    def tables(self, whole: Tensor) -> Tensor:
        """The rotation of each token, [2, s, b, 1, r], out of that of each position, [2, S, 1, 1, r].  One for all
        layers: their graphs hold it as long as the micro-batch lives."""
        assert self.positions is not None
        if self._tables is None:
            self._tables = whole[:, :, 0, 0][:, self.positions.t()].unsqueeze(3)
        return self._tables

    def apart(self) -> Tensor:
        """Which tokens are in different documents, [b, s, s]."""
        assert self.segments is not None
        return self.segments.unsqueeze(2) != self.segments.unsqueeze(1)
