"""Measure modules: the bytes they keep and need, the operations they execute, the seconds they take.

A module is run alone, forward and backward, on a sample.  What a plan must know of it cannot be read off its output:

* what its backward keeps, by saved-tensor hooks, each storage once, parameters and the input apart;
* what is alive beside that while it runs (meter.py): without keeping anything, keeping everything, and in backward;
* where its last saved tensor is made, since a replay may end there.

Three runs: one that keeps and goes backward, one that keeps nothing, one undisturbed for the clock.  Random states,
gradients and buffers are put back; what else a module does when it runs, it does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from megackpt.plan.chains import Chain, Stage
from megackpt.recompute import nested
from megackpt.recompute.batchnorm import modules_called
from megackpt.recompute.handle import is_parameter
from megackpt.recompute.meter import Meter, meter_for, storages
from megackpt.recompute.rng import RngLedger

Layer = Callable[..., Any]

FLOPS_PER_BYTE = 10.0
"""What one byte moved costs in FLOPs, where work must be one number: between a CPU's few and a GPU's hundreds."""


@dataclass(frozen=True)
class ModuleProfile:
    """One module on one sample.  Bytes are of storages; transients are beyond what is named."""

    name: str
    input_bytes: int
    output_bytes: int
    saved_bytes: int  # kept for its backward, its input and output apart
    reads_output: bool  # its backward reads the output
    reads_input: bool
    gradient_bytes: int  # of the output
    input_gradient_bytes: int
    forward_transient: int  # beyond input and output, keeping nothing
    tape_transient: int  # beyond input, output and what is saved
    backward_transient: int  # beyond what is kept and both gradients; negative where parts die early
    parameter_bytes: int
    forward_flops: int
    spared_flops: int  # of them, after its last saved tensor
    backward_flops: int
    forward_moved: int  # bytes read and written; 0 on a GPU
    spared_moved: int
    backward_moved: int
    forward_seconds: float
    backward_seconds: float

    @property
    def tape_bytes(self) -> int:
        """What keeping everything inside costs, the output included."""
        return self.saved_bytes + self.output_bytes

    def stage(self, by: str = "work") -> Stage:
        """The numbers of a chain planner.  ``by``: cost in "work" (FLOPs, and bytes moved at FLOPS_PER_BYTE: the same
        on every rank and every day) or in "seconds"."""
        if by == "seconds":
            share = self.spared_flops / self.forward_flops if self.forward_flops else 0.0
            forward, spared, backward = self.forward_seconds, share * self.forward_seconds, self.backward_seconds
        elif by == "work":
            forward = self.forward_flops + FLOPS_PER_BYTE * self.forward_moved
            spared = self.spared_flops + FLOPS_PER_BYTE * self.spared_moved
            backward = self.backward_flops + FLOPS_PER_BYTE * self.backward_moved
        else:
            raise ValueError(f'by is "work" or "seconds", not {by!r}')
        return Stage(
            self.output_bytes, self.tape_bytes, forward, backward, min(spared, forward), self.gradient_bytes,
            self.reads_output, self.forward_transient, self.tape_transient, self.backward_transient,
        )  # fmt: skip


@dataclass(frozen=True)
class Profile:
    """Modules in order; JSON in and out; prints as a table."""

    modules: tuple[ModuleProfile, ...]

    def chain(self, by: str = "work") -> Chain:
        """As a chain, each module reading the one before it."""
        first = self.modules[0]
        return Chain(tuple(m.stage(by) for m in self.modules), first.input_bytes, first.input_gradient_bytes)

    def to_json(self) -> dict[str, object]:
        return {"version": 1, "modules": [asdict(m) for m in self.modules]}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Profile:
        if data.get("version") != 1:
            raise ValueError(f"profile version {data.get('version')!r}; this code reads version 1")
        return Profile(tuple(ModuleProfile(**m) for m in data["modules"]))

    def dumps(self) -> str:
        return json.dumps(self.to_json(), indent=1)

    def __str__(self) -> str:
        head = ("module", "output", "saved", "forward FLOPs", "backward FLOPs", "forward ms", "backward ms")
        lines = [head] + [
            (m.name, f"{m.output_bytes:,}", f"{m.saved_bytes:,}", f"{m.forward_flops:,}", f"{m.backward_flops:,}",
             f"{m.forward_seconds * 1e3:.2f}", f"{m.backward_seconds * 1e3:.2f}")
            for m in self.modules
        ]  # fmt: skip
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        return "\n".join("  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines)


def measure(modules: Layer | Sequence[Layer], sample: Any) -> Profile:
    """Profile of one module, or of several that feed each other.

    ``sample``: the (first) module's argument; a tuple is several.  Its tensors get gradients where they require them.
    ``modules`` may be an ``nn.Sequential`` or a list, whose members are measured one by one, or anything callable.
    """
    members: list[Layer] = [modules] if _is_one(modules) else list(modules)  # type: ignore[arg-type, list-item]
    args = sample if isinstance(sample, tuple) else (sample,)
    profiles = []
    for place, module in enumerate(members):
        profile, output = _measure(f"{place} {_name(module)}", module, args, last=place == len(members) - 1)
        profiles.append(profile)
        args = (output,)
    return Profile(tuple(profiles))


def _is_one(modules: object) -> bool:
    return not isinstance(modules, (list, tuple, nn.Sequential, nn.ModuleList))


def _name(module: Layer) -> str:
    return getattr(module, "__name__", type(module).__name__)


def _measure(name: str, module: Layer, args: tuple[Any, ...], last: bool) -> tuple[ModuleProfile, Any]:
    with _Undisturbed(module), torch.enable_grad():
        kept = _Run(module, args).keeping()
    with _Undisturbed(module), torch.enable_grad():
        seconds = _Run(module, args).timed()
    with _Undisturbed(module), torch.enable_grad():
        transient, output = _Run(module, args).dropping()
    parameters = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in _parameters(module)}
    profile = ModuleProfile(
        name=name, forward_transient=transient, parameter_bytes=sum(parameters.values()),
        forward_seconds=seconds[0], backward_seconds=seconds[1], **kept,
    )  # fmt: skip
    return profile, None if last else output


class _Run:
    """One run of a module on copies of its arguments that are leaves."""

    def __init__(self, module: Layer, args: tuple[Any, ...]) -> None:
        self.module = module
        leaves, spec = nested.flatten(args)
        self.inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.given = {t.untyped_storage()._cdata for t in self.inputs}
        fresh = [
            _Sink.apply(leaf.detach().requires_grad_()) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf
            for leaf in leaves
        ]
        self.args = nested.unflatten(fresh, spec)

    def dropping(self) -> tuple[int, Any]:
        """Bytes beyond input and output when nothing is kept; and the output, without history."""
        with meter_for(self.inputs) as meter, torch.autograd.graph.saved_tensors_hooks(_drop, _no_backward):
            result = self.module(*self.args)
            made = {s._cdata: s.nbytes() for s in storages(nested.flatten(result)[0])}
            beyond = meter.peak() - sum(nbytes for key, nbytes in made.items() if key not in self.given)
            leaves, spec = nested.flatten(result)
            detached = [t.detach().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t for t in leaves]
        return max(beyond, 0), nested.unflatten(detached, spec)

    def timed(self) -> tuple[float, float]:
        start = self._clock()
        result = self.module(*self.args)
        middle = self._clock()
        loss = _loss(result)
        del result
        if loss is not None:
            loss.backward()
        return middle - start, self._clock() - middle

    def _clock(self) -> float:
        if any(t.device.type == "cuda" for t in self.inputs):
            torch.cuda.synchronize()
        return time.perf_counter()

    def keeping(self) -> dict[str, Any]:
        """Forward and backward, as without recompute."""
        saved: set[int] = set()
        with meter_for(self.inputs) as meter, FlopCounterMode(display=False) as counter:
            marks = [_Work()]

            def pack(tensor: Tensor) -> Tensor:
                saved.add(tensor.untyped_storage()._cdata)
                if not is_parameter(tensor) and tensor.untyped_storage()._cdata not in self.given:
                    marks[0] = _Work.now(counter, meter)
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, _same):
                result = self.module(*self.args)
            forward = _Work.now(counter, meter)
            outputs = {s._cdata: s.nbytes() for s in storages(nested.flatten(result)[0])}
            fresh = sum(nbytes for key, nbytes in outputs.items() if key not in self.given)
            live, tape_peak = meter.live(), meter.peak()
            reads_output = any(key in saved for key in outputs)
            into = sum(t.numel() * t.element_size() for t in self.inputs if t.requires_grad)
            out = sum(t.numel() * t.element_size() for t in _differentiable(result))
            loss = _loss(result)
            del result
            meter.reset()
            if loss is not None:
                loss.backward()
            expected = live - (0 if reads_output else fresh) + into + out
            if loss is not None:
                expected += 2 * loss.element_size()  # itself and its gradient
            both = _Work.now(counter, meter)
        return {
            "input_bytes": sum({s._cdata: s.nbytes() for s in storages(self.inputs)}.values()),
            "output_bytes": sum(outputs.values()), "saved_bytes": live - fresh, "reads_output": reads_output,
            "reads_input": not saved.isdisjoint(self.given), "gradient_bytes": out, "input_gradient_bytes": into,
            "tape_transient": tape_peak - live, "backward_transient": meter.peak() - expected,
            "forward_flops": forward.flops, "spared_flops": forward.flops - marks[0].flops,
            "backward_flops": both.flops - forward.flops, "forward_moved": forward.moved,
            "spared_moved": forward.moved - marks[0].moved, "backward_moved": both.moved - forward.moved,
        }  # fmt: skip


@dataclass(frozen=True)
class _Work:
    """What was done so far."""

    flops: int = 0
    moved: int = 0

    @staticmethod
    def now(counter: FlopCounterMode, meter: Meter) -> _Work:
        return _Work(counter.get_total_flops(), meter.moved)


class _Sink(torch.autograd.Function):
    """The end of a measured backward: takes the input's gradient and lets it go, as the module before would."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:  # type: ignore[override]
        return None


class _Source(torch.autograd.Function):
    """The start of it: makes the gradients of the outputs inside the engine, which frees them as it would others."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        ctx.metas = [(t.shape, t.dtype, t.device) for t in outputs]
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(torch.full(s, 1e-3, dtype=t, device=d) for s, t, d in ctx.metas)


def _differentiable(result: Any) -> list[Tensor]:
    return [t for t in nested.flatten(result)[0] if isinstance(t, Tensor) and t.requires_grad]


def _loss(result: Any) -> Tensor | None:
    outputs = _differentiable(result)
    return _Source.apply(*outputs) if outputs else None


class _Undisturbed:
    """Puts back what running a module changes: random states, buffers, and gradients, which are let go as they come,
    so that they count as what they are in a training step: temporary, before they are added to the ones that stay."""

    def __init__(self, module: Layer) -> None:
        self._modules = list(modules_called(module))
        self._ledger = RngLedger()

    def __enter__(self) -> None:
        self._random = self._ledger.snapshot()
        self._buffers = [(b, b.detach().clone()) for m in self._modules for b in m.buffers()]
        self._gradients = [(p, p.grad) for m in self._modules for p in m.parameters()]
        self._hooks = []
        for parameter, _ in self._gradients:
            parameter.grad = None
            if parameter.requires_grad:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(_let_go))

    def __exit__(self, *failure: object) -> None:
        for hook in self._hooks:
            hook.remove()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for buffer, before in self._buffers:
            buffer.data.copy_(before)
        self._ledger.restore(self._random)


def _let_go(parameter: Tensor) -> None:
    parameter.grad = None


def _parameters(module: Layer) -> list[nn.Parameter]:
    return [p for m in modules_called(module) for p in m.parameters()]


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _drop(tensor: Tensor) -> None:
    return None


def _no_backward(_: None) -> Tensor:
    raise RuntimeError("nothing was kept of this run: it has no backward")
