"""How many bytes the open tapes of a rank keep, now and at most: one number over all micro-batches in flight."""

from __future__ import annotations


class KeptBytes:
    """A rank's account of kept activation bytes.  Tapes add what they keep and take it back when closed."""

    __slots__ = ("live", "peak")

    def __init__(self) -> None:
        self.live = 0
        self.peak = 0

    def add(self, nbytes: int) -> None:
        self.live += nbytes
        self.peak = max(self.peak, self.live)

    def reset_peak(self) -> None:
        """Let the peak start again from what is kept now."""
        self.peak = self.live
