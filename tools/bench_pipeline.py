"""Our trainer's pipeline against torch.distributed.pipelining's 1F1B, in the same processes.

    python tools/bench_pipeline.py                       two stages
    python tools/bench_pipeline.py --tensor 2            two stages of two tensor-parallel ranks
    python tools/bench_pipeline.py --equal-split         as many layers on each of our stages
    python tools/bench_pipeline.py --pipeline-schedule=zb-h1     flags of the trainer, for our side only
    python tools/bench_pipeline.py --json bench.json

The job is that of `bench_train.py`, whose head weighs as much as two layers: our side counts it
(``--account-for-loss-in-pipeline-split``), the other has no such means and cuts in the middle.  Both sides start from
the same weights, read the same batches and must arrive at the same loss.  All policies of both sides run in turns, an
optimizer step each; speed is the median of the ratios within pairs.  Live peaks are of a step's tensors, by a dispatch
mode that counts every storage.  Needs no GPU; about three minutes for two processes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # runs from a clone, installed or not

from megackpt.data.dataset import Batch  # noqa: E402
from megackpt.mesh.process_mesh import single_axis  # noqa: E402
from megackpt.mesh.sink import AutogradSink  # noqa: E402
from megackpt.model import GPTChunk, build_chunk  # noqa: E402
from megackpt.plan.events import Event  # noqa: E402
from megackpt.recompute import RngLedger, Stream  # noqa: E402
from megackpt.tensor.context import REPLICATED, TENSOR, TensorParallel  # noqa: E402
from tools.bench_common import Runs, in_turns, machine, median_ratio, on_ranks, table, write_json  # noqa: E402
from tools.bench_pipeline_plain import PlainPipeline  # noqa: E402
from tools.bench_plain import Model  # noqa: E402
from tools.bench_recompute_tp import LocalTracker  # noqa: E402
from tools.bench_train import LOSS_TOLERANCE, LR  # noqa: E402
from tools.bench_train import Job as TrainJob  # noqa: E402
from tools.bench_train import Ours as TrainOurs  # noqa: E402

POLICIES = ("none", "full")
MIB = 1 << 20


@dataclass(frozen=True)
class Job:
    """What is trained, over how many stages and tensor-parallel ranks, and how often it is measured.

    ``ours`` are flags that only our side gets: schedules and splits that the other side does not have.
    """

    model: Model = field(default_factory=Model)
    stages: int = 2
    tensor: int = 1
    micro_batch: int = 2
    micro_batches: int = 8
    rounds: int = 9
    policies: tuple[str, ...] = POLICIES
    ours: dict[str, object] = field(default_factory=dict)
    same_split: bool = False
    """The other side divides layers as ours does, whatever flags we got."""

    @property
    def processes(self) -> int:
        return self.stages * self.tensor

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.micro_batch * self.micro_batches * self.model.seq

    def flags(self, policy: str) -> dict[str, object]:
        one = TrainJob(self.model, self.micro_batch, self.micro_batches)
        return one.flags(policy) | {
            "pipeline-model-parallel-size": self.stages, "tensor-model-parallel-size": self.tensor,
            "sequence-parallel": self.tensor > 1,
        } | self.ours  # fmt: skip


@dataclass
class Measured:
    """One side under one policy, on one rank."""

    runs: Runs
    losses: list[float]
    peak_bytes: int
    idle_s: float | None = None
    """of one step, waiting for messages (ours only)"""


class Ours(TrainOurs):
    """The trainer on one rank, which can do without the update and be asked what it waits for."""

    def __init__(self, job: Job, policy: str) -> None:
        super().__init__(job.flags(policy), job.processes)

    def forward_backward(self, batches: Sequence[Batch]) -> None:
        self.stepper.accumulate(iter(batches))

    def idle_s(self, batches: Sequence[Batch]) -> float:
        """Seconds of one step that this rank waits for messages."""
        events: list[Event] = []
        run = self.stepper.executor.run
        self.stepper.executor.run = lambda n, **options: run(n, **options | {"events": events})  # type: ignore[method-assign]
        self.forward_backward(batches)
        self.stepper.executor.run = run  # type: ignore[method-assign]
        return sum(event.wait_s for event in events)

    def whole(self) -> GPTChunk:
        """This stage with unsharded weights."""
        trainer = self.trainer
        ledger = RngLedger(defaults=False)
        for number, name in enumerate((REPLICATED, TENSOR)):
            ledger.register(Stream(name, number))
        seed = trainer.config.train.seed
        tp = TensorParallel(
            single_axis(), False, ledger, AutogradSink(), torch.float32, torch.device("cpu"), seed
        )
        piece = trainer.pieces[0]
        first, last = piece.is_first, piece.is_last
        return build_chunk(trainer.config.model, tp, trainer.vocab, piece.layers, first=first, last=last)


def whole_batch(batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
    """Tokens and labels of a step, [n b, s]."""
    tokens, labels = (torch.cat([torch.from_numpy(b[name]) for b in batches]) for name in ("tokens", "labels"))
    return tokens, labels


def on_rank(job: Job) -> dict[str, dict[str, Measured]]:
    """Both sides under every policy on this rank: ``result[policy]["ours" or "torch"]``; the default group must exist.

    Raises RuntimeError when the losses of any step differ.
    """
    ours = {policy: Ours(job, policy) for policy in job.policies}
    alike = ours[job.policies[0]]
    if job.ours and not job.same_split:
        alike = Ours(replace(job, ours={}), job.policies[0])
    batches = alike.read(4)
    joined = [whole_batch(step) for step in batches]
    piece, mesh = alike.trainer.pieces[0], alike.trainer.mesh
    plain = {
        policy: PlainPipeline(
            job.model, alike.whole(), piece, mesh, job.micro_batch, job.micro_batches, policy == "full", LR
        )
        for policy in job.policies
    }
    losses: dict[tuple[str, str], list[float]] = {}

    def turn(policy: str, side: str) -> None:
        seen = losses.setdefault((policy, side), [])
        place = len(seen) % len(batches)
        dist.barrier()
        seen.append(ours[policy].step(batches[place]) if side == "ours" else plain[policy].step(*joined[place]))

    keys = [(policy, side) for policy in job.policies for side in ("ours", "torch")]
    runs = in_turns([partial(turn, *key) for key in keys], job.rounds, warm_up=2)
    idle = {policy: ours[policy].idle_s(batches[0]) for policy in job.policies}
    result: dict[str, dict[str, Measured]] = {policy: {} for policy in job.policies}
    for (policy, side), got in zip(keys, runs, strict=True):
        peak = _peak(
            partial(ours[policy].forward_backward, batches[0])
            if side == "ours"
            else partial(plain[policy].forward_backward, *joined[0])
        )
        waited = idle[policy] if side == "ours" else None
        result[policy][side] = Measured(got, losses[policy, side], peak, waited)
    for policy in job.policies:
        pairs = zip(losses[policy, "ours"], losses[policy, "torch"], strict=True)
        if (worst := max(abs(a - b) / abs(b) for a, b in pairs)) > LOSS_TOLERANCE:
            raise RuntimeError(f"losses differ by {worst:.1e} of themselves: this is not one model trained twice")
    return result


def _peak(work: Callable[[], object]) -> int:
    """Most bytes of tensors allocated within, gradients that stay among them, without those of a first call."""
    work()
    with LocalTracker() as tracker:
        work()
    return tracker.peak_bytes


def found_on_rank(job: Job) -> dict[str, dict[str, dict[str, Any]]]:
    """What `on_rank` measured, as JSON has it."""
    return {policy: {side: asdict(got) for side, got in sides.items()} for policy, sides in on_rank(job).items()}


def measure(job: Job) -> list[dict[str, dict[str, Any]]]:
    """Start the processes; what every rank found."""
    return on_ranks(job.processes, found_on_rank, job)


def report(job: Job, found: Sequence[dict[str, dict[str, Any]]]) -> str:
    """A step ends with a collective of all ranks, so one rank's clock tells; processor time and bytes are sums."""
    rows = []
    for policy, sides in found[0].items():
        for side, got in sides.items():
            wall = statistics.median(got["runs"]["wall"])
            ratio = median_ratio(sides["torch"]["runs"]["wall"], got["runs"]["wall"])
            of_ranks = [of_rank[policy] for of_rank in found]
            cpu = {s: [sum(t) for t in zip(*(r[s]["runs"]["cpu"] for r in of_ranks), strict=True)] for s in sides}
            idle = [r[side]["idle_s"] / wall for r in of_ranks if r[side]["idle_s"] is not None]
            rows.append([
                policy, side, f"{job.tokens / wall:.0f}", f"{ratio:.3f}",
                f"{statistics.median(cpu[side]) / job.tokens * 1e6:.0f}",
                f"{median_ratio(cpu['torch'], cpu[side]):.3f}",
                " / ".join(f"{r[side]['peak_bytes'] / MIB:.1f}" for r in of_ranks[:: job.tensor]),
                " / ".join(f"{share:.0%}" for share in idle[:: job.tensor]),
            ])  # fmt: skip
    header = ["policy", "side", "tokens/s", "speed / torch", "CPU us/token", "by CPU time", "live peak MiB by stage",
              "waits by stage"]  # fmt: skip
    return table(header, rows)


def parse(arguments: Sequence[str] | None) -> tuple[Job, str | None]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stages", type=int, default=Job.stages, help=f"default {Job.stages}")
    parser.add_argument("--tensor", type=int, default=Job.tensor, help=f"tensor-parallel ranks (default {Job.tensor})")
    parser.add_argument("--rounds", type=int, default=Job.rounds, help=f"paired runs (default {Job.rounds})")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    for name in ("layers", "hidden", "heads", "seq", "vocab"):
        default = getattr(Model, name)
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--micro-batch", type=int, default=Job.micro_batch, help=f"default {Job.micro_batch}")
    parser.add_argument("--micro-batches", type=int, default=Job.micro_batches, help=f"default {Job.micro_batches}")
    parser.add_argument("--equal-split", action="store_true", help="our stages get equal numbers of layers")
    parser.add_argument("--same-split", action="store_true", help="torch's stages get our numbers of layers")
    parser.add_argument("--json", metavar="FILE", help="write settings, machine and every run there")
    a, rest = parser.parse_known_args(arguments)
    model = Model(a.layers, a.hidden, a.heads, a.seq, a.vocab)
    ours: dict[str, object] = {} if a.equal_split else {"account-for-loss-in-pipeline-split": True}
    for word in rest:  # flags of the trainer, as --name=value or --name
        name, equals, value = word.removeprefix("--").partition("=")
        ours[name] = value if equals else True
    policies = tuple(a.policies)
    sizes = (a.stages, a.tensor, a.micro_batch, a.micro_batches, a.rounds)
    return Job(model, *sizes, policies, ours, a.same_split), a.json


def main(arguments: Sequence[str] | None = None) -> int:
    job, path = parse(arguments)
    begun = time.perf_counter()
    found = measure(job)
    m = job.model
    print(
        f"{m.layers} layers, hidden {m.hidden}, {m.heads} heads, sequence {m.seq}, vocabulary {m.vocab}, micro-batch "
        f"{job.micro_batch} x {job.micro_batches}, fp32, pp {job.stages} x tp {job.tensor}, one thread per process,"
        f" {job.rounds} rounds, {time.perf_counter() - begun:.0f} s"
        + (f"; ours with {job.ours}" if job.ours else "")
        + ("; torch's with the same split" if job.same_split else "")
    )
    print(report(job, found))
    if path is not None:
        write_json(path, {"job": asdict(job), "machine": machine(), "by_rank": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
