"""All checks that need a GPU, and what a training step reaches on it: one command, at most five minutes, one device.

    python tools/gpu_check.py                     tests of tests/gpu, then a 1.3B-shape step under every policy
    python tools/gpu_check.py --json gpu.json
    python tools/gpu_check.py --device cpu --small     the tool itself, where there is no GPU

Exit codes: 0 all is well; 1 a test failed or a step could not run; 3 there is no GPU, nothing was checked.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # runs from a clone, installed or not

from megackpt.config.run import RunConfig  # noqa: E402
from megackpt.mesh.device import DeviceSeam  # noqa: E402
from megackpt.mesh.launch import LaunchEnvironment  # noqa: E402
from megackpt.mesh.rendezvous import init_process_group, shutdown  # noqa: E402
from megackpt.observe.gemm_rate import measured_gemm_tflops  # noqa: E402
from megackpt.observe.throughput import peak_tflops, throughput  # noqa: E402
from megackpt.plan import plan_for  # noqa: E402
from megackpt.plan.policies import Policy  # noqa: E402
from megackpt.train.build import Trainer, build  # noqa: E402
from megackpt.train.foresight import step_flops  # noqa: E402
from megackpt.train.loop import loader  # noqa: E402
from megackpt.train.step import Stepper  # noqa: E402
from tools.bench_common import machine, table, write_json  # noqa: E402

LIMIT_S = 300.0
TESTS_LIMIT_S = 170.0
NO_DEVICE = 3
GIB = 1 << 30
POLICIES = {
    "none": Policy(),
    "free": Policy(granularity="free"),
    "selective": Policy(granularity="selective"),
    "full": Policy(granularity="full"),
}


@dataclass(frozen=True)
class Shape:
    """What the benchmark trains: GPT-3's 1.3B shape unless told otherwise."""

    layers: int = 24
    hidden: int = 2048
    heads: int = 16
    seq: int = 2048
    vocab: int = 50257
    micro_batch: int = 4
    micro_batches: int = 2
    warm_up: int = 2
    steps: int = 4

    def flags(self, dtype: str) -> dict[str, object]:
        return {
            "num-layers": self.layers, "hidden-size": self.hidden, "num-attention-heads": self.heads,
            "seq-length": self.seq, "max-position-embeddings": self.seq, "vocab-size": self.vocab,
            "micro-batch-size": self.micro_batch, "global-batch-size": self.micro_batch * self.micro_batches,
            "hidden-dropout": 0.0, "attention-dropout": 0.0, "params-dtype": dtype, "mock-data": True,
            "num-workers": 2, "lr": 1e-4, "lr-decay-style": "constant", "train-iters": 10_000, "eval-iters": 0,
        }  # fmt: skip


SMALL = Shape(layers=2, hidden=48, heads=4, seq=24, vocab=131, micro_batch=2, warm_up=1, steps=2)


def shape_for(memory: int | None) -> Shape:
    """The 1.3B shape with the largest micro-batch whose step under none fits a device of so many bytes.

    24 GB of weights, masters, moments and gradients; 3.3 GiB of activations and 1.5 GiB of logits per sample."""
    if memory is None:
        return SMALL
    fitting = [size for size in (8, 4, 2, 1) if 26 * GIB + size * 5 * GIB <= memory]
    return Shape(micro_batch=fitting[0] if fitting else 1)


# -- tests -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TestFile:
    """Outcome of one file."""

    name: str
    passed: int
    failed: int
    skipped: int
    seconds: float


def run_tests(folder: Path, limit_s: float) -> tuple[list[TestFile], bool]:
    """Outcome by file, and whether all is well: every test passed or was skipped, at least one passed, in time."""
    with tempfile.TemporaryDirectory(prefix="megackpt-gpu-") as place:
        report = Path(place, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(folder)]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s)
        except subprocess.TimeoutExpired as expired:
            print(f"the tests took more than {limit_s:.0f} s and were ended")
            print(_text(expired.stdout)[-2000:])
            return [], False
        if done.returncode:
            print(done.stdout[-6000:], done.stderr[-2000:], sep="\n")
        files = read_report(report) if report.exists() else []
    return files, done.returncode == 0 and any(file.passed for file in files)


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def read_report(path: Path) -> list[TestFile]:
    """The files of a JUnit report, in order."""
    counts: dict[str, list[float]] = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        parts = case.get("classname", "").split(".")
        name = next((part for part in reversed(parts) if part.startswith("test_")), parts[-1])
        count = counts.setdefault(name, [0, 0, 0, 0.0])
        kinds = {child.tag for child in case}
        count[1 if kinds & {"failure", "error"} else 2 if "skipped" in kinds else 0] += 1
        count[3] += float(case.get("time", 0))
    return [TestFile(name, int(p), int(f), int(s), seconds) for name, (p, f, s, seconds) in counts.items()]


# -- benchmark ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """One policy.  ``problem``: why there are no numbers."""

    policy: str
    seconds: float = 0.0
    tokens_per_s: float = 0.0
    tflops: float = 0.0
    mfu: float | None = None
    hfu: float | None = None
    peak_bytes: int | None = None
    loss: float = 0.0
    problem: str = ""


def bench(shape: Shape, seam: DeviceSeam, dtype: str, peak: float | None, deadline: float) -> list[Result]:
    """A step under every policy, one after another on the same weights."""
    trainer = build(RunConfig.from_flags(shape.flags(dtype), 1), seam)
    results = []
    for name, policy in POLICIES.items():
        if time.monotonic() > deadline:
            results.append(Result(name, problem="no time was left"))
            continue
        pieces = [[piece.layers for piece in trainer.pieces]]
        results.append(measure(replace(trainer, plan=plan_for(pieces, policy)), shape, name, peak))
    return results


def measure(trainer: Trainer, shape: Shape, name: str, peak: float | None) -> Result:
    """The fastest of the measured steps: on one device nothing but disturbance makes a step slower."""
    seam, stepper = trainer.seam, Stepper(trainer)
    times, loss = [], 0.0
    try:
        with loader(trainer, trainer.datasets.train, 0) as batches:
            for step in range(shape.warm_up + shape.steps):
                if step == shape.warm_up:
                    seam.reset_peak()
                seam.synchronize()
                start = time.perf_counter()
                loss = stepper.train(batches, 0).loss
                seam.synchronize()
                times.append(time.perf_counter() - start)
    except torch.OutOfMemoryError:
        return Result(name, problem="out of memory")
    seconds = min(times[shape.warm_up :])
    flops, hardware = step_flops(trainer)
    tokens = trainer.config.batch.global_batch_size * shape.seq
    rates = throughput(tokens, seconds, 1, flops, hardware, peak)
    return Result(
        name, seconds, rates.tokens_per_s, rates.tflops_per_device, rates.mfu, rates.hfu, seam.peak_bytes(), loss
    )


def show(results: Sequence[Result], yardstick: str) -> str:
    """The table, one row per policy; the time is also given against none."""
    base = next((result.seconds for result in results if result.policy == "none" and not result.problem), None)
    rows = []
    for r in results:
        if r.problem:
            rows.append([r.policy, r.problem, *[""] * 6])
            continue
        rows.append([
            r.policy, f"{1e3 * r.seconds:.1f}", f"{r.seconds / base:.3f}" if base else "", f"{r.tokens_per_s:.0f}",
            f"{r.tflops:.4g}", f"{r.mfu:.1%}" if r.mfu is not None else "", f"{r.hfu:.1%}" if r.hfu is not None else "",
            f"{r.peak_bytes / GIB:.2f}" if r.peak_bytes is not None else "",
        ])  # fmt: skip
    header = ["policy", "ms/step", "x none", "tokens/s", "TFLOP/s", f"MFU {yardstick}", "HFU", "peak GiB"]
    return table(header, rows)


# -- command -----------------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: try the tool (default cuda)")
    parser.add_argument("--small", action="store_true", help="a toy shape instead of 1.3B")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default=None, help="default bf16, on a CPU fp32")
    parser.add_argument("--tests", default=str(ROOT / "tests" / "gpu"), metavar="FOLDER", help="default tests/gpu")
    parser.add_argument("--no-tests", action="store_true", help="the benchmark alone")
    parser.add_argument("--json", metavar="FILE", help="write everything there")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    begin = time.monotonic()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing was checked (--device cpu --small tries the tool itself)")
        return NO_DEVICE
    files, well = ([], True) if options.no_tests else run_tests(Path(options.tests), TESTS_LIMIT_S)
    if files:
        rows = [[f.name, str(f.passed), str(f.failed), str(f.skipped), f"{f.seconds:.1f}"] for f in files]
        print(table(["test file", "passed", "failed", "skipped", "s"], rows))

    dtype = options.dtype or ("bf16" if options.device == "cuda" else "fp32")
    alone = not dist.is_initialized()
    seam = DeviceSeam.create(options.device)
    shape = SMALL if options.small else shape_for(seam.total_bytes())
    if alone:
        config = RunConfig.from_flags(shape.flags(dtype), 1)
        init_process_group(config.parallel, LaunchEnvironment.detect({}), seam)
    try:
        name, peak, yardstick = yard(seam, dtype)
        results = bench(shape, seam, dtype, peak, begin + LIMIT_S - 20.0)
    finally:
        if alone:
            shutdown()
    print(
        f"{name}: {shape.layers} layers, hidden {shape.hidden}, {shape.heads} heads, sequence {shape.seq}, vocabulary"
        f" {shape.vocab}, micro-batch {shape.micro_batch} x {shape.micro_batches}, {dtype};"
        f" yardstick {peak:.4g} TFLOP/s"
    )
    print(show(results, yardstick))
    if options.json:
        write_json(options.json, {
            "device": name, "machine": machine(), "shape": asdict(shape), "dtype": dtype, "peak_tflops": peak,
            "tests": [asdict(file) for file in files], "steps": [asdict(result) for result in results],
        })  # fmt: skip
    print(f"{time.monotonic() - begin:.0f} s")
    return 0 if well and not any(result.problem for result in results) else 1


def yard(seam: DeviceSeam, dtype: str) -> tuple[str, float, str]:
    """Name of the device, and the rate that MFU is a share of: the data sheet's, or a plain product's."""
    name = torch.cuda.get_device_name(seam.device) if seam.kind == "cuda" else "CPU"
    sheet = peak_tflops(name, dtype) if seam.kind == "cuda" else None
    if sheet is not None:
        return name, sheet, "of data sheet"
    number_format = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    size = 8192 if seam.kind == "cuda" else 256
    return name, measured_gemm_tflops(seam.device, number_format, size, budget_s=0.3), "of measured product"


if __name__ == "__main__":
    sys.exit(main())
