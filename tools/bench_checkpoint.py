"""How long a save keeps training waiting: a blocking one against one that is written beside training.

    python tools/bench_checkpoint.py                            one process, tp 2, pp 2, dp 2
    python tools/bench_checkpoint.py --layouts tp2pp2 --rounds 5
    python tools/bench_checkpoint.py --json bench.json

Both kinds take turns within one run of the same trainer. The stall is all the time that the training thread spends in
calls of the saver, up to the moment when the checkpoint is there under its name; in the background that is the
snapshot, the looks at the writers, and manifest and renames. Steps go on meanwhile and are timed too. Needs no GPU;
about two minutes.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.multiprocessing

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # runs from a clone, installed or not

from megackpt.config.run import RunConfig  # noqa: E402
from megackpt.mesh.device import DeviceSeam  # noqa: E402
from megackpt.mesh.launch import LaunchEnvironment  # noqa: E402
from megackpt.mesh.rendezvous import init_process_group, shutdown  # noqa: E402
from megackpt.persist import HostCopy, Retention, Saver  # noqa: E402
from megackpt.train.build import Trainer, build  # noqa: E402
from megackpt.train.checkpoint import Position, state_to_save  # noqa: E402
from megackpt.train.loop import loader  # noqa: E402
from megackpt.train.step import Stepper  # noqa: E402
from tools.bench_common import machine, median_ratio, table, write_json  # noqa: E402

AXES = {"tp": "tensor-model-parallel-size", "pp": "pipeline-model-parallel-size", "dp": None}
MIB = 1 << 20


@dataclass
class Times:
    """Seconds on rank 0, one number per round."""

    blocking: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    until_there: list[float] = field(default_factory=list)
    """from the call of a background save to its checkpoint"""
    step: list[float] = field(default_factory=list)
    step_meanwhile: list[float] = field(default_factory=list)
    bytes: int = 0
    """of one checkpoint"""


def measure(trainer: Trainer, root: Path, rounds: int) -> Times:
    """One round that does not count, then `rounds`; called by all ranks together."""
    retention = Retention(last=2)
    blocking = Saver(root / "blocking", trainer.mesh, retention=retention)
    beside = Saver(root / "beside", trainer.mesh, host_copy=HostCopy(trainer.seam), retention=retention)
    times, stepper = Times(), Stepper(trainer)
    with closing(loader(trainer, trainer.datasets.train, 0)) as batches:

        def step() -> float:
            began = time.perf_counter()
            stepper.train(batches, 0)
            return time.perf_counter() - began

        for number in range(rounds + 1):
            where = Position(number + 1)
            alone = step()
            began = time.perf_counter()
            path = blocking.save(number + 1, state_to_save(trainer, where))
            waited = time.perf_counter() - began
            step()
            stall, until_there, meanwhile = one_beside(beside, trainer, where, step)
            if number:
                times.blocking.append(waited)
                times.beside.append(stall)
                times.until_there.append(until_there)
                times.step.append(alone)
                times.step_meanwhile.append(meanwhile)
            assert path is not None
            times.bytes = sum(file.stat().st_size for file in path.iterdir())
    return times


def one_beside(saver: Saver, trainer: Trainer, where: Position, step: object) -> tuple[float, float, float]:
    """Seconds of stall, until the checkpoint is there, and of a step meanwhile."""
    assert callable(step)
    began, stall, steps = time.perf_counter(), 0.0, []
    saver.save(where.iteration, state_to_save(trainer, where))
    stall += time.perf_counter() - began
    while saver.busy:
        steps.append(step())
        looked = time.perf_counter()
        saver.poll()
        stall += time.perf_counter() - looked
    return stall, time.perf_counter() - began, statistics.mean(steps)


def run_rank(rank: int, layout: str, port: int, flags: Mapping[str, object], rounds: int, root: str) -> None:
    """A process of `torch.multiprocessing`: rank 0 leaves its times in a file."""
    torch.set_num_threads(1)
    sizes = sizes_of(layout)
    world = sizes["tp"] * sizes["pp"] * sizes["dp"]
    parallel = {flag: sizes[axis] for axis, flag in AXES.items() if flag}
    config = RunConfig.from_flags({**flags, **parallel, "save": root}, world)
    seam = DeviceSeam.create("cpu")
    init_process_group(config.parallel, LaunchEnvironment("srun", rank, world, rank, "127.0.0.1", port), seam)
    try:
        times = measure(build(config, seam), Path(root), rounds)
        if rank == 0:
            torch.save(vars(times), Path(root) / "times.pt")
    finally:
        shutdown()


def sizes_of(layout: str) -> dict[str, int]:
    """`tp2pp2` as sizes by axis; the rest is 1."""
    found = dict(re.findall(r"(tp|pp|dp)(\d+)", layout))
    if "".join(axis + size for axis, size in found.items()) != layout:
        raise SystemExit(f"a layout is made of tp, pp and dp with numbers, such as tp2pp2; got {layout!r}")
    return {axis: int(found.get(axis, 1)) for axis in AXES}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=["tp1", "tp2", "pp2", "dp2"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--folder", help="where checkpoints go for a while; default: the system's temporary folder")
    parser.add_argument("--json")
    options = parser.parse_args(argv)
    flags = {
        "num-layers": options.layers,
        "hidden-size": options.hidden,
        "num-attention-heads": 8,
        "seq-length": 128,
        "max-position-embeddings": 128,
        "vocab-size": 4096,
        "micro-batch-size": 1,
        "global-batch-size": 2,
        "mock-data": True,
        "num-workers": 0,
        "lr": 1e-4,
        "lr-decay-style": "constant",
        "train-iters": 1000,
        "eval-iters": 0,
    }
    rows, document = [], {}
    for place, layout in enumerate(options.layouts):
        sizes = sizes_of(layout)
        with tempfile.TemporaryDirectory(dir=options.folder) as root:
            work = (layout, 29500 + place, flags, options.rounds, root)
            world = sizes["tp"] * sizes["pp"] * sizes["dp"]
            torch.multiprocessing.spawn(run_rank, work, nprocs=world)  # type: ignore[no-untyped-call]
            times = Times(**torch.load(Path(root) / "times.pt"))
        document[layout] = vars(times)
        rows.append(row(layout, times))
    head = ["layout", "MiB", "blocking, ms", "beside, ms", "ratio", "until there, ms", "step, ms", "meanwhile, ms"]
    print(table(head, rows))
    if options.json:
        write_json(options.json, {"machine": machine(), "layouts": document})
    return 0


def row(layout: str, times: Times) -> list[str]:
    def ms(values: Sequence[float]) -> str:
        return f"{1e3 * statistics.median(values):.1f}"

    return [
        layout,
        f"{times.bytes / MIB:.0f}",
        ms(times.blocking),
        ms(times.beside),
        f"{median_ratio(times.beside, times.blocking):.2f}",
        ms(times.until_there),
        ms(times.step),
        ms(times.step_meanwhile),
    ]


if __name__ == "__main__":
    sys.exit(main())
