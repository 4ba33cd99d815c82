"""What each named step does, seen from outside: bytes it makes and saves, operations, products, collectives.

A forward runs under a tape whose observer takes every step in the model's place: it runs the step forward and
backward by itself, on detached arguments, under saved-tensor hooks and a dispatch mode, and hands the result on.  So
what a step's backward does is its own by construction.  Works on real tensors and on fake ones (no memory, no time),
with any process group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from megackpt.plan import ChunkPlan
from megackpt.recompute import nested
from megackpt.recompute.call import tensors_of
from megackpt.recompute.handle import is_mask, is_parameter, storage_key
from megackpt.recompute.tape import Tape

INPUT = "input"

# c10d's operations, what a plan calls them, and which of their arguments holds the whole tensor.
_COLLECTIVES = {
    "allreduce_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
}

# A causal kernel leaves the masked half out; its backward makes the scores again: five products for two.
_CAUSAL = {"_scaled_dot_product_flash_attention_for_cpu": 2, "_scaled_dot_product_flash_attention_for_cpu_backward": 5}


@dataclass
class Work:
    """What ran in one direction of a step."""

    flops: int = 0
    operations: int = 0  # calls of the dispatcher, views included, collectives not
    collectives: list[str] = field(default_factory=list)
    collective_bytes: int = 0  # of the whole tensors, on any rank

    def __iadd__(self, other: Work) -> Work:
        self.flops += other.flops
        self.operations += other.operations
        self.collectives += other.collectives
        self.collective_bytes += other.collective_bytes
        return self


@dataclass
class StepSeen:
    """One step.  A step that is called for one part after another is one, with the internals of its largest part."""

    address: str
    name: str
    reads: tuple[str, ...]  # steps whose outputs it takes, or "input"; what needs no gradient is no reading
    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)
    output_bytes: int = 0
    internal_bytes: int = 0  # saved inside, masks apart; its own output included if it saves that
    mask_bytes: int = 0
    held: dict[int, int] = field(default_factory=dict)  # indices and the like that it saves: bytes by storage
    saves: set[str] = field(default_factory=set)  # of what it reads
    saves_output: bool = False

    @property
    def held_bytes(self) -> int:
        return sum(self.held.values())


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.work = Work()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if func.namespace == "c10d":
            if name in _COLLECTIVES:
                kind, place = _COLLECTIVES[name]
                self.work.collectives.append(kind)
                tensors = [leaf for leaf in pytree.tree_leaves(args[place]) if isinstance(leaf, Tensor)]
                self.work.collective_bytes += sum(t.numel() * t.element_size() for t in tensors)
            return result
        self.work.operations += 1
        if name in _CAUSAL:
            query = args[1] if name.endswith("backward") else args[0]
            self.work.flops += _CAUSAL[name] * query.numel() * args[1].shape[-2]
        elif (formula := flop_registry.get(func._overloadpacket)) is not None:
            self.work.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result


class StepObserver:
    """Takes every step in its place; ``seen`` is what they did, in the order of their first call."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, str], StepSeen] = {}
        self._makers: dict[int, str] = {}  # of storages: the step that made it
        self._alive: list[Tensor] = []  # so that no storage's identity is used twice

    def __call__(
        self, address: str, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        leaves, spec = nested.flatten((args, dict(kwargs)))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        reads = [self._makers.get(storage_key(t), INPUT) for t in given if t.requires_grad]
        step = self.seen.setdefault((address, name), StepSeen(address, name, tuple(reads) or (INPUT,)))
        fresh = [
            leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf for leaf in leaves
        ]
        args, kwargs = nested.unflatten(fresh, spec)
        saved: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, _same), _Counter() as forward:
            result = fn(*args, **kwargs)
        outputs = tensors_of(result)
        self._note_bytes(step, given, saved, outputs)
        differentiable = [t for t in outputs if t.requires_grad]
        gradients = [torch.ones_like(t) for t in differentiable]
        if differentiable:
            with _Counter() as backward:
                torch.autograd.backward(differentiable, gradients)
            step.backward += backward.work
        step.forward += forward.work
        out, spec = nested.flatten(result)
        out = [t.detach().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t for t in out]
        for tensor in out:
            if isinstance(tensor, Tensor):
                self._makers.setdefault(storage_key(tensor), name)
                self._alive.append(tensor)
        return nested.unflatten(out, spec)

    def _note_bytes(self, step: StepSeen, given: list[Tensor], saved: list[Tensor], outputs: list[Tensor]) -> None:
        arguments = {storage_key(t): t for t in given}
        made = {storage_key(t): _bytes(t) for t in outputs if storage_key(t) not in arguments}
        step.output_bytes += sum(made.values())
        internals, masks = {}, {}
        for tensor in saved:
            key = storage_key(tensor)
            if is_parameter(tensor):
                continue
            if key in arguments and arguments[key].requires_grad:
                step.saves.add(self._makers.get(key, INPUT))
            elif key in arguments:
                step.held[key] = _bytes(tensor)
            elif is_mask(tensor):
                masks[key] = _bytes(tensor)
            elif not (tensor.is_floating_point() or tensor.is_complex()):
                step.held[key] = _bytes(tensor)  # such an argument, laid out otherwise
            else:
                internals[key] = _bytes(tensor)
                step.saves_output = step.saves_output or key in made
        step.internal_bytes = max(step.internal_bytes, sum(internals.values()))
        step.mask_bytes = max(step.mask_bytes, sum(masks.values()))
        self._alive += [*given, *saved]


def observe_steps(forward: Callable[[], Any]) -> list[StepSeen]:
    """Run ``forward`` and say what each of its named steps did.  Gradients end in the parameters, as in a step."""
    observer = StepObserver()
    with Tape(ChunkPlan(), observer=observer):
        forward()
    return list(observer.seen.values())


def saved_outputs(steps: Iterable[StepSeen]) -> set[str]:
    """Steps of one layer whose output the backward of one of them needs."""
    steps = list(steps)
    return {name for step in steps for name in step.saves} | {step.name for step in steps if step.saves_output}


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else 0


def _same(tensor: Tensor) -> Tensor:
    return tensor
