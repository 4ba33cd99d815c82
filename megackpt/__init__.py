"""megackpt: GPT training in three dimensions of parallelism, with activation recomputation that fits and proves."""

__version__ = "0.1.0"
