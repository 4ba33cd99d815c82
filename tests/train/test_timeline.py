"""`--timeline`: what a real run records, and what `megackpt compare` makes of it and of a prediction."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from megackpt.cli.main import main
from megackpt.config.errors import UsageError
from megackpt.plan.events import Event, Record, StepRecord
from megackpt.plan.schedule import interleaved, one_f_one_b
from tests.layouts import SMALL_GPT, SMALL_LLAMA, Flags, Layout, train_all, words
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


def _refused(rank: int, world_size: int, flags: Flags, layout: Layout) -> str:
    with pytest.raises(UsageError) as refusal:
        train_all(rank, world_size, flags, layout)
    return str(refusal.value)


def test_a_folder_that_cannot_be_is_refused_by_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    flags = SMALL_GPT | {"timeline": str(tmp_path / "file" / "run")}
    said = run_distributed(_refused, 2, flags, Layout(pp=2))
    assert said == [f"--timeline {tmp_path}/file/run cannot be written: Not a directory"] * 2


def _written(folder: Path, stages: int = 2) -> Path:
    """A record of iterations 3 and 4, in which every stage computes one second."""
    steps = {i: StepRecord([Event(s, s, "F", 0, 0, i + s, i + s + 1.0) for s in range(stages)]) for i in (3, 4)}
    folder.mkdir()
    Record({"kind": "measured", "name": "run", "stages": stages}, steps).write(folder)
    return folder


def test_a_run_that_was_ended_is_shown_as_far_as_it_is_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stage 1 had not yet written iteration 4; one that wrote nothing at all leaves nothing to show."""
    ended = _written(tmp_path / "ended") / "rank_00001.jsonl"
    ended.write_text(ended.read_text().splitlines()[0] + "\n")
    assert main(["compare", str(ended.parent), str(_written(tmp_path / "three", 3))]) == 0
    said = capsys.readouterr().out
    assert "A: run (iteration 3 of 3 to 3)" in said and "The two have different numbers of stages." in said
    ended.unlink()
    with pytest.raises(SystemExit) as end:
        main(["compare", str(ended.parent), str(ended.parent)])
    assert end.value.code == 2 and "no step has actions of all 2 stages" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"iteration": 3', "line 1 of rank_00001.jsonl: Expecting"),
        (b'{"iteration": 3, "event": {"end_s": 1}}', "line 1 of rank_00001.jsonl: Event.__init__() missing"),
        (b'{"iteration": 3, "event": {%s, "end_s": NaN}}', "event F0.0 on rank 1 ends at nan, before 3.5"),
        (b'{"iteration": 3, "event": {%s, "end_s": Infinity}}', "event F0.0 on rank 1 ends at inf, before 3.5"),
        (b'{"iteration": 3, "event": {%s, "end_s": "x"}}', "'<=' not supported between"),
        (b'{"iteration": 3, "event": {%s, "end_s": 4, "kind": "Q"}}', "action kind 'Q' is none of F, B, W"),
        (b"[" * 100_000, "line 1 of rank_00001.jsonl: maximum recursion"),
        (b"\xff", "'utf-8' codec can't decode"),
    ],
)
def test_a_damaged_record_is_refused(
    content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = b'"rank": 1, "stage": 1, "kind": "F", "micro_batch": 0, "chunk": 0, "start_s": 3.5'
    (_written(tmp_path / "run") / "rank_00001.jsonl").write_bytes(content.replace(b"%s", fields))
    with pytest.raises(SystemExit) as end:
        main(["compare", str(tmp_path / "run"), str(tmp_path / "run")])
    assert end.value.code == 2
    assert f"{tmp_path / 'run'} is not the folder of an event record: " in (text := capsys.readouterr().err)
    assert said in text


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
