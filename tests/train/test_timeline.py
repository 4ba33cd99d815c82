"""`--timeline`: what a real run records, and what `megackpt compare` makes of it and of a prediction."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from megackpt.cli.main import main
from megackpt.plan.events import Record
from megackpt.plan.schedule import interleaved, one_f_one_b
from tests.layouts import SMALL_LLAMA, Flags, Layout, train_all, words
from tests.pool import run_distributed

RUN: Flags = SMALL_LLAMA | {"num-layers": 4, "global-batch-size": 8, "train-iters": 5, "recompute-granularity": "full"}
LAYOUT = Layout(tp=2, pp=2, sp=True)
MICRO_BATCHES, LAYERS = 4, 2  # of each stage


def recorded(tmp_path: Path, flags: Flags, layout: Layout) -> Record:
    folder = tmp_path / "run"
    run_distributed(train_all, layout.world_size, RUN | flags | {"timeline": str(folder), "timeline-steps": 2}, layout)
    return Record.read(folder)


def test_a_run_records_every_action_replay_and_collective(tmp_path: Path) -> None:
    record = recorded(tmp_path, {}, LAYOUT)
    assert sorted(record.steps) == [3, 4] and record.about["stages"] == 2
    for step in record.steps.values():
        for rank in range(4):
            stage = rank // 2
            events = [event for event in step.events if event.rank == rank]
            assert [event.action for event in events] == one_f_one_b(2, stage, MICRO_BATCHES)
            assert all(a.end_s <= b.start_s for a, b in zip(events, events[1:], strict=False))
            assert all(event.saved_bytes > 0 for event in events if event.kind == "F") and events[-1].saved_bytes == 0
            spans = [span for span in step.spans if span.rank == rank]
            replays = Counter(s.name.split()[1] for s in spans if s.kind == "replay" and s.name.startswith("layers."))
            # Both halves of every layer are rebuilt once for each micro-batch, in one span or in several.
            assert replays["attn.norm"] == replays["mlp.norm"] == LAYERS * MICRO_BATCHES
            backwards = [event for event in events if event.kind == "B"]
            for span in spans:
                if span.kind == "replay":
                    assert any(b.start_s <= span.start_s and span.end_s <= b.end_s for b in backwards), span
            collectives = Counter(span.name for span in spans if span.kind == "collective")
            assert collectives["all_gather_into_tensor"] >= 6 * LAYERS * MICRO_BATCHES
            assert collectives["reduce_scatter_tensor"] >= 4 * LAYERS * MICRO_BATCHES
            assert all(span.size_bytes > 0 for span in spans if span.kind == "collective")


def test_chunks_are_recorded_in_their_order(tmp_path: Path) -> None:
    record = recorded(tmp_path, {"num-virtual-stages-per-pipeline-rank": 2}, Layout(pp=2))
    for rank in range(2):
        events = [event.action for event in record.steps[4].events if event.rank == rank]
        assert events == interleaved(2, rank, MICRO_BATCHES, 2)


def test_prediction_and_run_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path, {}, LAYOUT)
    layout = {**RUN, **LAYOUT.flags}
    argv = ["plan", *words(layout), "--world-size", "4", "--machine", "cpu", "--timeline", str(tmp_path / "plan")]
    assert main(argv) == 0
    predicted = Record.read(tmp_path / "plan")
    for stage in range(2):
        events = [event for event in predicted.steps[0].events if event.stage == stage]
        assert [event.action for event in events] == one_f_one_b(2, stage, MICRO_BATCHES)
    capsys.readouterr()
    outputs = ["--html", str(tmp_path / "both.html"), "--trace", str(tmp_path / "both.json")]
    assert main(["compare", str(tmp_path / "plan"), str(tmp_path / "run"), *outputs]) == 0
    said = capsys.readouterr().out
    for words_ in ("pipeline", "stage 1: of it replay", "stage 0: idle or waiting", "predicted for", "(iteration "):
        assert words_ in said
    html = (tmp_path / "both.html").read_text()
    assert html.count("<rect") > 4 * 2 * 2 * MICRO_BATCHES and "http://www.w3.org/2000/svg" in html
    assert "<script" not in html and "stage 1  B" in html
    trace = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    slices = Counter((e["pid"], e["cat"]) for e in trace if e["ph"] == "X")
    assert slices[0, "forward"] == slices[1, "forward"] == 2 * MICRO_BATCHES
    assert slices[0, "replay"] == 2 * MICRO_BATCHES and slices[1, "collective"] > 0


def test_what_cannot_be_compared_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "plan.json").write_text("{}")
    for a, b, said in (
        ("empty", "empty", "is not the folder of an event record"),
        ("empty", "plan.json", "one is a folder, the other is not"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["compare", str(tmp_path / a), str(tmp_path / b)])
        assert end.value.code == 2 and said in capsys.readouterr().err
