"""The pictures: well-formed, self-contained, true to the numbers, no text on text."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from megackpt.observe.metrics import MetricsWriter
from megackpt.observe.plots import MOST_POINTS, PEAK, REFERENCE, SAVED, TRAIN, VALIDATION, loss_curve, memory_per_rank
from megackpt.observe.record import EvaluationRecord, IterationRecord
from megackpt.observe.report import draw_run
from megackpt.observe.svg import CHARACTER, nice_step, tick_text, ticks

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"
CURVE = [(i, 9 * math.exp(-i / 60) / 3 + 3.2 + 0.05 * math.sin(i)) for i in range(1, 301)]
VALID = [(i, 9 * math.exp(-i / 60) / 3 + 3.3) for i in range(25, 301, 25)]


def parse(document: str) -> ET.Element:
    """Parsed, after checking that nothing outside the file is needed and all text is inside and apart."""
    root = ET.fromstring(document)
    assert not re.search(r"href|url\(|<script|<image|@import", document)
    width, height = (float(x) for x in root.attrib["viewBox"].split()[2:])
    boxes = []
    for text in root.iter(f"{SVG}text"):
        size = float(text.attrib["font-size"])
        long, x, y = len(text.text) * size * CHARACTER * 0.9, float(text.attrib["x"]), float(text.attrib["y"])
        if "transform" in text.attrib:
            boxes.append((x - size, y - long / 2, x, y + long / 2, text.text))
            continue
        left = x - {"start": 0, "middle": 0.5, "end": 1}[text.attrib["text-anchor"]] * long
        boxes.append((left, y - 0.8 * size, left + long, y + 0.2 * size, text.text))
    for i, a in enumerate(boxes):
        assert a[0] >= 0 and a[1] >= 0 and a[2] <= width and a[3] <= height, a
        for b in boxes[i + 1 :]:
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], (a, b)
    return root


def texts(root: ET.Element) -> list[str]:
    return [t.text for t in root.iter(f"{SVG}text")]


def curves(root: ET.Element, colour: str) -> list[list[tuple[float, float]]]:
    paths = [p.attrib["d"] for p in root.iter(f"{SVG}path") if p.attrib["stroke"] == colour]
    return [[tuple(map(float, point.split())) for point in path[1:].split("L")] for path in paths]


def test_loss_curve_shows_both_series_and_the_reference() -> None:
    root = parse(loss_curve(CURVE, VALID, [(5.123, "unigram entropy 5.123")]))
    (train,), (valid,) = curves(root, TRAIN), curves(root, VALIDATION)
    assert (len(train), len(valid)) == (300, 12)
    assert valid[-1][0] == train[-1][0]  # both end at iteration 300
    (line,) = (m for m in root.iter(f"{SVG}line") if m.attrib["stroke"] == REFERENCE)
    assert line.attrib["y1"] == line.attrib["y2"]
    # The same scale for all: the reference is crossed where the curve's value crosses it.
    above = sum(y < float(line.attrib["y1"]) for _, y in train)
    assert above == sum(v > 5.123 for _, v in CURVE)
    shown = texts(root)
    assert {"unigram entropy 5.123", "iteration", "train, last 3.17", "validation, last 3.32"} <= set(shown)


def test_nan_makes_a_gap_and_a_lone_point_a_dot() -> None:
    root = parse(loss_curve([(1, 6.0), (2, 5.0), (3, math.nan), (4, 4.0), (5, math.inf), (6, 3.0), (7, 2.0)]))
    assert [len(run) for run in curves(root, TRAIN)] == [2, 2]
    assert len([c for c in root.iter(f"{SVG}circle") if c.attrib["fill"] == TRAIN]) == 1


def test_nothing_to_draw_is_said() -> None:
    assert "no loss recorded" in texts(parse(loss_curve([])))
    assert "no loss recorded" in texts(parse(loss_curve([(1, math.nan)])))
    assert "no memory recorded" in texts(parse(memory_per_rank([])))
    parse(loss_curve([(1, 5.0)], [], [(6.0, "entropy & <more>")]))


def test_long_runs_are_thinned_without_losing_a_spike() -> None:
    points = [(float(i), 2.0) for i in range(100_000)]
    points[54_321] = (54_321.0, 9.0)
    (train,) = curves(parse(loss_curve(points)), TRAIN)
    assert len(train) <= MOST_POINTS
    assert sum(y < train[0][1] - 50 for _, y in train) == 1


def test_bars_are_proportional_and_labelled() -> None:
    saved, peak = [50 * 2**20, 30 * 2**20], [75 * 2**20, 60 * 2**20]
    root = parse(memory_per_rank(saved, peak, rank_labels=["pp0", "pp1"]))
    heights = {
        colour: [float(r.attrib["height"]) for r in root.iter(f"{SVG}rect") if r.attrib["fill"] == colour][1:]
        for colour in (SAVED, PEAK)
    }  # the first of each is the legend's square
    scale = heights[SAVED][0] / 50
    assert heights[SAVED] == pytest.approx([50 * scale, 30 * scale], abs=0.1)
    assert heights[PEAK] == pytest.approx([75 * scale, 60 * scale], abs=0.1)
    assert {"50 MiB", "75 MiB", "60 MiB", "pp0", "pp1", "rank"} <= set(texts(root))


@pytest.mark.parametrize("ranks", [1, 3, 8, 64, 512])
def test_any_number_of_ranks_stays_readable(ranks: int) -> None:
    saved = [2_000_000_000 + 30_000_000 * r for r in range(ranks)]
    history = [(i, [s + i * 1000 for s in saved]) for i in range(1, 5)]
    root = parse(memory_per_rank(saved, [2 * s for s in saved], history))
    rects = [r for r in root.iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]
    assert len(rects) == 2 * ranks
    lines = sum(1 for _ in root.iter(f"{SVG}path"))
    assert lines == min(ranks, 8)
    assert any("4 smallest and 4 largest of" in t for t in texts(root)) == (ranks > 8)


def test_equal_ranks_share_a_line() -> None:
    history = [(i, [10, 10, 10, 20, 10]) for i in (1, 2)]
    root = parse(memory_per_rank([10, 10, 10, 20, 10], None, history))
    assert {"ranks 0-2, 4", "rank 3"} <= set(texts(root))


def test_lengths_must_match() -> None:
    with pytest.raises(ValueError, match="peak has 1 entries for 2 ranks"):
        memory_per_rank([1, 2], [1])


def test_ticks_are_round_and_few() -> None:
    assert ticks(2.9, 6.4, 6) == [3, 4, 5, 6]
    assert ticks(0, 1, 5) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(1, 2, 8, whole=True) == [1, 2]
    assert [tick_text(x, nice_step(0.1, 5)) for x in ticks(5, 5.1, 5)] == [
        "5.00", "5.02", "5.04", "5.06", "5.08", "5.10",
    ]  # fmt: skip


def _write_run(folder: Path) -> None:
    record = IterationRecord(
        iteration=1,
        train_iters=4,
        consumed_samples=8,
        global_batch_size=8,
        iteration_time_s=0.1,
        learning_rate=1e-3,
        lm_loss=6.0,
        saved_activation_bytes=[100, 200],
    )
    writer = MetricsWriter(folder / "metrics.jsonl")
    for i in range(1, 5):
        peak = [300, 400] if i == 2 else None
        writer.iteration(replace(record, iteration=i, lm_loss=6.0 - i, peak_activation_bytes=peak))
    writer.evaluation(EvaluationRecord(iteration=4, consumed_samples=32, loss=2.5))
    writer.close()


def test_draw_run_from_metrics(tmp_path: Path) -> None:
    _write_run(tmp_path)
    written = draw_run(tmp_path, references=[(5.5, "unigram entropy 5.500")])
    assert [path.name for path in written] == ["loss.svg", "memory.svg"]
    loss = parse((tmp_path / "loss.svg").read_text())
    assert {"train, last 2", "validation, last 2.5", "unigram entropy 5.500"} <= set(texts(loss))
    assert {"200 B", "400 B"} <= set(texts(parse((tmp_path / "memory.svg").read_text())))


def test_the_tool(tmp_path: Path) -> None:
    _write_run(tmp_path)
    command = [sys.executable, str(ROOT / "tools" / "plot_run.py"), str(tmp_path), "--reference-loss", "5.5"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env={})
    assert done.stdout.split() == [str(tmp_path / "loss.svg"), str(tmp_path / "memory.svg")]
    assert "unigram entropy 5.500" in (tmp_path / "loss.svg").read_text()
    missing = subprocess.run([*command[:2], str(tmp_path / "no")], capture_output=True, text=True, cwd=tmp_path, env={})
    assert missing.returncode == 2 and missing.stderr.startswith("error: ")
