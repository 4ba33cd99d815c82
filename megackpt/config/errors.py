"""The one exception for a mistake of the user: its text is shown as it is, without a traceback."""

from __future__ import annotations


class UsageError(ValueError):
    """A run that cannot be started as asked.  The message names flags, numbers and the nearest valid value."""
