"""Resident memory of this process: what stands for allocated bytes where no device allocator counts."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from megackpt.observe.record import MemoryCounters


def host_memory() -> MemoryCounters:
    """Resident bytes of this process, now and at most. Where /proc is missing the peak stands for both."""
    scale = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return MemoryCounters(allocated=peak, max_allocated=peak)
    now = pages * resource.getpagesize()
    return MemoryCounters(allocated=now, max_allocated=max(now, peak))
