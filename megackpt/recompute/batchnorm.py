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
    if type(fn) is FunctionType and fn.__closure__ is None:
        return []
    found: dict[int, _NormBase] = {}
    work = list(modules_called(fn))
    while work:
        module = work.pop()
        if isinstance(module, _NormBase) and module.training and module.track_running_stats:
            found[id(module)] = module
        work += [child for child in module._modules.values() if child is not None]
    return list(found.values())


class Statistics:
    """The statistics of some modules at one moment."""

    __slots__ = ("_saved",)

    def __init__(self, norms: list[_NormBase]) -> None:
        self._saved: list[tuple[Tensor, Tensor]] = []
        for norm in norms:
            for name in _STATISTICS:
                tensor = getattr(norm, name, None)
                if tensor is not None:
                    self._saved.append((tensor.data, tensor.data.clone()))

    def restore(self) -> None:
        """Put them back.  Through ``.data``: they are state, not values of the graph, and keep their version."""
        for tensor, saved in self._saved:
            tensor.copy_(saved)
