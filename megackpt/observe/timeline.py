"""The event record of a real run: actions, replayed steps, collectives, waits and bytes of a few iterations.

Recording costs a list append per action and replayed step, and two clock readings per collective; between the
recorded iterations it costs nothing, so it may be left on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megackpt.plan.events import Span, StepRecord, write_about, write_rank

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "broadcast",
)


class TimelineRecorder:
    """Records iterations `first` to `first + steps - 1` of one rank into a folder that all ranks share.

    `about` says what is recorded; rank 0 writes it.
    """

    def __init__(
        self, folder: str, rank: int, stage: int, *, first: int, steps: int, about: Mapping[str, Any]
    ) -> None:
        self.folder, self.rank, self.stage = Path(folder), rank, stage
        self.iterations = range(first, first + steps)
        self._steps: dict[int, StepRecord] = {}
        if rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            for old in self.folder.glob("rank_*.jsonl"):
                old.unlink()
            write_about(self.folder, {"kind": "measured", **about})

    def wants(self, iteration: int) -> bool:
        """Whether this iteration is to be recorded."""
        return iteration in self.iterations

    @contextmanager
    def recording(self, iteration: int) -> Iterator[StepRecord]:
        """The record of one iteration, written when it has ended well; collectives enter it by themselves."""
        step = StepRecord()
        with self._collectives(step):
            yield step
        self._steps[iteration] = step
        write_rank(self.folder, self.rank, self._steps)

    def replayed(self, step: StepRecord) -> Callable[[str, float, float], None]:
        """What a tape tells of its replays."""
        return lambda where, start, end: step.spans.append(Span(self.rank, self.stage, "replay", where, start, end))

    @contextmanager
    def _collectives(self, step: StepRecord) -> Iterator[None]:
        """While it is open, torch's collectives write a span each: from the call to its return, and if it returned
        before it was done, from the start of the wait to its end.

        They are called in many places, all by their names in `torch.distributed`; this way none of these places
        needs to know that it is watched.
        """
        originals = {name: getattr(dist, name) for name in COLLECTIVES}
        for name, call in originals.items():
            setattr(dist, name, self._noted(name, call, step))
        try:
            yield
        finally:
            for name, call in originals.items():
                setattr(dist, name, call)

    def _noted(self, name: str, call: Callable[..., Any], step: StepRecord) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            size = next((value.nbytes for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), 0)
            start = time.time()
            work = call(*args, **kwargs)
            step.spans.append(Span(self.rank, self.stage, "collective", name, start, max(start, time.time()), size))
            return work if work is None else _Waited(work, lambda *times: self._waited(step, name, size, *times))

        return noted

    def _waited(self, step: StepRecord, name: str, size: int, start: float, end: float) -> None:
        step.spans.append(Span(self.rank, self.stage, "collective", f"wait for {name}", start, max(start, end), size))


class _Waited:
    """A running collective whose waits are noted; everything else is its own."""

    def __init__(self, work: Any, note: Callable[[float, float], None]) -> None:
        self._work, self._note = work, note

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        start = time.time()
        result = self._work.wait(*args, **kwargs)
        self._note(start, time.time())
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
