"""The profile of a run by tracing: the real model of one rank on fake tensors, in a fake world of any size.

Nothing is allocated, nothing is sent, no GPU is needed: a rank of thousands is looked at in a second.  Returned is the
planner's own type, so that closed forms (`plan/costs.py`) and model can be compared step by step.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter
from torch.testing._internal.distributed.fake_pg import FakeStore

from megackpt.config.run import RunConfig
from megackpt.mesh.device import DeviceSeam
from megackpt.mesh.layout import MeshShape
from megackpt.mesh.process_mesh import ProcessMesh
from megackpt.mesh.sink import GradientSink
from megackpt.model import build_chunk
from megackpt.observe.numbers import layout_numbers, model_numbers
from megackpt.plan.profile import KINDS, LayerProfile, Profile, StepCost, profile
from megackpt.plan.split import split_layers
from megackpt.precision.policy import Precision
from megackpt.recompute import RngLedger
from megackpt.recompute.stepwise import StepSeen, observe_steps, saved_outputs
from megackpt.tensor.context import TensorParallel

ADDRESSES = {"embedding": "embedding", "block": "layers.0", "head": "head"}
TRACED = (
    "reads", "output_bytes", "internal_bytes", "mask_bytes", "held_bytes", "saves_input", "output_is_internal",
    "output_is_saved", "flops", "backward_flops", "collective", "backward_collective", "collective_bytes",
)  # fmt: skip
"""Fields that tracing finds; the others of a traced profile are the closed form's."""


@dataclass(frozen=True)
class Difference:
    """A field of a step in which the closed form and the model disagree."""

    kind: str
    step: str
    field: str
    closed: object
    traced: object

    def __str__(self) -> str:
        return f"{self.kind} {self.step}: {self.field} {self.closed} in closed form, {self.traced} in the model"


def traced_profile(config: RunConfig, vocab: int, rank: int = 0) -> Profile:
    """The profile of `rank` with the kernels of a CPU.  `vocab`: before padding.

    Context parallelism changes no step, so a rank is traced with its whole sequence.  Raises RuntimeError when this
    process has a process group already.
    """
    closed = closed_profile(config, vocab, rank)
    with _fake_world(config, rank) as mesh:
        steps = _observe(config, vocab, mesh)
    layers = {kind: _layer(getattr(closed, kind), [s for s in steps if s.address == ADDRESSES[kind]]) for kind in KINDS}
    return Profile(**layers)


def closed_profile(config: RunConfig, vocab: int, rank: int = 0) -> Profile:
    """What the planner says of the same rank."""
    parallel = config.parallel
    pieces = [[layers] for layers in split_layers(config.model.num_layers, parallel.pipeline)]
    shape = MeshShape(tp=parallel.tensor, cp=parallel.context, dp=parallel.data, pp=parallel.pipeline)
    layout = replace(layout_numbers(config, pieces, "cpu"), tp_rank=shape.coordinates(rank).tp)
    return profile(model_numbers(config, vocab), layout)


def compare(config: RunConfig, vocab: int, rank: int) -> str:
    """In words, whether the model of `rank` does what the closed forms say, and where not."""
    traced = traced_profile(config, vocab, rank)
    found = differences(closed_profile(config, vocab, rank), traced)
    steps = sum(len(getattr(traced, kind).steps) for kind in KINDS)
    whose = f"the model of rank {rank}, traced on fake tensors with the kernels of a CPU"
    if not found:
        return (
            f"Traced: {whose}, agrees with the closed forms: bytes of output, internals and masks, FLOPs and"
            f" collectives of all {steps} steps, forward and backward."
        )
    return "\n".join([f"Traced: {whose}, differs from the closed forms:", *(f"  {line}" for line in found)])


def differences(closed: Profile, traced: Profile) -> list[Difference]:
    """Where two profiles of one run are not equal, in the fields that tracing finds."""
    found = []
    for kind in KINDS:
        a: LayerProfile = getattr(closed, kind)
        b: LayerProfile = getattr(traced, kind)
        if a.names != b.names:
            found.append(Difference(kind, "steps", "names", a.names, b.names))
            continue
        for one, other in zip(a.steps, b.steps, strict=True):
            for name in TRACED:
                if getattr(one, name) != getattr(other, name):
                    found.append(Difference(kind, one.name, name, getattr(one, name), getattr(other, name)))
    return found


# -- the model -------------------------------------------------------------------------------------------------------


class _Consumed(GradientSink):
    """Makes every gradient and keeps none, as a buffer does that has room for all of them already."""

    def weight_gradient(self, weight: Parameter, grad_output: Tensor, input: Tensor) -> Tensor | None:
        grad_output.t() @ input
        return None

    def row_gradient(self, weight: Parameter, rows: Tensor, grad: Tensor) -> Tensor | None:
        super().row_gradient(weight, rows, grad)
        return None


@contextmanager
def _fake_world(config: RunConfig, rank: int) -> Iterator[ProcessMesh]:
    """The mesh that `rank` of the whole run would have; no other rank exists."""
    if dist.is_initialized():
        raise RuntimeError("a run cannot be traced in a process that belongs to one")
    store, parallel = FakeStore(), config.parallel
    dist.init_process_group("fake", store=store, rank=rank, world_size=parallel.world_size)
    try:
        yield ProcessMesh.create(parallel, DeviceSeam("cpu", torch.device("cpu"), "fake"))
    finally:
        dist.destroy_process_group()


def _observe(config: RunConfig, vocab: int, mesh: ProcessMesh) -> list[StepSeen]:
    """Embedding, one layer and head of this rank, step by step."""
    shape = (config.batch.micro_batch_size, config.model.seq_length)
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # as in mesh/rendezvous.py
        tp = TensorParallel.create(
            mesh,
            sequence_parallel=config.parallel.sequence_parallel,
            ledger=RngLedger(defaults=False),
            sink=_Consumed(),
            dtype=Precision.from_config(config.precision).params_dtype,
            device=torch.device("cpu"),
            seed=0,
        )
        tp = replace(tp, seed=None)
        chunk = build_chunk(config.model, tp, vocab, range(1), first=True, last=True)
        tokens, labels = torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.int64)
        return observe_steps(lambda: chunk(tokens, labels))


# -- the profile -----------------------------------------------------------------------------------------------------


def _layer(closed: LayerProfile, steps: Sequence[StepSeen]) -> LayerProfile:
    saved = saved_outputs(steps)
    made = [_cost(closed, step, step.name in saved) for step in steps if not _does_nothing(step)]
    return replace(closed, steps=tuple(made))


def _does_nothing(step: StepSeen) -> bool:
    """A dropout of probability zero returns what it is given."""
    return not (step.output_bytes or step.internal_bytes or step.mask_bytes)


def _cost(closed: LayerProfile, seen: StepSeen, saved: bool) -> StepCost:
    by_name = {step.name: step for step in closed.steps}
    names = {s.name for s in closed.steps} | {"input"}
    forward, backward = seen.forward, seen.backward
    return replace(
        by_name.get(seen.name, StepCost(seen.name)),
        reads=tuple(name if name in names else "input" for name in seen.reads),
        output_bytes=seen.output_bytes,
        internal_bytes=seen.internal_bytes,
        mask_bytes=seen.mask_bytes,
        held_bytes=seen.held_bytes,
        saves_input=seen.reads[0] in seen.saves,
        output_is_internal=seen.saves_output,
        output_is_saved=saved,
        flops=forward.flops,
        backward_flops=backward.flops,
        collective=forward.collectives[0] if forward.collectives else None,
        backward_collective=backward.collectives[0] if backward.collectives else None,
        collective_bytes=max(forward.collective_bytes, backward.collective_bytes),
    )
