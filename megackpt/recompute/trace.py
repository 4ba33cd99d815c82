"""What a function did: every operation with digests of what it read and wrote.  For verify mode and debug messages.

Digests, not values: a trace holds no tensor, so it changes no lifetime.  It costs a pass over every operand.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from megackpt.recompute import nested
from megackpt.recompute.batchnorm import modules_called

# Not what the user's code computes: views and comparisons of the engine, casts that autocast's cache may skip, and
# memory that nobody has written yet.
_SILENT = (
    "aten.detach", "aten.alias", "aten.set_", "aten.equal", "aten._to_copy", "aten.empty", "aten.new_empty",
    "prim.device",
)  # fmt: skip
_ENGINE = ("aten.detach", "aten.alias", "prim.device")


def digest(tensor: Tensor) -> bytes:
    """16 bytes that are equal for equal bits (of the local part, where a tensor is distributed)."""
    with _disable_current_modes(), torch.no_grad():
        if hasattr(tensor, "to_local"):
            tensor = tensor.to_local()
        data = tensor.detach()
        if data.layout != torch.strided or data.device.type == "meta":
            return repr((data.shape, data.dtype)).encode()
        if data.is_complex():
            data = torch.view_as_real(data.resolve_conj())
        data = data.resolve_neg().cpu().reshape(-1)
        if data.stride() != (1,):  # a single element counts as contiguous whatever its stride
            data = data.clone(memory_format=torch.contiguous_format)
        data = data.view(torch.uint8)
        return hashlib.blake2b(data.numpy(), digest_size=16).digest()  # type: ignore[arg-type]


@dataclass(frozen=True)
class Operation:
    """One operation as it ran."""

    name: str
    reads: tuple[bytes, ...]
    outside: tuple[str | None, ...]  # for each tensor read that the function did not make: what it is
    scalars: str
    writes: tuple[bytes, ...]
    dtypes: tuple[torch.dtype, ...]
    random: bytes | None  # state of the generator before a random operation
    source: str  # which generator


class Trace(TorchDispatchMode):
    """Collects the operations of a ``with`` block.  ``names`` says what storages from outside are."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self._names = names
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        if name.startswith(_SILENT):
            result = func(*args, **kwargs)
            self._note(result, args)
            return result
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        reads = tuple(digest(t) for t in tensors)
        outside = tuple(self.describe(t) for t in tensors)
        scalars = repr([leaf for leaf in leaves if not isinstance(leaf, (Tensor, torch.Generator))])
        random, source = None, ""
        if torch.Tag.nondeterministic_seeded in func.tags:
            random, source = _generator_state(leaves, tensors)
        result = func(*args, **kwargs)
        written = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        self._made.update(t.untyped_storage()._cdata for t in written if _has_storage(t))
        self.operations.append(
            Operation(
                name, reads, outside, scalars, tuple(digest(t) for t in written), tuple(t.dtype for t in written),
                random, source,
            )
        )  # fmt: skip
        return result

    def _note(self, result: Any, args: Any) -> None:
        """A silent operation's result is from outside if its operand is."""
        if isinstance(result, Tensor) and _has_storage(result):
            operand = args[0] if args and isinstance(args[0], Tensor) else None
            if operand is None or self.describe(operand) is None:
                self._made.add(result.untyped_storage()._cdata)

    def describe(self, tensor: Tensor) -> str | None:
        """What a tensor is that the function did not make; None for one that it made."""
        if not _has_storage(tensor):
            return None
        storage = tensor.untyped_storage()._cdata
        if storage in self._made:
            return None
        return self._names.get(storage, f"a tensor of shape {tuple(tensor.shape)} from outside")


def names_of(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int, str]:
    """Storages that ``fn`` can reach, and what to call them: arguments, parameters, buffers, captured tensors."""
    names: dict[int, str] = {}

    def note(tensor: Any, name: str) -> None:
        if isinstance(tensor, Tensor) and _has_storage(tensor):
            names.setdefault(tensor.untyped_storage()._cdata, name)

    for module in modules_called(fn):
        for name, parameter in module.named_parameters():
            note(parameter, f"parameter {name}")
        for name, buffer in module.named_buffers():
            note(buffer, f"buffer {name}")
    for name, value in captured(fn):
        note(value, f"captured tensor {name}")
    for place, leaf in enumerate(nested.flatten((tuple(args), dict(kwargs)))[0]):
        note(leaf, f"argument {place}")
    return names


def captured(fn: Any) -> list[tuple[str, Any]]:
    """Names and values that a function reads without being given them: its closure, and globals it mentions."""
    if isinstance(fn, partial):
        inner = [(f"{k} of a partial", v) for k, v in fn.keywords.items()]
        return inner + [(f"{i} of a partial", v) for i, v in enumerate(fn.args)] + captured(fn.func)
    if isinstance(fn, MethodType):
        return [(f"self.{k}", v) for k, v in vars(fn.__self__).items()] if hasattr(fn.__self__, "__dict__") else []
    if not isinstance(fn, FunctionType):
        return []
    found = [(name, fn.__globals__[name]) for name in fn.__code__.co_names if name in fn.__globals__]
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            found.append((name, cell.cell_contents))
        except ValueError:  # a name that has no value yet
            continue
    return found


def _generator_state(leaves: Sequence[Any], tensors: Sequence[Tensor]) -> tuple[bytes, str]:
    generator = next((leaf for leaf in leaves if isinstance(leaf, torch.Generator)), None)
    if generator is not None:
        return digest(generator.get_state()), "a generator given to it"
    if any(t.device.type == "cuda" for t in tensors):
        return digest(torch.cuda.get_rng_state()), "torch's default CUDA generator"
    return digest(torch.default_generator.get_state()), "torch's default generator"


def _has_storage(tensor: Tensor) -> bool:
    try:
        tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse and wrapper tensors have none of their own
        return False
    return True


class Names(TorchDispatchMode):
    """Only the operations, as words: ``aten.mm.default(f32[4, 8], f32[8, 2]) -> f32[4, 2]``."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines = lines

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not str(func).startswith(_ENGINE):
            operands = ", ".join(_short(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if leaf is not None)
            made = ", ".join(_short(leaf) for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor))
            self.lines.append(f"{func}({operands}) -> {made}")
        return result


def _short(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
