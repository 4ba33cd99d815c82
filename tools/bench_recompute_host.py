"""Host time that a replay adds, by way: per step of three tiny operations, and per transformer layer of tiny tensors.

All ways run in turns in one process; what is reported is the processor time of forward and backward, less that of the
same model without recompute in the same round, per step or layer, as a median over rounds.  The re-run operations are
part of it; `engine` is what is left when the time of one forward of the model is taken off (a replay stops before the
forward's end where it can, so this takes a little too much off).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megackpt.plan import KEEP, REPLAY, ChunkPlan, Decision, SaveSet
from megackpt.plan.decision import REPLAY_ALL
from megackpt.recompute import RngLedger, Tape, step
from tools.bench_common import Runs, in_turns
from tools.bench_plain import Model
from tools.bench_regions import BY_HAND, DEFAULTS, NO_STATE, NON_REENTRANT, STREAMS, ways
from tools.bench_stacks import OurStack, Training, in_turn, plain_layers

Fn = Callable[[Tensor], Tensor]
NONE = "none"
TINY = Model(layers=4, hidden=16, heads=2, seq=4, vocab=16)
STEPS = 16


@dataclass(frozen=True)
class Effort:
    """How often things are timed: ``repeats`` forwards and backwards a round."""

    rounds: int = 40
    repeats: int = 6


@dataclass
class Subject:
    """One model under all ways; ``units`` of it are replayed in a step."""

    name: str
    units: int
    trainings: dict[str, Training]
    random: dict[str, str]


def tiny_step(x: Tensor) -> Tensor:
    """Three operations, of which two tensors are saved besides the input; the output is not."""
    return x.sin().cos().sin()


def steps_subject() -> Subject:
    """A chain of tiny steps."""
    ledger = RngLedger()
    output_kept = ChunkPlan({"": SaveSet({}, Decision(output=KEEP, internals=REPLAY))})
    every_other = ChunkPlan({"": SaveSet({"dropped": REPLAY_ALL}, Decision(output=KEEP, internals=REPLAY))})
    streams_only = RngLedger(defaults=False)

    def on_tape(x: Tensor, plan: ChunkPlan, ledger: RngLedger, names: Sequence[str]) -> Tensor:
        with Tape(plan, ledger):
            for place in range(STEPS):
                x = step(names[place % len(names)], tiny_step, x)
        return x

    named, alternating = ("kept",), ("dropped", "kept")
    forwards: dict[str, tuple[Fn, str]] = {
        NONE: (partial(in_turn, [tiny_step] * STEPS), NO_STATE),
        "ours: tape, outputs kept": (partial(on_tape, plan=output_kept, ledger=ledger, names=named), DEFAULTS),
        "ours: tape, every other output kept": (
            partial(on_tape, plan=every_other, ledger=ledger, names=alternating), DEFAULTS,
        ),
        "ours: tape, own streams only": (
            partial(on_tape, plan=output_kept, ledger=streams_only, names=named), STREAMS,
        ),
    }  # fmt: skip
    wrapped = {w.name: (partial(in_turn, [w.wrap(tiny_step)] * STEPS), w.random) for w in ways()}
    return _subject("step", STEPS, forwards | wrapped, [], torch.randn(4))


def layer_subjects(model: Model) -> list[Subject]:
    """The trainer's block, and a layer of plain PyTorch; each whole layer replayed."""
    stack = OurStack(model)
    blocks = {
        NONE: (partial(stack, plan=None), NO_STATE),
        "tape, policy none": (partial(stack, plan=stack.plan("none")), NO_STATE),
        "ours: tape, full, boundaries": (partial(stack, plan=stack.plan("full")), STREAMS),
        "ours: tape, full, layer-input": (partial(stack, plan=stack.plan("full, layer-input")), STREAMS),
    }
    return [
        _layers("layer of the trainer", stack.blocks, blocks, model),
        _layers("plain layer", plain_layers(stack, model, "none"), {}, model),
    ]


def _layers(name: str, layers: nn.ModuleList, forwards: dict[str, tuple[Fn, str]], model: Model) -> Subject:
    common: dict[str, tuple[Fn, str]] = {NONE: (partial(in_turn, layers), NO_STATE)}
    # By hand it cannot be done: the gradients of the parameters would come from a backward within the backward.
    able = [way for way in ways() if way.name != BY_HAND]
    wrapped = {w.name: (partial(in_turn, [w.wrap(layer) for layer in layers]), w.random) for w in able}
    x = torch.randn(model.seq, 1, model.hidden)
    return _subject(name, model.layers, common | forwards | wrapped, list(layers.parameters()), x)


def _subject(name: str, units: int, forwards: dict[str, tuple[Fn, str]], parameters: list[Any], x: Tensor) -> Subject:
    slope = torch.ones_like(x)
    trainings = {way: Training(forward, parameters, x, slope) for way, (forward, _) in forwards.items()}
    return Subject(name, units, trainings, {way: random for way, (_, random) in forwards.items()})


def check(subject: Subject) -> None:
    """Every way gives the gradients of none.  Raises RuntimeError if one does not."""
    expected: list[Tensor] | None = None
    for way, training in subject.trainings.items():
        training.zero_gradients()
        training.step()
        assert training.x.grad is not None
        found = [training.x.grad, *(p.grad for p in training.parameters if p.grad is not None)]
        if expected is None:
            expected = [tensor.clone() for tensor in found]
        if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
            raise RuntimeError(f"{subject.name}: {way} changes the gradients")


def _forward_only(training: Training, times: int) -> None:
    for _ in range(times):
        training.forward(training.x)


def median_difference(a: Sequence[float], b: Sequence[float]) -> float:
    """Median over rounds of a - b."""
    return statistics.median(x - y for x, y in zip(a, b, strict=True))


def measure(subject: Subject, effort: Effort) -> dict[str, Any]:
    """Microseconds by way; see the head of the file."""
    check(subject)
    plain = subject.trainings[NONE]
    works: list[Callable[[], None]] = [partial(_forward_only, plain, effort.repeats)]
    works += [partial(training.repeat, effort.repeats) for training in subject.trainings.values()]
    forward, *runs = in_turns(works, effort.rounds)
    by_way: dict[str, Runs] = dict(zip(subject.trainings, runs, strict=True))
    each = 1e6 / (effort.repeats * subject.units)
    none_us = statistics.median(by_way[NONE].cpu) * each
    operations = statistics.median(forward.cpu) * each
    added = {way: median_difference(got.cpu, by_way[NONE].cpu) * each for way, got in by_way.items() if way != NONE}
    against = added[NON_REENTRANT]
    rows = {
        way: {"random": subject.random[way], "added_us": us, "engine_us": us - operations, "of_torch": us / against}
        for way, us in added.items()
    }
    return {"units": subject.units, "none_us": none_us, "forward_us": operations, "ways": rows}


def rows_of(measured: dict[str, Any]) -> list[list[str]]:
    """Cells for a table: way, random state restored, added, engine, of torch's non-reentrant."""
    return [
        [
            way, row["random"], f"{row['added_us']:+.0f}", f"{row['engine_us']:+.0f}",
            f"{row['of_torch']:.2f}",
        ]
        for way, row in measured["ways"].items()
    ]  # fmt: skip
