"""The event record: what happened on which rank and when, one object per action.

The simulator and a real run write the same list, so that prediction and reality overlay in one picture.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

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
        if self.end_s < self.start_s:
            raise ValueError(f"event {self.action} on rank {self.rank} ends at {self.end_s}, before {self.start_s}")

    @property
    def action(self) -> Action:
        return Action(self.kind, self.micro_batch, self.chunk)

    def to_json(self) -> dict[str, int | float | str]:
        """A flat object of numbers and one string; `from_json` reads it back exactly."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, int | float | str]) -> Event:
        """Raises TypeError on a key that an event does not have or lacks."""
        return cls(**value)  # type: ignore[arg-type]


def write_events(path: str | Path, events: Iterable[Event]) -> None:
    """One JSON object a line."""
    text = "".join(json.dumps(event.to_json()) + "\n" for event in events)
    Path(path).write_text(text, encoding="utf-8")


def read_events(path: str | Path) -> list[Event]:
    """The list that `write_events` wrote."""
    return [Event.from_json(json.loads(line)) for line in Path(path).read_text(encoding="utf-8").splitlines() if line]
