"""Runs of the tiny reference model under any layout, and how far two of them are apart.

T0 is a small GPT with all sizes distinct; L0 is its Llama-style sister with one layer more (so that it does not
divide evenly over stages) and grouped queries.  R0 is either on one process without recompute.  A run is built in a
worker of `tests/pool.py` by the product's own `build`; steps go through the product's own `Stepper`.  Gradients are
those before clipping and update, whole (gathered over tensor-parallel ranks) and without padding.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megackpt.config.run import RunConfig
from megackpt.data.dataset import SampleDataset
from megackpt.data.loader import MicroBatchLoader
from megackpt.mesh.device import DeviceSeam
from megackpt.mesh.parameter import ParameterRecord, gather_full
from megackpt.train.build import Trainer, build
from megackpt.train.checkpoint import Position, Saves
from megackpt.train.loop import loader, train
from megackpt.train.step import Stepper
from tests.reference import Shape

Flags = dict[str, object]

COMMON: Flags = {
    "hidden-size": 96,
    "num-attention-heads": 8,
    "ffn-hidden-size": 336,
    "seq-length": 40,
    "vocab-size": 509,
    "micro-batch-size": 2,
    "global-batch-size": 8,
    "seed": 1234,
    "hidden-dropout": 0.0,
    "attention-dropout": 0.0,
    "mock-data": True,
    "num-workers": 0,
    "lr": 1e-3,
    "lr-decay-style": "constant",
    "train-iters": 5,
    "eval-iters": 0,
}
GPT: Flags = COMMON | {"num-layers": 4, "max-position-embeddings": 40}
LLAMA: Flags = COMMON | {
    "num-layers": 5,
    "group-query-attention": True,
    "num-query-groups": 4,
    "position-embedding-type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable-bias-linear": True,
    "untie-embeddings-and-output-weights": True,
}
FAMILIES: dict[str, Flags] = {"gpt": GPT, "llama": LLAMA}
SMALLER: Flags = {
    "num-layers": 2,
    "hidden-size": 48,
    "num-attention-heads": 4,
    "ffn-hidden-size": 168,
    "seq-length": 20,
    "global-batch-size": 4,
}
SMALL_GPT: Flags = GPT | SMALLER | {"max-position-embeddings": 20}
SMALL_LLAMA: Flags = LLAMA | SMALLER | {"num-layers": 3, "num-query-groups": 2}
"""Half of everything, for cases of many steps that compare a run with itself."""
SHAPES = {
    "gpt": Shape(layers=4, heads=8, groups=8, head_size=12),
    "llama": Shape(layers=5, heads=8, groups=4, head_size=12, rope=True, rms=True, gated=True, tied=False),
}


STEPS = 5
TOLERANCES = {
    "fp64": {"loss": 1e-12, "norm": 1e-12, "gradient": 1e-12},
    "fp32": {"loss": 1e-6, "norm": 3e-6, "gradient": 3e-6},
}


def rate_of(dtype: str) -> float:
    """Learning rate of a comparison over several steps.

    Adam divides a gradient by its own size, so the rounding of small gradients comes back as whole parts of the rate:
    at 1e-3 the norms of fp32 steps 4 and 5 are 2e-5 away from those in fp64, in this trainer and in the plain loop of
    `tests/reference.py` alike.  At 3e-4 it is 4e-7, and a difference between layouts can be seen.
    """
    return 1e-3 if dtype == "fp64" else 3e-4


@dataclass(frozen=True)
class Layout:
    """How a run is spread; `str()` is what a test is called by."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    sp: bool = False
    vp: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def flags(self) -> Flags:
        return {
            "tensor-model-parallel-size": self.tp,
            "pipeline-model-parallel-size": self.pp,
            "sequence-parallel": self.sp,
        } | ({"num-virtual-stages-per-pipeline-rank": self.vp} if self.vp > 1 else {})

    def __str__(self) -> str:
        chunks = f"v{self.vp}" if self.vp > 1 else ""
        return f"tp{self.tp}{'sp' if self.sp else ''}-pp{self.pp}{chunks}-dp{self.dp}"


def layouts(processes: int, sizes: tuple[int, ...] = (1, 2, 4)) -> list[Layout]:
    """All layouts of at most so many processes."""
    found = []
    for tp, pp, dp in itertools.product(sizes, repeat=3):
        if tp * pp * dp <= processes:
            found += [Layout(tp, pp, dp, sp) for sp in ((False, True) if tp > 1 else (False,))]
    return found


def words(flags: Mapping[str, object]) -> list[str]:
    """The command line of a run."""
    line: list[str] = []
    for name, value in flags.items():
        if value is True:
            line.append(f"--{name}")
        elif value is not False:
            values = value if isinstance(value, (list, tuple)) else [value]
            line += [f"--{name}", *map(str, values)]
    return line


def logged(path: Path, *keys: str) -> list[tuple[Any, ...]]:
    """The named values of every iteration in a metrics file."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [tuple(line[key] for key in keys) for line in lines if "lm_loss" in line]


# -- in a worker ---------------------------------------------------------------------------------------------------


def built(flags: Mapping[str, object], layout: Layout = Layout()) -> Trainer:
    """This rank's part of a run; the default process group must exist."""
    config = RunConfig.from_flags({**flags, **layout.flags}, layout.world_size)
    return build(config, DeviceSeam("cpu", torch.device("cpu"), "gloo"))


def whole(trainer: Trainer, local: Tensor, record: ParameterRecord) -> Tensor:
    """The unsharded tensor without padding; a collective call of the tensor-parallel ranks."""
    full = gather_full(local, record, trainer.mesh.tp)
    return record.without_padding(full).clone()


def whole_gradients(trainer: Trainer) -> dict[str, Tensor]:
    """Of this stage, by global name.  A collective call of all ranks of the stage where the optimizer is sharded."""
    buffer, dp = trainer.buffer, trainer.mesh.dp
    flat = buffer.flat
    if buffer.sharded and dp.size > 1:
        flat = torch.empty_like(flat)
        for number, bucket in enumerate(buffer.buckets):
            own = buffer.shard(number)
            pieces = [torch.empty_like(own) for _ in range(dp.size)]
            dist.all_gather(pieces, own, group=dp.group)
            flat[bucket.storage_offset() :][: bucket.numel()] = torch.cat(pieces)
    found = {}
    for entry in buffer.entries:
        start, shape = entry.gradient.storage_offset(), entry.gradient.shape
        found[entry.record.name] = whole(trainer, flat[start : start + shape.numel()].view(shape), entry.record)
    return found


def whole_weights(trainer: Trainer) -> dict[str, Tensor]:
    """Of this stage, by global name."""
    return {record.name: whole(trainer, parameter, record) for parameter, record in trainer.parameters}


@dataclass
class Trace:
    """What a rank saw: numbers of each step, and the whole gradients of its stage."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)

    def save(self, path: Path) -> None:
        torch.save(vars(self), path)

    @staticmethod
    def read(path: Path) -> Trace:
        return Trace(**torch.load(path, mmap=True))


def steps(
    trainer: Trainer, count: int, *, gradients_of: int = 0, stepper: Stepper | None = None, consumed: int = 0
) -> Trace:
    """Train `count` steps from sample `consumed` on; the whole gradients of the first `gradients_of` of them."""
    stepper = stepper or Stepper(trainer)
    trace = Trace()
    batch = trainer.config.batch.global_batch_size
    with closing(loader(trainer, trainer.datasets.train, consumed)) as batches:
        for step in range(count):
            totals = stepper.accumulate(batches)
            if step < gradients_of:
                trace.grads.append(whole_gradients(trainer))
            outcome = stepper.update(totals, consumed + step * batch)
            trace.losses.append(outcome.loss)
            trace.norms.append(outcome.grad_norm)
            trace.tokens.append(outcome.tokens)
    return trace


def save_run(trainer: Trainer, where: Position) -> None:
    """Write the run to its `--save`, as the loop does."""
    with Saves(trainer, lambda text: None) as saves:
        saves.save(where)


def train_all(rank: int, world_size: int, flags: Mapping[str, object], layout: Layout) -> None:
    """A case for `run_distributed`: the whole of a run, as `pretrain_gpt.py` does it once the processes have met."""
    train(built(flags, layout))


def batches_of(trainer: Trainer, dataset: SampleDataset | None = None) -> Iterator[dict[str, Tensor]]:
    """The global batches of a run (or of another of its datasets) as one process reads them."""
    config = trainer.config.batch
    whole_batch = MicroBatchLoader(
        dataset or trainer.datasets.train, config.global_batch_size, config.global_batch_size
    )
    for batch in whole_batch:
        yield {name: torch.from_numpy(array) for name, array in batch.items()}


class WatchedDataset:
    """A dataset that remembers which samples were read."""

    def __init__(self, inner: Any, read: list[int]) -> None:
        self.inner, self.read = inner, read
        self.fingerprint = inner.fingerprint

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return self.inner[index]


# -- distances -------------------------------------------------------------------------------------------------------


def relative(a: float, b: float) -> float:
    """|a - b| / |b|"""
    return abs(a - b) / abs(b)


def gradient_errors(grads: Mapping[str, Tensor], expected: Mapping[str, Tensor], norm: float) -> dict[str, float]:
    """Relative Frobenius distance of each gradient; the scale is never taken below 1e-9 of the global norm."""
    return {
        name: float((g.double() - expected[name].double()).norm())
        / max(float(expected[name].double().norm()), 1e-9 * norm)
        for name, g in grads.items()
    }


@dataclass(frozen=True)
class Distance:
    """The largest relative differences of a run from its reference, over steps and parameters."""

    loss: float
    norm: float
    gradient: float
    worst: str
    """step and name of the parameter with the largest difference"""
    names: tuple[str, ...]
    """of the parameters compared"""

    def check(self, *, loss: float, norm: float, gradient: float) -> None:
        for what, limit in (("loss", loss), ("norm", norm), ("gradient", gradient)):
            found = getattr(self, what)
            assert found <= limit, f"{what} differs by {found:.2e}, more than {limit:g}: {self}"


def distance(trace: Trace, expected: Trace) -> Distance:
    """Of what this rank saw from the reference; every value and gradient of `trace` is compared."""
    pairs = zip(trace.grads, expected.grads, expected.norms, strict=False)
    errors = {
        f"step {number} {name}": error
        for number, (grads, reference, norm) in enumerate(pairs, 1)
        for name, error in gradient_errors(grads, reference, norm).items()
    }
    worst = max(errors, key=lambda key: errors[key], default="")
    assert len(expected.losses) >= len(trace.losses) and len(expected.grads) >= len(trace.grads)
    return Distance(
        loss=max(relative(a, b) for a, b in zip(trace.losses, expected.losses, strict=False)),
        norm=max(relative(a, b) for a, b in zip(trace.norms, expected.norms, strict=False)),
        gradient=errors.get(worst, 0.0),
        worst=worst,
        names=tuple(trace.grads[0]) if trace.grads else (),
    )
