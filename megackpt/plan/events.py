"""The event record: what happened on which rank and when, one object per action.

The simulator and a real run write the same list, so that prediction and reality overlay in one picture.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megackpt.plan.schedule import Action


@dataclass(frozen=True, slots=True)
class Event:
    """One action as it ran. Times are host seconds on a clock that all ranks share; sizes are bytes on this
    rank.
    """

    rank: int  # global rank; the simulator, which has one rank per stage, writes the stage
    stage: int
    kind: str  # F, B or W
    micro_batch: int
    chunk: int
    start_s: float  # before the message of the action is waited for
    end_s: float  # after its result was handed to the sender
    wait_s: float = 0.0  # part of end_s - start_s spent waiting for messages
    received_bytes: int = 0
    sent_bytes: int = 0
    saved_bytes: int = 0  # activations that all open tapes of the rank hold after the action

    def __post_init__(self) -> None:
        _check_times(f"event {self.action} on rank {self.rank}", self.start_s, self.end_s)

    @property
    def action(self) -> Action:
        return Action(self.kind, self.micro_batch, self.chunk)

    @property
    def busy_s(self) -> float:
        """Without the wait."""
        return self.end_s - self.start_s - self.wait_s

    def to_json(self) -> dict[str, int | float | str]:
        """A flat object of numbers and one string; `from_json` reads it back exactly."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, int | float | str]) -> Event:
        """Raises TypeError on a key that an event does not have or lacks."""
        return cls(**value)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Span:
    """Something inside or between actions that took time: a replayed step, a collective."""

    rank: int
    stage: int
    kind: str  # replay or collective
    name: str
    start_s: float
    end_s: float
    size_bytes: int = 0  # of what a collective moved, on this rank

    def __post_init__(self) -> None:
        _check_times(f"{self.kind} {self.name} on rank {self.rank}", self.start_s, self.end_s)


def _check_times(what: str, start_s: float, end_s: float) -> None:
    if not start_s <= end_s < math.inf:
        raise ValueError(f"{what} ends at {end_s}, before {start_s}")


@dataclass
class StepRecord:
    """What happened in one step, on one rank or on several."""

    events: list[Event] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """From the start of the first action to the end of the last."""
        return max(e.end_s for e in self.events) - min(e.start_s for e in self.events)

    def idle_seconds(self, rank: int) -> float:
        """Seconds in which a rank waits for messages, or has nothing to do before its first or after its last."""
        return self.seconds - sum(e.busy_s for e in self.events if e.rank == rank)


@dataclass
class Record:
    """An event record on disk: a folder with `record.json` (what it is a record of) and one file of lines per rank.

    `about` has `kind` ("measured" or "predicted"), `name`, and the number of `stages`.
    """

    about: dict[str, Any]
    steps: dict[int, StepRecord] = field(default_factory=dict)  # by iteration

    @property
    def whole(self) -> dict[int, StepRecord]:
        """The steps that every stage has written: a run that was ended may have got further on some of its ranks.

        Raises ValueError where there is none.
        """
        stages = set(range(self.about["stages"]))
        steps = {i: step for i, step in self.steps.items() if {event.stage for event in step.events} == stages}
        if not steps:
            raise ValueError(f"no step has actions of all {len(stages)} stages")
        return steps

    def write(self, folder: str | Path) -> None:
        """The whole record, by one process (a run's ranks write their own files with `write_rank`)."""
        ranks = sorted({event.rank for step in self.steps.values() for event in step.events})
        for rank in ranks:
            mine = {
                iteration: StepRecord(
                    [event for event in step.events if event.rank == rank],
                    [span for span in step.spans if span.rank == rank],
                )
                for iteration, step in self.steps.items()
            }
            write_rank(folder, rank, mine)
        write_about(folder, self.about)

    @staticmethod
    def read(folder: str | Path) -> Record:
        """Raises ValueError, TypeError or KeyError, or OSError, saying what is wrong with the folder."""
        folder = Path(folder)
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        if not isinstance(about, dict) or about.get("version") != VERSION or type(about.get("stages")) is not int:
            raise ValueError(f"{folder / ABOUT} is not that of an event record, version {VERSION}")
        record = Record(about)
        files = sorted(folder.glob("rank_*.jsonl"))
        if not files:
            raise ValueError(f"{folder} has no rank_*.jsonl")
        for file in files:
            for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
                try:
                    entry = json.loads(line)
                    step = record.steps.setdefault(int(entry["iteration"]), StepRecord())
                    if "event" in entry:
                        step.events.append(Event.from_json(entry["event"]))
                    else:
                        step.spans.append(Span(**entry["span"]))
                except (ValueError, TypeError, KeyError, RecursionError) as error:
                    raise ValueError(f"line {number} of {file.name}: {error}") from error
        return record


VERSION = 1
ABOUT = "record.json"


def write_about(folder: str | Path, about: Mapping[str, Any]) -> None:
    """Say what the record in `folder` is of."""
    text = json.dumps({"version": VERSION, **about}, indent=1) + "\n"
    (Path(folder) / ABOUT).write_text(text, encoding="utf-8")


def write_rank(folder: str | Path, rank: int, steps: Mapping[int, StepRecord]) -> None:
    """One rank's part of a record, a JSON object a line; makes the folder."""
    lines = []
    for iteration, step in sorted(steps.items()):
        lines += [{"iteration": iteration, "event": event.to_json()} for event in step.events]
        lines += [{"iteration": iteration, "span": asdict(span)} for span in step.spans]
    path = Path(folder) / f"rank_{rank:05d}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
