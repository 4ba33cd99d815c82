"""Seconds of our own layers on this machine, kind by kind of step, for the planner (`plan/paces.py`).

Small models of all kinds run forward and backward, as in training, while an observer notes the processor time of every
named step: of its forward where it is called, of its backward between the gradient of its output and that of its
input.  A kind of step then gets the three prices (of an operation, a FLOP and a byte) that fit all sizes best, as
shares of what was measured.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megackpt.config.run import RunConfig
from megackpt.model.ends import masked_loss
from megackpt.observe.numbers import layout_numbers, model_numbers, split_of
from megackpt.plan import ChunkPlan
from megackpt.plan.paces import Kernel, Pace
from megackpt.plan.profile import Profile, profile
from megackpt.recompute import Tape
from megackpt.train.build import Trainer

Flags = dict[str, object]

# The first has rows that fill no vector and heads of 12; vocabularies are padded, as they mostly are.
SIZES: tuple[Flags, ...] = (
    {"hidden-size": 72, "num-attention-heads": 6, "ffn-hidden-size": 250, "seq-length": 36, "vocab-size": 381},
    {"hidden-size": 64, "num-attention-heads": 4, "ffn-hidden-size": 256, "seq-length": 32, "vocab-size": 635},
    {"hidden-size": 192, "num-attention-heads": 6, "ffn-hidden-size": 640, "seq-length": 96, "vocab-size": 1501},
    {"hidden-size": 512, "num-attention-heads": 8, "ffn-hidden-size": 1536, "seq-length": 192, "vocab-size": 4093},
)
KINDS_OF_MODEL: tuple[Flags, ...] = (
    {},
    {"hidden-dropout": 0.1, "attention-dropout": 0.1, "squared-relu": True, "qk-layernorm": True},
    {"attention-backend": "unfused", "group-query-attention": True, "num-query-groups": 2, "swiglu": True,
     "normalization": "RMSNorm", "position-embedding-type": "rope", "disable-bias-linear": True, "qk-layernorm": True,
     "untie-embeddings-and-output-weights": True},
)  # fmt: skip
LAYERS = 2
RUN_S = 0.5  # of each model, at least LEAST steps
LEAST = 4
FIRST = 2  # that do not count
CLOCK_S = 1e-9  # no clock tells less


def flags_of(size: Mapping[str, object], kind: Mapping[str, object]) -> Flags:
    """A run of one process."""
    return {
        "num-layers": LAYERS, "max-position-embeddings": size["seq-length"],
        "hidden-dropout": 0.0, "attention-dropout": 0.0, "micro-batch-size": 2, "global-batch-size": 2,
        "mock-data": True, "num-workers": 0, "lr": 1e-4, "lr-decay-style": "constant", "train-iters": 1000,
        "eval-iters": 0, "device": "cpu",
    } | dict(size) | dict(kind)  # fmt: skip


@dataclass
class Watch:
    """An observer of a tape that leaves the steps as they are and notes their times."""

    forward: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    backward: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _marks: list[tuple[str, float]] = field(default_factory=list)

    def __call__(
        self, address: str, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        start = time.thread_time()
        result = fn(*args, **kwargs)
        self.forward[name].append(time.thread_time() - start)
        handed_on = any(result is argument for argument in args)  # what does nothing has no backward
        if isinstance(result, Tensor) and result.requires_grad and not handed_on:
            result.register_hook(partial(self._mark, name))
        return result

    def _mark(self, name: str, _: Tensor) -> None:
        self._marks.append((name, time.thread_time()))

    def run_backward(self, loss: Tensor) -> None:
        """Of the micro-batch whose forward was watched last."""
        self._marks.clear()
        loss.backward()
        self._mark("", loss)
        for (name, start), (_, end) in itertools.pairwise(self._marks):
            self.backward[name].append(end - start)


@dataclass(frozen=True)
class Seen:
    """A step of one size: what it does, and its seconds in one direction."""

    operations: int
    flops: int
    moved: int
    seconds: float


def measure_kernels(built: Callable[[Flags], Trainer]) -> dict[str, Kernel]:
    """Every kind of step on this device."""
    seen: dict[str, tuple[list[Seen], list[Seen]]] = defaultdict(lambda: ([], []))
    for kind, size in itertools.product(KINDS_OF_MODEL, SIZES):
        trainer = built(flags_of(size, kind))
        watch = watched(trainer)
        made = profile_of(trainer.config, trainer.vocab)
        for step in (*made.embedding.steps, *made.block.steps, *made.head.steps):
            if step.kernel and watch.backward[step.name]:
                forward, backward = seen[step.kernel]
                forward.append(Seen(step.operations, step.flops, step.bytes_moved, typical(watch.forward[step.name])))
                backward.append(
                    Seen(
                        step.backward_operations, step.backward_flops, step.bytes_moved,
                        typical(watch.backward[step.name]),
                    )
                )  # fmt: skip
    return {kind: Kernel(fitted(forward), fitted(backward)) for kind, (forward, backward) in sorted(seen.items())}


def profile_of(config: RunConfig, vocab: int) -> Profile:
    """The planner's."""
    return profile(model_numbers(config, vocab), layout_numbers(config, split_of(config), "cpu"))


class Watched:
    """A model of one rank, and what its steps took."""

    def __init__(self, trainer: Trainer) -> None:
        config, (self.chunk,) = trainer.config, trainer.chunks
        shape = (config.batch.micro_batch_size, config.model.seq_length)
        self.tokens, self.mask = torch.randint(trainer.vocab, shape), torch.ones(shape)
        self.ledger, self.watch = trainer.ledger, Watch()

    def run(self) -> None:
        """One micro-batch, forward and backward."""
        with Tape(ChunkPlan(), self.ledger, observer=self.watch):
            total, _ = masked_loss(self.chunk(self.tokens, self.tokens), self.mask)
            self.watch.run_backward(total)


def watched(trainer: Trainer) -> Watch:
    """What the steps took in RUN_S, and at least LEAST times."""
    seen = Watched(trainer)
    for _ in range(FIRST):
        seen.run()
    seen.watch, end, count = Watch(), time.perf_counter() + RUN_S, 0
    while count < LEAST or time.perf_counter() < end:
        seen.run()
        count += 1
    return seen.watch


def typical(seconds: Sequence[float]) -> float:
    """The mean of the middle half: what parts take then adds up to what the whole takes, which medians do not, and what
    others do on the host hardly counts."""
    cut = len(seconds) // 4
    return statistics.mean(sorted(seconds)[cut : len(seconds) - cut])


def fitted(rows: Sequence[Seen]) -> Pace:
    """The prices, none below 0, with the least squares of errors relative to what was measured."""
    table = np.array([[row.operations, row.flops, row.moved] for row in rows], dtype=float)
    seconds = np.array([max(row.seconds, CLOCK_S) for row in rows])
    best, least = np.zeros(3), float("inf")
    scaled = table / seconds[:, None]
    unit = scaled.max(axis=0)
    for columns in _choices(table):
        prices = np.zeros(3)
        prices[columns] = np.linalg.lstsq(scaled[:, columns] / unit[columns], np.ones(len(rows)), rcond=None)[0]
        prices[columns] /= unit[columns]
        error = float(((scaled @ prices - 1) ** 2).sum())
        if prices.min() >= 0 and error < least:
            best, least = prices, error
    return Pace(*best.tolist())


def _choices(table: np.ndarray) -> list[list[int]]:
    """Columns that may have a price."""
    there = [column for column in range(3) if table[:, column].any()]
    return [list(c) for count in range(len(there), 0, -1) for c in itertools.combinations(there, count)]
