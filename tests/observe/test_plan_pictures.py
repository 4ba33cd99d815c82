"""The pictures of a plan: self-contained, complete, and true to the simulation."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megackpt.observe.plan_html import page
from megackpt.observe.plan_pictures import REPLAY, SCHEDULE_WIDTH, memory, schedule, shown_stages
from megackpt.observe.plan_trace import trace
from megackpt.observe.svg import text_width
from megackpt.plan.accelerators import GIB, MACHINES
from megackpt.plan.numbers import Layout, ModelNumbers
from megackpt.plan.policies import Policy, plan_for
from megackpt.plan.report import Report, report

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def made() -> Report:
    model = ModelNumbers.gpt(8, 1024, 16, 32000, 1024)
    layout = Layout.even(8, 4, n=6, micro_batch=2)
    plan = plan_for(layout.pieces, Policy("full"))
    return report(model, layout, plan, MACHINES["h100-80gb"], 6 * GIB, notices=["<a> & b"])


def test_the_page_stands_alone(made: Report) -> None:
    text = page(made)
    assert not re.search(r"(?:src|href)=\"(?!data:)|url\(|@import|<script", text)
    assert set(re.findall(r"https?://[^\"\s<]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert "Note: &lt;a&gt; &amp; b" in text
    body = text[text.index("<body>") : text.index("</body>") + 7]
    tree = ElementTree.fromstring(body)
    for word in ("state:", "kept:", "transient:", "head:", "forward", "replay", "backward", "budget"):
        assert any(word in "".join(mark.itertext()) for mark in tree.iter("span")), word
    assert len([e for e in tree.iter("div") if e.get("class") == "bar"]) == 4 * (1 + (made.best is not made.given))


def test_bars_fill_what_the_stage_holds(made: Report) -> None:
    row = made.given.prediction.stages[0]
    first = next(part for part in page(made).split('class="bar"') if ">stage 0<" in part)
    widths = [float(width) for width in re.findall(r"<i style=\"width:([\d.]+)%", first)]
    budget = float(re.findall(r"<u style=\"left:([\d.]+)%", first)[0])
    assert sum(widths) / budget == pytest.approx(row.total_bytes / made.budget_bytes, rel=1e-3)


def test_schedule_draws_every_action_and_its_replay(made: Report) -> None:
    e = made.given
    tree = ElementTree.fromstring(schedule(e, e.pipeline_seconds))
    tips = [mark.findtext(f"{SVG}title") for mark in tree.iter(f"{SVG}rect") if mark.get("fill") != REPLAY]
    actions = [tip.split(":")[0] for tip in tips if tip]
    assert sorted(actions) == sorted(str(a) for stage in e.timeline.stages for a in stage.actions)
    replays = [mark for mark in tree.iter(f"{SVG}rect") if mark.get("fill") == REPLAY]
    assert len(replays) == 4 * 6
    scale = (SCHEDULE_WIDTH - 70 - 16) / e.pipeline_seconds
    assert float(replays[0].get("width", 0)) == pytest.approx(e.stages[0].replay * scale, abs=0.1)


def test_texts_of_the_pictures_do_not_meet(made: Report) -> None:
    e = made.given
    for svg in (schedule(e, e.pipeline_seconds), memory(e, 0, made.budget_bytes, 8 * GIB)):
        boxes = []
        for mark in ElementTree.fromstring(svg).iter(f"{SVG}text"):
            size = float(mark.get("font-size", 12))
            width, x, y = text_width(mark.text or "", size), float(mark.get("x", 0)), float(mark.get("y", 0))
            left = x - {"start": 0.0, "middle": 0.5, "end": 1.0}[mark.get("text-anchor", "start")] * width
            boxes.append((left, y - size * 0.8, left + width, y + size * 0.2))
        for k, a in enumerate(boxes):
            for b in boxes[k + 1 :]:
                assert min(a[2], b[2]) <= max(a[0], b[0]) or min(a[3], b[3]) <= max(a[1], b[1])


def test_the_curve_reaches_the_predicted_peak(made: Report) -> None:
    e = made.given
    assert e.timeline.peak_bytes == tuple(stage.total_bytes for stage in e.prediction.stages)
    svg = ElementTree.fromstring(memory(e, 2, made.budget_bytes, 8 * GIB))
    (path,) = svg.iter(f"{SVG}path")
    highest = min(float(pair.split()[1]) for pair in path.get("d", "")[1:].split("L"))
    assert (136 - highest) / (136 - 30) == pytest.approx(e.prediction.stages[2].total_bytes / (8 * GIB), abs=2e-3)


def test_many_stages_are_sampled_with_both_ends() -> None:
    assert shown_stages(5) == [0, 1, 2, 3, 4]
    shown = shown_stages(64)
    assert (shown[0], shown[-1], len(shown)) == (0, 63, 16)


def test_trace(made: Report) -> None:
    document = json.loads(json.dumps(trace(made)))
    events = document["traceEvents"]
    given = [event for event in events if event["pid"] == 0]
    slices = [event for event in given if event["ph"] == "X"]
    assert sum(event["cat"] != "replay" for event in slices) == 4 * 6 * 2
    for replay in (event for event in slices if event["cat"] == "replay"):
        outer = [
            event for event in slices
            if event["cat"] == "backward" and event["tid"] == replay["tid"] and event["ts"] == replay["ts"]
        ]  # fmt: skip
        assert len(outer) == 1 and replay["dur"] <= outer[0]["dur"]
    end = max(event["ts"] + event["dur"] for event in slices)
    assert end == pytest.approx(made.given.pipeline_seconds * 1e6)
    peak = max(event["args"]["GiB"] for event in given if event["ph"] == "C")
    assert peak * GIB == pytest.approx(made.given.peak_bytes)
    assert {event["name"] for event in events if event["ph"] == "M"} == {"process_name", "thread_name"}


IN_BROWSER = """<link rel="icon" href="data:,"><pre id="out"></pre>%s<script>
function meet(a, b) {
  const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
  return across > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1;
}
function check(frame) {
  const page = frame.contentDocument, width = page.documentElement.clientWidth;
  const texts = "h1,h2,h3,p,li,td,th,.card,.legend span,.bar>span,.bar>b,.track,svg text";
  const marks = [...page.querySelectorAll(texts)].filter(mark => mark.getClientRects().length);
  const boxes = marks.map(mark => mark.getBoundingClientRect());
  let pairs = 0;
  for (let i = 0; i < marks.length; i++)
    for (let k = i + 1; k < marks.length; k++)
      pairs += !marks[i].contains(marks[k]) && meet(boxes[i], boxes[k]);
  const wide = [...page.querySelectorAll("body *")].filter(
    mark => !mark.closest(".scroll") && mark.getBoundingClientRect().right > width + 1);
  return [marks.length > 100, pairs, wide.length, page.documentElement.scrollWidth - width].join(" ");
}
onload = () => { out.textContent = [...document.querySelectorAll("iframe")].map(check).join("; "); };
</script>"""


def test_nothing_overlaps_in_a_browser(made: Report, tmp_path: Path) -> None:
    """On 1280 and 390 pixels: no two texts meet, nothing sticks out, nothing is said on the console."""
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("chromium is not installed")
    frames = "".join(f'<iframe width="{w}" height="900" srcdoc="{escape(page(made))}"></iframe>' for w in (1280, 390))
    path = tmp_path / "page.html"
    path.write_text(IN_BROWSER % frames)
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=5000"]
    command = [browser, *flags, f"--user-data-dir={tmp_path}", "--dump-dom", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert '<pre id="out">true 0 0 0; true 0 0 0</pre>' in done.stdout
    assert "CONSOLE" not in done.stderr
