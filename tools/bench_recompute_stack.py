"""A small stack of transformer layers under every policy: time, FLOPs, bytes; ours against torch's recompute.

Ours are the trainer's blocks on a tape.  Torch's are plain layers (`bench_plain.py`) with `torch.utils.checkpoint`
around each layer (full), around core attention (selective), or with contexts that save every product and replay the
rest (the like of our free tier).  Both have the same weights and must give the same loss and input gradient.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megackpt.observe.memory_tracker import MemoryTracker
from tools.bench_common import Runs, alive_after, in_turns, median_ratio, saved_tensors
from tools.bench_plain import Model
from tools.bench_regions import NON_REENTRANT, REENTRANT, REMAT, SELECTIVE, ways
from tools.bench_stacks import PLANS, Fn, OurStack, Training, flops_of, in_turn, plain_layers

MIB = 1 << 20
TOLERANCE = 1e-4
OURS, TORCH = "ours", "torch"


@dataclass(frozen=True)
class Job:
    """What is run, and how often."""

    model: Model
    micro_batch: int = 2
    rounds: int = 9


@dataclass
class Contender:
    """One side under one policy.  ``policy`` is ours that it is the like of."""

    side: str
    policy: str
    training: Training


@dataclass
class Measured:
    runs: Runs
    flops: int
    saved_bytes: int
    """storages that autograd is seen to save, parameters excluded"""
    alive_bytes: int
    """allocated during the forward and alive at its end, whoever holds them (the loss among them)"""
    peak_bytes: int
    """most alive at once of what one forward and backward allocate; gradients exist before"""
    loss: float


def contenders(job: Job) -> dict[str, Contender]:
    """By name, "ours none" first."""
    model, b = job.model, job.micro_batch
    x = torch.randn(model.seq, b, model.hidden, generator=torch.Generator().manual_seed(1))
    slope = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)) / x.numel()
    stack = OurStack(model)
    parameters = list(stack.blocks.parameters())
    found = {
        f"{OURS} {policy}": Contender(
            OURS, policy, Training(partial(stack, plan=stack.plan(policy)), parameters, x, slope)
        )
        for policy in PLANS
    }
    no_tape = Training(partial(stack, plan=None), parameters, x, slope)
    found[f"{OURS}, no tape"] = Contender(OURS, "none", no_tape)
    batch_first = (x.transpose(0, 1).contiguous(), slope.transpose(0, 1).contiguous())
    for name, (policy, layers, forward) in _torchs(stack, model).items():
        found[name] = Contender(TORCH, policy, Training(forward, list(layers.parameters()), *batch_first))
    return found


def _torchs(stack: OurStack, model: Model) -> dict[str, tuple[str, nn.ModuleList, Fn]]:
    """Torch's side: name -> our policy it is the like of, layers, forward."""
    layers = plain_layers(stack, model, "none")
    core = plain_layers(stack, model, "selective")
    by_name = {way.name: way for way in ways()}

    def wrapped(way: str) -> Fn:
        return partial(in_turn, [by_name[way].wrap(layer) for layer in layers])

    found: dict[str, tuple[str, nn.ModuleList, Fn]] = {
        "torch none": ("none", layers, partial(in_turn, layers)),
        "torch selective contexts (products saved)": ("free", layers, wrapped(SELECTIVE)),
        "torch checkpoint of core attention": ("selective", core, partial(in_turn, core)),
        "torch checkpoint of layers, non-reentrant": ("full, layer-input", layers, wrapped(NON_REENTRANT)),
        "torch checkpoint of layers, reentrant": ("full, layer-input", layers, wrapped(REENTRANT)),
        "plain layers in our checkpoint": ("full, layer-input", layers, wrapped("ours: checkpoint")),
    }
    if REMAT in by_name:
        found["torch_remat of layers"] = ("full, layer-input", layers, wrapped(REMAT))
    return found


def _bytes(training: Training) -> tuple[int, int, int]:
    """Saved, alive after the forward, live peak of forward and backward."""
    with saved_tensors() as sizes:
        held = training.loss()
    del held
    before = {tensor.untyped_storage()._cdata for tensor in (training.x, training.slope)}  # so in none of the counts
    saved = sum(size for key, size in sizes.items() if key not in before)
    alive = alive_after(training.loss)
    gc.collect()
    with MemoryTracker() as tracker:
        training.loss().backward()
    return saved, alive, tracker.peak_bytes


def measure(job: Job) -> dict[str, Measured]:
    """All contenders in turns.  Raises RuntimeError when two of them do not compute the same."""
    found = contenders(job)
    losses, gradients = {}, {}
    for name, contender in found.items():
        contender.training.zero_gradients()
        losses[name] = contender.training.step()
        assert contender.training.x.grad is not None
        gradient = contender.training.x.grad
        gradients[name] = (gradient.transpose(0, 1) if contender.side == TORCH else gradient).clone()
    _check(losses, gradients)
    counted = {name: (flops_of(c.training.step), *_bytes(c.training)) for name, c in found.items()}
    runs = in_turns([partial(c.training.repeat, 1) for c in found.values()], job.rounds)
    return {name: Measured(got, *counted[name], losses[name]) for name, got in zip(found, runs, strict=True)}


def _check(losses: dict[str, float], gradients: dict[str, Tensor]) -> None:
    first = next(iter(losses))
    for name, loss in losses.items():
        distance = float((gradients[name] - gradients[first]).norm() / gradients[first].norm())
        if abs(loss - losses[first]) > TOLERANCE * abs(losses[first]) or distance > TOLERANCE:
            raise RuntimeError(
                f"not one model: {name} loss {loss}, {first} {losses[first]}; input gradients {distance:.1e} apart"
            )


HEADER = (
    "policy, side", "step ms", "time / none", "CPU ms", "CPU / none", "FLOPs / none", "saved MiB", "alive MiB",
    "live peak MiB",
)  # fmt: skip


def rows_of(measured: dict[str, Measured]) -> list[list[str]]:
    """Ratios are to "none" of the same side."""
    rows = []
    for name, got in measured.items():
        base = measured[f"{OURS} none" if name.startswith(OURS) else f"{TORCH} none"]
        rows.append([
            name, f"{statistics.median(got.runs.wall) * 1e3:.1f}", f"{median_ratio(got.runs.wall, base.runs.wall):.3f}",
            f"{statistics.median(got.runs.cpu) * 1e3:.1f}", f"{median_ratio(got.runs.cpu, base.runs.cpu):.3f}",
            f"{got.flops / base.flops:.4f}", f"{got.saved_bytes / MIB:.2f}", f"{got.alive_bytes / MIB:.2f}",
            f"{got.peak_bytes / MIB:.2f}",
        ])  # fmt: skip
    return rows


def to_json(measured: dict[str, Measured]) -> dict[str, Any]:
    return {name: asdict(got) for name, got in measured.items()}


def words(job: Job) -> str:
    m = job.model
    return (
        f"{m.layers} layers, hidden {m.hidden}, {m.heads} heads, sequence {m.seq}, micro-batch {job.micro_batch}, "
        f"fp32, {'fused' if m.fused else 'unfused'} attention"
    )


def jobs(model: Model, attentions: Sequence[str], micro_batch: int, rounds: int) -> dict[str, Job]:
    """One per kind of attention."""
    sizes = {name: value for name, value in asdict(model).items() if name != "fused"}
    return {kind: Job(Model(**sizes, fused=kind == "fused"), micro_batch, rounds) for kind in attentions}
