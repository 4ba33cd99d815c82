"""The event record goes to disk and back unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megackpt.plan.events import Event, read_events, write_events
from megackpt.plan.schedule import Action

EVENTS = [
    Event(0, 0, "F", 0, 0, 0.1, 0.30000000000000004, 0.0, 0, 4096, 123),
    Event(3, 1, "B", 2, 1, 1e9 + 1 / 3, 1e9 + 2 / 3, wait_s=0.25, received_bytes=4096),
]


def test_events_survive_the_disk_exactly(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write_events(path, EVENTS)
    assert read_events(path) == EVENTS
    assert len(path.read_text().splitlines()) == 2


def test_an_event_is_a_flat_object_and_names_its_action() -> None:
    value = json.loads(json.dumps(EVENTS[1].to_json()))
    assert value["kind"] == "B" and value["received_bytes"] == 4096 and value["saved_bytes"] == 0
    assert Event.from_json(value) == EVENTS[1]
    assert EVENTS[1].action == Action("B", 2, 1)


def test_broken_events_are_refused() -> None:
    with pytest.raises(ValueError, match=r"event F0\.0 on rank 0 ends at 1\.0, before 2\.0"):
        Event(0, 0, "F", 0, 0, start_s=2.0, end_s=1.0)
    with pytest.raises(TypeError, match="colour"):
        Event.from_json({**EVENTS[0].to_json(), "colour": 1})
