"""The trainer's pipeline schedules against each other at equal work: how long ranks have nothing to do.

    python tools/bench_schedules.py                              two stages, 2, 3 and 4 micro-batches
    python tools/bench_schedules.py --micro-batches 4 --stages 4 --layers 8
    python tools/bench_schedules.py --json bench.json

1F1B, interleaved 1F1B (two chunks a stage) and zero bubble train the same model on the same batches, a step each in
turns, and every step writes the event record of ``--timeline``.  A rank's idle share is the part of the step, from the
first action of any rank to the last, in which it waits for a message or has nothing left to do.  Beside it stands what
the simulator makes of the same lists when every action takes its median time and messages take none.  All must do the
same floating-point work and arrive at the same bits.  Needs no GPU; about a minute.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # runs from a clone, installed or not

from megackpt.data.dataset import Batch  # noqa: E402
from megackpt.observe.timeline import TimelineRecorder  # noqa: E402
from megackpt.plan.events import Record  # noqa: E402
from megackpt.plan.schedule import Action  # noqa: E402
from megackpt.plan.simulate import Cost, simulate  # noqa: E402
from tools.bench_common import in_turns, machine, median_ratio, on_ranks, table, write_json  # noqa: E402
from tools.bench_pipeline import Job as PipelineJob  # noqa: E402
from tools.bench_pipeline import Ours  # noqa: E402
from tools.bench_plain import Model  # noqa: E402
from tools.bench_stacks import flops_of  # noqa: E402

SCHEDULES: dict[str, dict[str, object]] = {
    "1f1b": {},
    "interleaved": {"num-virtual-stages-per-pipeline-rank": 2},
    "zb-h1": {"pipeline-schedule": "zb-h1"},
}


@dataclass(frozen=True)
class Job:
    """What is trained over how many stages, and how often it is measured."""

    model: Model = field(default_factory=lambda: Model(vocab=512))
    stages: int = 2
    micro_batch: int = 2
    micro_batches: tuple[int, ...] = (2, 3, 4)
    rounds: int = 9
    policy: str = "none"

    def pipeline(self, schedule: str, n: int) -> PipelineJob:
        return PipelineJob(self.model, self.stages, 1, self.micro_batch, n, ours=SCHEDULES[schedule])


class Recorded:
    """The trainer under one schedule, whose steps all enter an event record in `folder`."""

    def __init__(self, job: PipelineJob, policy: str, folder: Path, rounds: int) -> None:
        self.ours = Ours(job, policy)
        mesh = self.ours.trainer.mesh
        about = {"name": folder.name, "stages": mesh.pp.size}
        self.recorder = TimelineRecorder(str(folder), mesh.rank, mesh.pp.index, first=0, steps=rounds, about=about)
        self.losses: list[float] = []

    def step(self, batches: Sequence[Batch]) -> None:
        dist.barrier()
        stepper = self.ours.stepper
        with self.recorder.recording(len(self.losses)) as record:
            stepper.record, stepper.on_replay = record, self.recorder.replayed(record)
            self.losses.append(self.ours.step(batches))
        stepper.record = stepper.on_replay = None


def on_rank(job: Job, n: int, folder: str) -> dict[str, dict[str, Any]]:
    """Losses and FLOPs of this rank by schedule; the event records are in folders of their names.

    The first step of each warms up, and the second one is counted.
    """
    sides = {
        name: Recorded(job.pipeline(name, n), job.policy, Path(folder) / name, job.rounds + 2) for name in SCHEDULES
    }
    batches = next(iter(sides.values())).ours.read(1)[0]
    works = [partial(side.step, batches) for side in sides.values()]
    for work in works:
        work()
    flops = [flops_of(work) for work in works]
    in_turns(works, job.rounds, warm_up=0)
    losses = [side.losses for side in sides.values()]
    return {name: {"losses": seen, "flops": f} for name, seen, f in zip(sides, losses, flops, strict=True)}


@dataclass(frozen=True)
class Measured:
    """One schedule in all recorded steps: seconds from the first action to the last, and by rank the idle share."""

    seconds: list[float]
    idle: list[list[float]]
    """by step and rank"""
    busy: list[list[float]]
    """seconds by step and rank"""
    simulated: list[float]
    """idle share by rank, of the simulator with the median times of these actions"""
    actions: list[dict[str, float]]
    """by rank, median seconds of the forwards, backwards and weight gradients of a step together"""
    flops: int

    @property
    def median_idle(self) -> list[float]:
        return [statistics.median(of_rank) for of_rank in zip(*self.idle, strict=True)]


def measured(record: Record, flops: int) -> Measured:
    """What a record says, its first two steps left out."""
    steps = [step for iteration, step in sorted(record.steps.items()) if iteration >= 2]
    ranks = range(record.about["stages"])
    lists: list[list[Action]] = [[event.action for event in steps[0].events if event.rank == rank] for rank in ranks]
    times: dict[tuple[int, Action], list[float]] = {}
    for step in steps:
        for event in step.events:
            times.setdefault((event.rank, event.action), []).append(event.busy_s)
    timeline = simulate(lists, lambda stage, action: Cost(statistics.median(times[stage, action])))
    return Measured(
        [step.seconds for step in steps],
        [[step.idle_seconds(rank) / step.seconds for rank in ranks] for step in steps],
        [[step.seconds - step.idle_seconds(rank) for rank in ranks] for step in steps],
        [idle / timeline.step_seconds for idle in timeline.idle_seconds],
        [_by_kind(times, rank) for rank in ranks],
        flops,
    )


def _by_kind(times: dict[tuple[int, Action], list[float]], rank: int) -> dict[str, float]:
    kinds: dict[str, float] = {}
    for (of_rank, action), seconds in times.items():
        if of_rank == rank:
            kinds[action.kind] = kinds.get(action.kind, 0.0) + statistics.median(seconds)
    return kinds


def measure(job: Job, n: int) -> dict[str, Measured]:
    """All schedules in processes of their own.  Raises RuntimeError where they did not do the same."""
    with tempfile.TemporaryDirectory() as folder:
        found = on_ranks(job.stages, on_rank, job, n, folder)
        check_same(found)
        work = {name: sum(of_rank[name]["flops"] for of_rank in found) for name in SCHEDULES}
        return {name: measured(Record.read(Path(folder) / name), work[name]) for name in SCHEDULES}


def check_same(found: Sequence[dict[str, dict[str, Any]]]) -> None:
    """Raises RuntimeError unless all schedules have the same losses, and the same FLOPs on every rank."""
    for of_rank in found:
        first = of_rank["1f1b"]
        for name, other in of_rank.items():
            if other["losses"] != first["losses"] or other["flops"] != first["flops"]:
                raise RuntimeError(f"{name} does not do what 1f1b does: {other}, not {first}")


def report(found: dict[int, dict[str, Measured]]) -> str:
    rows = []
    for n, by_name in found.items():
        for name, got in by_name.items():
            busy = [sum(of_step) for of_step in got.busy]
            rows.append([
                str(n), name, f"{statistics.median(got.seconds) * 1e3:.0f}",
                f"{median_ratio(by_name['1f1b'].seconds, got.seconds):.3f}",
                f"{statistics.median(busy) * 1e3:.0f}",
                " / ".join("+".join(f"{s / n * 1e3:.0f}" for s in kinds.values()) for kinds in got.actions),
                f"{got.flops / 1e9:.2f}",
                " / ".join(f"{share:.1%}" for share in got.median_idle),
                " / ".join(f"{share:.1%}" for share in got.simulated),
            ])  # fmt: skip
    header = ["micro-batches", "schedule", "step ms", "speed / 1f1b", "busy ms", "F+B+W ms by stage", "GFLOP",
              "idle by stage", "simulated"]  # fmt: skip
    return table(header, rows)


def parse(arguments: Sequence[str] | None) -> tuple[Job, str | None]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stages", type=int, default=Job.stages, help=f"default {Job.stages}")
    parser.add_argument("--rounds", type=int, default=Job.rounds, help=f"steps of each (default {Job.rounds})")
    parser.add_argument("--policy", choices=("none", "full"), default=Job.policy, help=f"default {Job.policy}")
    parser.add_argument("--micro-batch", type=int, default=Job.micro_batch, help=f"default {Job.micro_batch}")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=Job.micro_batches, metavar="N")
    model = Job().model
    for name in ("layers", "hidden", "heads", "seq", "vocab"):
        default = getattr(model, name)
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--json", metavar="FILE", help="write settings, machine and every step there")
    a = parser.parse_args(arguments)
    model = replace(model, layers=a.layers, hidden=a.hidden, heads=a.heads, seq=a.seq, vocab=a.vocab)
    return Job(model, a.stages, a.micro_batch, tuple(a.micro_batches), a.rounds, a.policy), a.json


def main(arguments: Sequence[str] | None = None) -> int:
    job, path = parse(arguments)
    found = {n: measure(job, n) for n in job.micro_batches}
    m = job.model
    print(
        f"{m.layers} layers, hidden {m.hidden}, {m.heads} heads, sequence {m.seq}, vocabulary {m.vocab}, micro-batch "
        f"{job.micro_batch}, fp32, recompute {job.policy}, {job.stages} stages of one thread, medians of {job.rounds}"
    )
    print(report(found))
    if path is not None:
        figures = {n: {name: vars(got) for name, got in by_name.items()} for n, by_name in found.items()}
        write_json(path, {"job": vars(job) | {"model": vars(m)}, "machine": machine(), "measured": figures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
