"""What may look on while a dropped step runs, in its forward and in each replay.

The engine calls a watch at fixed points and knows nothing of what it does: :func:`~megackpt.recompute.checkpoint`
brings contexts and its own idea of what must match, verify mode digests and traces.  A step without one pays nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from megackpt.recompute.handle import Meta, ReplayError

Call = Callable[..., Any]


class Watch:
    """The neutral watch.  The methods stand in the order in which they are called."""

    __slots__ = ()

    early_stop = True  # False: a replay runs to its end even when nothing more is wanted

    def forward(self, fn: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the step's function in its forward."""
        return fn(*args, **kwargs)

    def saved(self, number: int, tensor: Tensor) -> None:
        """Tensor ``number`` that the step saves is dropped now."""

    def returned(self, index: int, tensor: Tensor) -> None:
        """Output ``index`` of the step is dropped now."""

    def replay(self, fn: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the step's function again."""
        return fn(*args, **kwargs)

    def rebuilt(self, what: str, number: int, tensor: Tensor, now: Meta, then: Meta) -> bool:
        """Whether ``tensor`` may stand for the one the forward had: ``what`` is "saved tensor" or "output".  False
        makes the replay fail with the engine's own words."""
        return now == then

    def settle(self) -> None:
        """The replay has ended well; raise ReplayError if it should not have."""

    def explain(self, error: ReplayError) -> ReplayError:
        """The replay has failed: the error that the user shall see."""
        return error
