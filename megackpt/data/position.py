"""The data's part of a checkpoint: how far the run has read, and in which order of samples that was.

The order is a pure function of the data, the seed and the sample number, so this is all that has to be saved,
once for all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class DataPosition:
    """JSON-able state of the training data."""

    consumed_samples: int
    fingerprint: str
    """Of the training dataset (`SampleDataset.fingerprint`)."""
    description: str = ""
    """What the user called it, for messages: the value of --data-path, or `mock data`."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> DataPosition:
        return cls(int(state["consumed_samples"]), str(state["fingerprint"]), str(state.get("description", "")))


def resume_message(saved: DataPosition, fingerprint: str, description: str) -> str | None:
    """What a user must know before a run goes on from `saved`; None if the order of samples is the same.

    A run resumed on other data goes on at sample `saved.consumed_samples` of the new order: the schedule and the
    log keep their count, and the samples before it are not read. That may be meant or not, so it is said.
    """
    if saved.fingerprint == fingerprint:
        return None
    was = f" ({saved.description})" if saved.description else ""
    now = f" ({description})" if description else ""
    return (
        f"the training data{now} is not what the checkpoint was trained on{was}: data, split, --seq-length, --seed or"
        f" blend weights changed. Training goes on at sample {saved.consumed_samples} of the new order; its first"
        f" {saved.consumed_samples} samples are not read in this pass. To start the new data at its first sample,"
        " load with --finetune, which resets iteration and consumed samples to 0."
    )
