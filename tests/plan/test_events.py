"""The event record goes to disk and back unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megackpt.plan.events import Event, Record, Span, StepRecord
from megackpt.plan.schedule import Action

EVENTS = [
    Event(0, 0, "F", 0, 0, 0.1, 0.30000000000000004, 0.0, 0, 4096, 123),
    Event(3, 1, "B", 2, 1, 1e9 + 1 / 3, 1e9 + 2 / 3, wait_s=0.25, received_bytes=4096),
]


def test_a_record_survives_the_disk_exactly(tmp_path: Path) -> None:
    spans = [Span(3, 1, "replay", "layers.2 attn.norm", 0.1, 0.3), Span(0, 0, "collective", "all_reduce", 0.5, 0.5, 64)]
    record = Record({"kind": "measured", "name": "a run", "stages": 2}, {4: StepRecord(EVENTS, spans)})
    record.write(tmp_path / "record")
    read = Record.read(tmp_path / "record")
    assert read.about == {"version": 1, **record.about} and list(read.steps) == [4]
    assert read.steps[4].events == EVENTS and sorted(read.steps[4].spans, key=lambda s: -s.rank) == spans
    assert sorted(path.name for path in (tmp_path / "record").iterdir()) == [
        "rank_00000.jsonl", "rank_00003.jsonl", "record.json",
    ]  # fmt: skip


def test_a_folder_without_a_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text('{"version": 0}')
    with pytest.raises(ValueError, match="is not that of an event record, version 1"):
        Record.read(tmp_path)
    (tmp_path / "record.json").write_text('{"version": 1, "stages": 2}')
    with pytest.raises(ValueError, match="has no rank_"):
        Record.read(tmp_path)


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
