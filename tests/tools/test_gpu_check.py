"""The tool that checks a GPU, tried on a CPU: its codes, its tables, its limits."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from megackpt.mesh.device import DeviceSeam
from tests.pool import run_distributed
from tools import gpu_check
from tools.gpu_check import GIB, NO_DEVICE, SMALL, Result, bench, main, read_report, run_tests, shape_for, show


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == NO_DEVICE == 3
    assert capsys.readouterr().out.startswith("no CUDA device: nothing was checked")


def tried(rank: int, world_size: int, arguments: list[str]) -> int:
    return main(arguments)


def test_on_a_cpu_every_policy_runs_on_the_same_weights(tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_one.py").write_text("def test_it(): pass\n")
    where = tmp_path / "out.json"
    arguments = ["--device", "cpu", "--small", "--tests", str(tests), "--json", str(where)]
    assert run_distributed(tried, 1, arguments, timeout=100) == [0]
    seen = json.loads(where.read_text())
    assert [(file["name"], file["passed"]) for file in seen["tests"]] == [("test_one", 1)]
    steps = {step["policy"]: step for step in seen["steps"]}
    assert list(steps) == ["none", "free", "selective", "full"]
    assert all(step["seconds"] > 0 and 0 < step["mfu"] < 1 and not step["problem"] for step in steps.values())
    # replayed FLOPs: none, nearly none, the core, a fifth of the step
    added = {name: step["hfu"] / step["mfu"] - 1 for name, step in steps.items()}
    assert added["none"] == pytest.approx(0.0, abs=1e-12) and added["selective"] > added["free"] >= 0.0
    assert added["full"] > 0.15


def test_a_failed_test_is_a_failed_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_bad.py").write_text(
        "import pytest\n\ndef test_good(): pass\n\ndef test_bad(): assert 1 == 2\n\n"
        "@pytest.mark.skip(reason='x')\ndef test_left(): pass\n"
    )
    files, well = run_tests(tmp_path, 60.0)
    assert not well and [(f.name, f.passed, f.failed, f.skipped) for f in files] == [("test_bad", 1, 1, 1)]
    assert "assert 1 == 2" in capsys.readouterr().out
    (tmp_path / "test_bad.py").write_text("import pytest\n\n@pytest.mark.skip(reason='x')\ndef test_left(): pass\n")
    assert run_tests(tmp_path, 60.0)[1] is False, "nothing passed"
    (tmp_path / "test_bad.py").write_text("import time\n\ndef test_slow(): time.sleep(60)\n")
    start = time.monotonic()
    assert run_tests(tmp_path, 2.0) == ([], False) and time.monotonic() - start < 20


def late(rank: int, world_size: int) -> list[str]:
    seam = DeviceSeam.create("cpu")
    return [result.problem for result in bench(SMALL, seam, "fp32", 1.0, time.monotonic() - 1)]


def test_policies_for_which_no_time_is_left_are_said() -> None:
    assert run_distributed(late, 1) == [["no time was left"] * 4]


def exhausted(rank: int, world_size: int) -> list[str]:
    def fail(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    real = gpu_check.Stepper.train
    gpu_check.Stepper.train = fail  # type: ignore[method-assign,assignment]
    try:
        return [r.problem for r in bench(SMALL, DeviceSeam.create("cpu"), "fp32", 1.0, time.monotonic() + 60)]
    finally:
        gpu_check.Stepper.train = real  # type: ignore[method-assign]


def test_a_step_that_does_not_fit_is_a_row() -> None:
    assert run_distributed(exhausted, 1) == [["out of memory"] * 4]
    text = show([Result("none", problem="out of memory"), Result("full", 0.5, 10.0, 2.0, 0.25, 0.3, 3 * GIB)], "m")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert rows[2][:2] == ["none", "out of memory"]
    assert rows[3] == ["full", "500.0", "", "10", "2", "25.0%", "30.0%", "3.00"]


def test_the_micro_batch_follows_the_memory() -> None:
    sizes = {gib: shape_for(gib * GIB).micro_batch for gib in (24, 32, 40, 47, 79, 139, 180)}
    assert sizes == {24: 1, 32: 1, 40: 2, 47: 4, 79: 8, 139: 8, 180: 8}
    assert shape_for(80 * GIB).layers == 24 and shape_for(None) == SMALL


def test_report_of_pytest(tmp_path: Path) -> None:
    path = tmp_path / "r.xml"
    path.write_text(
        '<testsuites><testsuite><testcase classname="tests.gpu.test_a.TestX" time="1.5"/>'
        '<testcase classname="tests.gpu.test_a" time="0.5"><failure/></testcase>'
        '<testcase classname="tests.gpu.test_b" time="0"><skipped/></testcase></testsuite></testsuites>'
    )
    assert [(f.name, f.passed, f.failed, f.skipped, f.seconds) for f in read_report(path)] == [
        ("test_a", 1, 1, 0, 2.0),
        ("test_b", 0, 0, 1, 0.0),
    ]
