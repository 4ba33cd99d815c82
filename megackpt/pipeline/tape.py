"""What the pipeline asks of a tape; which tape it is, is the caller's business."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Protocol


class TapeLike(Protocol):
    """Entered around one forward, left after it, closed when the backward of that micro-batch is done."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> object: ...

    def rebuild_ahead(self, in_flight: int, /) -> None:
        """Rebuild what the plan wants rebuilt while a gradient is on its way and so many forwards are in flight."""

    def close(self) -> None:
        """Free everything the tape still owns."""

    def saved_bytes(self) -> int:
        """Bytes that it keeps for its backward."""


OpenTape = Callable[[int, int], TapeLike]
"""(chunk, micro_batch) -> the tape of that forward."""


class NoTape:
    """Plain autograd: nothing is caught, nothing is counted."""

    def __init__(self, chunk: int, micro_batch: int) -> None:
        self.chunk, self.micro_batch = chunk, micro_batch

    def __enter__(self) -> NoTape:
        return self

    def __exit__(self, *failure: object) -> None:
        return None

    def rebuild_ahead(self, in_flight: int) -> None:
        return None

    def close(self) -> None:
        return None

    def saved_bytes(self) -> int:
        return 0
