"""Running statistics that a replay must leave alone.

BatchNorm in training mode writes running mean, variance and a counter in its forward; a replay would write them a
second time.  What it returns does not depend on them, so it is enough to put them back after the replay.  The modules
are looked for in what the step calls: a module, a bound method, a partial, a closure, and lists or dicts in those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase

from megackpt.recompute.span import Span

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_DEPTH = 6  # of partials in closures in partials


def modules_called(fn: Any, depth: int = _DEPTH) -> Iterator[Module]:
    """The modules that ``fn`` can reach without a global name, outermost ones only."""
    if isinstance(fn, Module):
        yield fn
    elif depth == 0:
        return
    elif type(fn) is MethodType:
        owner = fn.__self__
        yield from modules_called(owner if isinstance(owner, Module) else getattr(owner, "__dict__", None), depth - 1)
    elif type(fn) is FunctionType:
        for cell in fn.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # a name that has no value yet
                continue
            yield from modules_called(content, depth - 1)
    elif isinstance(fn, partial):
        yield from modules_called(fn.func, depth - 1)
        for value in (*fn.args, *fn.keywords.values()):
            yield from modules_called(value, depth - 1)
    elif isinstance(fn, (list, tuple)):
        for value in fn:
            yield from modules_called(value, depth - 1)
    elif isinstance(fn, dict):
        for value in fn.values():
            yield from modules_called(value, depth - 1)
    elif callable(fn) and hasattr(fn, "__dict__"):
        for value in vars(fn).values():
            yield from modules_called(value, depth - 1)


def training_norms(fn: Callable[..., Any]) -> list[_NormBase]:
    """Normalisation modules among those ``fn`` calls that would update statistics now."""
    found: list[_NormBase] = []
    walked: list[Module] = []
    if type(fn) is Span and fn.pure:
        return found
    for function in fn.functions() if type(fn) is Span else (fn,):
        kind = type(function)
        if kind is FunctionType and function.__closure__ is None:
            continue
        owner: Any = getattr(function, "__self__", None) if kind is MethodType else function
        for module in (owner,) if isinstance(owner, Module) else modules_called(function):
            if module not in walked:
                walked.append(module)
                _collect(module, found)
    return found


def _collect(module: Module, found: list[_NormBase]) -> None:
    """A plain walk: it stands in every replay of a step that has modules, and ``modules()`` costs ten times as much."""
    if isinstance(module, _NormBase):
        if module.training and module.track_running_stats and module not in found:
            found.append(module)
    elif module._modules:
        for child in module._modules.values():
            if child is not None:
                _collect(child, found)


def statistics_of(norms: list[_NormBase]) -> list[Tensor]:
    """The buffers that a forward in training mode writes."""
    tensors = [getattr(norm, name, None) for norm in norms for name in _STATISTICS]
    return [tensor for tensor in tensors if tensor is not None]


class Statistics:
    """The statistics of some modules at one moment."""

    __slots__ = ("_saved",)

    def __init__(self, norms: list[_NormBase]) -> None:
        self._saved = [(tensor.data, tensor.data.clone()) for tensor in statistics_of(norms)]

    def restore(self) -> None:
        """Put them back.  Through ``.data``: they are state, not values of the graph, and keep their version."""
        for tensor, saved in self._saved:
            tensor.copy_(saved)
