"""Running statistics that a replay must leave alone.

BatchNorm in training mode writes running mean, variance and a counter in its forward; a replay would write them a
second time.  What it returns does not depend on them, so it is enough to put them back after the replay.  The modules
are looked for in what the step calls and is given: a module, a bound method, a partial, a function's closure, defaults
and the globals it names, and lists, dicts, dataclasses or namespaces in those.  Statistics that belong to no module
(``F.batch_norm`` on loose tensors) are not found: guard those with ``is_replaying()``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase

from megackpt.recompute.nested import is_node
from megackpt.recompute.span import Span

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_DEPTH = 6  # of partials in closures in partials


def modules_called(fn: Any, depth: int = _DEPTH) -> Iterator[Module]:
    """The modules that ``fn`` can reach, outermost ones only."""
    if isinstance(fn, Module):
        yield fn
        return
    if depth == 0:
        return
    kind = type(fn)
    contents: Iterable[Any] = ()
    if kind is FunctionType:
        yield from _named_globals(fn)
        contents = _contents(fn)
    elif kind is MethodType:
        owner = fn.__self__
        contents = (owner if isinstance(owner, Module) else getattr(owner, "__dict__", None),)
    elif isinstance(fn, partial):
        contents = (fn.func, *fn.args, *fn.keywords.values())
    elif isinstance(fn, (list, tuple)):
        contents = fn
    elif isinstance(fn, dict):
        contents = fn.values()
    elif hasattr(fn, "__dict__") and (callable(fn) or kind is SimpleNamespace or is_node(fn)):
        contents = vars(fn).values()
    for content in contents:
        yield from modules_called(content, depth - 1)


def _named_globals(fn: FunctionType) -> list[Module]:
    known = fn.__globals__
    return [value for name in fn.__code__.co_names if isinstance(value := known.get(name), Module)]


def _contents(fn: FunctionType) -> list[Any]:
    """What a function's closure and defaults hold."""
    contents = [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    for cell in fn.__closure__ or ():
        try:
            contents.append(cell.cell_contents)
        except ValueError:  # a name that has no value yet
            continue
    return contents


def training_norms(fn: Callable[..., Any], given: Sequence[Module] = ()) -> list[_NormBase]:
    """Normalisation modules among those ``fn`` calls, or is ``given``, that would update statistics now.  Every replay
    asks, so what has none is quick to say so."""
    found: list[_NormBase] = []
    if type(fn) is Span:
        for function in () if fn.pure else fn.functions():
            _add_norms(function, found)
    else:
        _add_norms(fn, found)
    for module in given:
        _collect(module, found)
    return found


def _add_norms(fn: Any, found: list[_NormBase]) -> None:
    kind = type(fn)
    if kind is MethodType and isinstance(fn.__self__, Module):
        _collect(fn.__self__, found)
    elif kind is FunctionType and not (fn.__closure__ or fn.__defaults__ or fn.__kwdefaults__):
        for module in _named_globals(fn):
            _collect(module, found)
    else:
        for module in modules_called(fn):
            _collect(module, found)


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
