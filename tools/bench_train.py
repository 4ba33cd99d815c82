"""Our trainer against a plain PyTorch loop of the same model, on one process.

    python tools/bench_train.py                         6 layers, fused attention, no dropout
    python tools/bench_train.py --unfused --dropout 0.1
    python tools/bench_train.py --json bench.json

Both sides start from the same weights, read the same batches and must arrive at the same loss. All policies of both
sides run in turns, an optimizer step each; speed is the median of the ratios within pairs, memory is counted three
ways. Needs no GPU; about six minutes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # runs from a clone, installed or not

from megackpt.config.run import RunConfig  # noqa: E402
from megackpt.data.dataset import Batch  # noqa: E402
from megackpt.mesh.device import DeviceSeam  # noqa: E402
from megackpt.mesh.launch import LaunchEnvironment  # noqa: E402
from megackpt.mesh.rendezvous import init_process_group, shutdown  # noqa: E402
from megackpt.model.ends import masked_loss  # noqa: E402
from megackpt.observe.gemm_rate import measured_gemm_tflops  # noqa: E402
from megackpt.plan.flops import ModelShape, model_flops  # noqa: E402
from megackpt.recompute import Tape  # noqa: E402
from megackpt.train.build import build  # noqa: E402
from megackpt.train.loop import loader  # noqa: E402
from megackpt.train.step import Stepper  # noqa: E402
from tools.bench_common import (  # noqa: E402
    Runs,
    alive_after,
    in_turns,
    machine,
    median_ratio,
    saved_tensors,
    table,
    write_json,
)  # fmt: skip
from tools.bench_plain import Model, PlainTrainer  # noqa: E402

POLICIES = ("none", "selective", "full")
MIB = 1 << 20
LOSS_TOLERANCE = 1e-5
LR = 1e-4


@dataclass(frozen=True)
class Job:
    """What is trained, how, and how often it is measured."""

    model: Model = field(default_factory=Model)
    micro_batch: int = 2
    micro_batches: int = 8
    policies: tuple[str, ...] = POLICIES
    rounds: int = 9

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.micro_batch * self.micro_batches * self.model.seq

    def flags(self, policy: str) -> dict[str, object]:
        m = self.model
        recompute = {} if policy == "none" else {"recompute-granularity": policy}
        if policy == "full":
            recompute |= {"recompute-method": "uniform", "recompute-num-layers": 1}
        return recompute | {
            "num-layers": m.layers, "hidden-size": m.hidden, "num-attention-heads": m.heads, "seq-length": m.seq,
            "max-position-embeddings": m.seq, "vocab-size": m.vocab, "make-vocab-size-divisible-by": 1,
            "hidden-dropout": m.dropout, "attention-dropout": m.dropout,
            "attention-backend": "fused" if m.fused else "unfused",
            "untie-embeddings-and-output-weights": True, "micro-batch-size": self.micro_batch,
            "global-batch-size": self.micro_batch * self.micro_batches, "mock-data": True, "num-workers": 0,
            "lr": LR, "lr-decay-style": "constant", "train-iters": 1_000_000, "eval-iters": 0, "seed": 1234,
        }  # fmt: skip


class Ours:
    """The trainer under one set of flags: its own build, its own step."""

    def __init__(self, flags: dict[str, object], processes: int = 1) -> None:
        config = RunConfig.from_flags(flags, processes)
        self.trainer = build(config, DeviceSeam("cpu", torch.device("cpu"), "gloo"))
        self.stepper = Stepper(self.trainer)

    def weights(self) -> dict[str, Tensor]:
        return {record.name: parameter.detach().clone() for parameter, record in self.trainer.parameters}

    def read(self, steps: int) -> list[list[Batch]]:
        """The micro-batches of the first steps."""
        with loader(self.trainer, self.trainer.datasets.train, 0) as batches:
            return [[next(batches) for _ in range(self.trainer.config.micro_batches)] for _ in range(steps)]

    def step(self, batches: Sequence[Batch]) -> float:
        return self.stepper.train(iter(batches), 0).loss

    def saved_bytes(self, batches: Sequence[Batch]) -> int:
        """The engine's own count of one micro-batch."""
        self.trainer.account.reset_peak()
        self.stepper.count_bytes = True
        self.step(batches)
        self.stepper.count_bytes = False
        return self.trainer.account.peak

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """One forward on a tape, as a stage runs it."""
        trainer = self.trainer
        with Tape(trainer.plan.chunk(0, 0), trainer.ledger):
            losses = trainer.chunks[0](batch["tokens"], batch["labels"])
        return masked_loss(losses, batch["loss_mask"])[0]


def tensors(batches: Sequence[Batch]) -> list[dict[str, Tensor]]:
    return [{name: torch.from_numpy(array) for name, array in batch.items()} for batch in batches]


@dataclass
class Measured:
    """One side under one policy."""

    bytes: dict[str, int]
    """of one micro-batch, by who counted: engine (ours only), hooks, alive"""
    losses: list[float] = field(default_factory=list)
    """of every step, the warm-up among them"""
    runs: Runs = field(default_factory=Runs)


def counts(forward: Callable[[], object]) -> dict[str, int]:
    with saved_tensors() as sizes:
        held = forward()
    hooks = sum(sizes.values())
    del held
    return {"hooks": hooks, "alive": alive_after(forward)}


def measure(job: Job) -> dict[str, dict[str, Measured]]:
    """Both sides under every policy: ``result[policy]["ours" or "plain"]``.

    Raises RuntimeError when the losses of any step differ (compared without dropout, which both draw apart).
    """
    ours = {policy: Ours(job.flags(policy)) for policy in job.policies}
    first = ours[job.policies[0]]
    batches = first.read(4)
    plain = {policy: PlainTrainer(job.model, policy, first.weights(), LR) for policy in job.policies}
    plain_batches = [tensors(step) for step in batches]
    one = plain_batches[0][0]
    result = {
        policy: {
            "ours": Measured(counts(partial(ours[policy].forward, one))),
            "plain": Measured(counts(partial(plain[policy].loss, one))),
        }
        for policy in job.policies
    }

    def turn(policy: str, side: str) -> None:
        seen = result[policy][side].losses
        place = len(seen) % len(batches)
        step = ours[policy].step(batches[place]) if side == "ours" else plain[policy].step(plain_batches[place])
        seen.append(step)

    keys = [(policy, side) for policy in job.policies for side in ("ours", "plain")]
    for (policy, side), runs in zip(keys, in_turns([partial(turn, *key) for key in keys], job.rounds), strict=True):
        result[policy][side].runs = runs
    for policy in job.policies:
        result[policy]["ours"].bytes["engine"] = ours[policy].saved_bytes(batches[0])
    if job.model.dropout == 0.0 and (worst := loss_difference(result)) > LOSS_TOLERANCE:
        raise RuntimeError(f"losses differ by {worst:.1e} of themselves: this is not one model trained twice")
    return result


def loss_difference(measured: Mapping[str, Mapping[str, Measured]]) -> float:
    """Largest relative difference of a loss of ours from the plain loop's, over policies and steps."""
    return max(
        abs(a - b) / abs(b)
        for sides in measured.values()
        for a, b in zip(sides["ours"].losses, sides["plain"].losses, strict=True)
    )


def report(job: Job, measured: Mapping[str, Mapping[str, Measured]], gemm_tflops: float) -> str:
    m = job.model
    shape = ModelShape.gpt(m.layers, m.hidden, m.heads, m.vocab, m.seq)
    flops = model_flops(shape, job.micro_batch * job.micro_batches)
    rows = []
    for policy, sides in measured.items():
        for side, got in sides.items():
            wall, cpu = statistics.median(got.runs.wall), statistics.median(got.runs.cpu)
            added = [a - b for a, b in zip(got.runs.cpu, measured[job.policies[0]][side].runs.cpu, strict=True)]
            ratio = median_ratio(sides["plain"].runs.wall, got.runs.wall)
            cpu_ratio = median_ratio(sides["plain"].runs.cpu, got.runs.cpu)
            counted = got.bytes
            rows.append([
                policy, side, f"{job.tokens / wall:.0f}", f"{ratio:.3f}", f"{cpu / job.tokens * 1e6:.0f}",
                f"{cpu_ratio:.3f}", f"{statistics.median(added) / job.tokens * 1e6:+.0f}",
                f"{counted['engine'] / MIB:.1f}" if "engine" in counted else "",
                f"{counted['hooks'] / MIB:.1f}", f"{counted['alive'] / MIB:.1f}",
                f"{flops / wall / (gemm_tflops * 1e12):.0%}",
            ])  # fmt: skip
    header = ["policy", "side", "tokens/s", "speed / plain", "CPU us/token", "by CPU time",
              f"us/token over {job.policies[0]}", "kept MiB: engine", "hooks", "alive", "of GEMM rate"]  # fmt: skip
    return table(header, rows)


def parse(arguments: Sequence[str] | None) -> tuple[Job, str | None]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--unfused", action="store_true", help="attention as plain products (default: fused)")
    parser.add_argument("--dropout", type=float, default=0.0, metavar="P", help="in attention and hidden (default 0)")
    parser.add_argument("--rounds", type=int, default=9, help="paired runs of each policy (default 9)")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    for name in ("layers", "hidden", "heads", "seq", "vocab"):
        default = getattr(Model, name)
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--micro-batch", type=int, default=Job.micro_batch, help=f"default {Job.micro_batch}")
    parser.add_argument("--micro-batches", type=int, default=Job.micro_batches, help=f"default {Job.micro_batches}")
    parser.add_argument("--json", metavar="FILE", help="write settings, machine and every run there")
    a = parser.parse_args(arguments)
    model = Model(a.layers, a.hidden, a.heads, a.seq, a.vocab, a.dropout, not a.unfused)
    return Job(model, a.micro_batch, a.micro_batches, tuple(a.policies), a.rounds), a.json


def main(arguments: Sequence[str] | None = None) -> int:
    job, path = parse(arguments)
    torch.set_num_threads(1)
    config = RunConfig.from_flags(job.flags("none"), 1)
    alone = not dist.is_initialized()
    if alone:
        seam = DeviceSeam("cpu", torch.device("cpu"), "gloo")
        init_process_group(config.parallel, LaunchEnvironment.detect({}), seam)
    try:
        gemm_tflops = measured_gemm_tflops(budget_s=1.0)
        measured = measure(job)
        gemm_tflops = max(gemm_tflops, measured_gemm_tflops(budget_s=1.0))  # others may have been busy before
    finally:
        if alone:
            shutdown()
    m = job.model
    print(
        f"{m.layers} layers, hidden {m.hidden}, {m.heads} heads, sequence {m.seq}, vocabulary {m.vocab}, micro-batch "
        f"{job.micro_batch} x {job.micro_batches}, fp32, one thread, {'fused' if m.fused else 'unfused'} attention, "
        f"dropout {m.dropout:g}, {job.rounds} rounds; GEMM {gemm_tflops * 1e3:.1f} GFLOP/s"
    )
    print(report(job, measured, gemm_tflops))
    if m.dropout == 0.0:
        print(f"largest relative difference of a loss: {loss_difference(measured):.1e}")
    if path is not None:
        sides = {policy: {side: asdict(got) for side, got in each.items()} for policy, each in measured.items()}
        write_json(path, {"job": asdict(job), "machine": machine(), "gemm_tflops": gemm_tflops, "measured": sides})
    return 0


if __name__ == "__main__":
    sys.exit(main())
