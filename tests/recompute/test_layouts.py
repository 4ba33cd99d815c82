"""Recomputation changes no bit: losses, every gradient, every random stream, at each layout.

Dropout 0.1 in attention and hidden.  The reference at each layout is the same trainer without any tape (plain
autograd); each policy then runs the same global batch through the product's own schedule and gradient buffer.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from torch import Tensor

import megackpt.train.step
from megackpt.observe.numbers import split_of
from megackpt.pipeline.tape import NoTape
from megackpt.plan import Policy, plan_for
from megackpt.recompute import MaskSource
from megackpt.train.build import Trainer
from megackpt.train.loop import loader
from megackpt.train.step import Stepper
from tests.layouts import FAMILIES, Flags, Layout, built
from tests.pool import run_distributed
from tests.recompute.models import POLICIES

MICRO_BATCHES = 3


@dataclass
class Outcome:
    """Of one step on one rank."""

    loss: float
    gradients: Tensor  # the whole buffer, as the optimizer would see it
    streams: dict[str, int]
    default_generator: Tensor

    def differences(self, other: Outcome) -> list[str]:
        found = [] if self.loss == other.loss else ["loss"]
        found += [] if torch.equal(self.gradients, other.gradients) else ["gradients"]
        found += [] if self.streams == other.streams else ["streams"]
        return found + ([] if torch.equal(self.default_generator, other.default_generator) else ["default generator"])


def one_step(trainer: Trainer, stepper: Stepper) -> Outcome:
    trainer.ledger.load_state_dict({name: 0 for name in trainer.ledger.state_dict()})
    torch.manual_seed(0)
    with closing(loader(trainer, trainer.datasets.train, 0)) as batches:
        total, _ = stepper.accumulate(batches)
    assert trainer.buffer.flat.abs().sum() > 0
    return Outcome(total, trainer.buffer.flat.clone(), trainer.ledger.state_dict(), torch.get_rng_state())


def every_policy(rank: int, world_size: int, flags: Flags, layout: Layout) -> dict[str, list[str]]:
    """What differs from plain autograd, by policy."""
    trainer = built(flags, layout)
    with mock.patch.object(megackpt.train.step, "Tape", lambda *args, **kwargs: NoTape(0, 0)):
        plain = one_step(trainer, Stepper(trainer))
    assert all(position > 0 for position in plain.streams.values()) or layout.sp  # the run drew
    cut = split_of(trainer.config)
    found = {}
    for name, details in POLICIES.items():
        planned = replace(trainer, plan=plan_for(cut, Policy(**details)))
        found[name] = one_step(planned, Stepper(planned)).differences(plain)
    return found


def flags_of(family: str, backend: str) -> Flags:
    return FAMILIES[family] | {
        "attention-backend": backend,
        "hidden-dropout": 0.1,
        "attention-dropout": 0.1,
        "global-batch-size": 2 * MICRO_BATCHES,
    }


LAYOUTS = [Layout(tp, pp, 1, sp) for tp, sp in ((1, False), (2, False), (2, True)) for pp in (1, 2)]
PRODUCT = [(layout, family, backend) for layout in LAYOUTS for family in FAMILIES for backend in ("fused", "unfused")]
DEFAULT = [  # both families and both cores at every layout, not each pair of them
    (layout, family, backend)
    for place, (layout, family, backend) in enumerate(PRODUCT)
    if (family == "gpt") == ((backend == "fused") == (place // 4 % 2 == 0))
]


def check(layout: Layout, family: str, backend: str) -> None:
    for found in run_distributed(every_policy, layout.world_size, flags_of(family, backend), layout, timeout=100):
        assert found == {name: [] for name in POLICIES}


@pytest.mark.parametrize(("layout", "family", "backend"), DEFAULT, ids=str)
def test_bitwise_equal(layout: Layout, family: str, backend: str) -> None:
    check(layout, family, backend)


@pytest.mark.full
@pytest.mark.parametrize(("layout", "family", "backend"), [c for c in PRODUCT if c not in DEFAULT], ids=str)
def test_bitwise_equal_otherwise(layout: Layout, family: str, backend: str) -> None:
    check(layout, family, backend)


def _altered_mask(rank: int, world_size: int) -> list[str]:
    """The comparison above sees a single redrawn mask that is not the forward's."""
    flags = flags_of("gpt", "fused") | {"recompute-granularity": "full"}
    trainer = built(flags)
    honest = one_step(trainer, Stepper(trainer))
    once = iter([1])
    real = MaskSource.again

    def again(source: MaskSource) -> Tensor:
        if next(once, 0):
            source.position += 1
        return real(source)

    with mock.patch.object(MaskSource, "again", again):
        return one_step(trainer, Stepper(trainer)).differences(honest)


def test_the_comparison_can_fail() -> None:
    assert run_distributed(_altered_mask, 1) == [["gradients"]]
