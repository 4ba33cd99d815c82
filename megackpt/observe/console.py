"""Lines for whoever watches the run. A log on a full disk, or a pipe whose reader is gone, does not end a run that has
weights to save.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress


class Console:
    """Prints to standard output for as long as that takes lines; afterwards says so once and prints no more."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn

    def line(self, text: str) -> None:
        """One line, at once."""
        try:
            print(text, flush=True)
        except OSError as error:
            # What it holds back would fail again when the interpreter ends, and with it the exit code.
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
            with suppress(OSError):
                self._warn(f"standard output: {error.strerror or error}; no more lines are printed")
