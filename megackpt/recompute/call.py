"""What is needed to call a step again: its function, its arguments as they were, and its surroundings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from megackpt.recompute import nested
from megackpt.recompute.handle import Box, Cell, Kept, is_itself_parameter, is_parameter, live_tag, version_of
from megackpt.recompute.producer import Producer

Hooks = tuple[Any, Any]


class Input:
    """A tensor argument of a dropped step: kept, or a dropped output seen through its geometry.  The box of a
    dropped one is held until the step has replayed, so that it is not rebuilt twice."""

    __slots__ = ("kept", "cell", "box", "geometry", "requires_grad", "version", "is_parameter")

    def __init__(self, tensor: Tensor, where: str, outer: Hooks | None) -> None:
        self.requires_grad = tensor.requires_grad
        self.version = version_of(tensor)
        self.is_parameter = tensor._base is not None and is_parameter(tensor)  # a view of one is not counted
        self.kept: Kept | None = None
        self.box: Box | None = None
        tag = live_tag(tensor)
        if tag is None:
            self.kept = Kept(tensor, where, outer)
        else:
            self.cell: Cell = tag.cell()
            self.box = self.cell.open()
            self.geometry = (tensor.size(), tensor.stride(), tensor.storage_offset())

    def missing(self) -> Producer | None:
        """Who must go before this input can be given, if anybody."""
        if self.kept is not None:
            return None
        if self.box is None:
            self.box = self.cell.open()
        return self.cell.producer if self.box.value is None else None

    def give(self) -> Tensor:
        """The argument as the forward saw it: its own ``requires_grad``, no history."""
        if self.kept is not None:
            tensor = self.kept.get()
        else:
            assert self.box is not None and self.box.value is not None
            lane = self.cell.producer.lane
            if lane is not None:
                lane.join(self.box.value)
            tensor = self.box.value.as_strided(*self.geometry)
        return tensor.detach().requires_grad_(self.requires_grad)


class TwoPhase(ABC):
    """A step's function that can be begun before anybody waits for it: a collective.

    Called, it does both phases.  Asked ahead (:meth:`Producer.ahead`), a replay launches it and finishes it when the
    result is wanted, so that what happens between the two overlaps.
    """

    @abstractmethod
    def __call__(self, *args: Any) -> Any: ...

    @abstractmethod
    def launch(self, *args: Any) -> Any:
        """Begin, and return whatever :meth:`finish` needs."""

    @abstractmethod
    def finish(self, launched: Any) -> Any:
        """Wait, and return the step's result."""


class StepCall:
    """One call of one step in one forward."""

    __slots__ = ("where", "fn", "args", "spec", "rng", "autocast", "masks", "inner", "repeated", "inputs")

    def __init__(self, where: str, fn: Callable[..., Any], masks: str, inner: int) -> None:
        self.where = where
        self.fn = fn
        self.masks = masks
        self.inner = inner  # how steps inside this one behave in its replay, see context.py
        self.args: list[Any] = []
        self.inputs: list[Input] = []  # those of them that are activations
        self.repeated = False
        self.spec: nested.Spec | None = None
        self.rng: tuple[object, ...] | None = None  # state before the step, only if the step drew
        self.autocast = autocast_state()

    def hold(self, leaves: Sequence[Any], spec: nested.Spec | None, outer: Hooks | None) -> None:
        """Remember the arguments, as :func:`flatten` gives them."""
        self.spec = spec
        where = self.where
        self.args = args = [Input(a, where, outer) if _is_activation(a) else a for a in leaves]
        if len(args) > 1:
            first: dict[int, int] = {}
            for place, leaf in enumerate(leaves):
                if type(args[place]) is Input and first.setdefault(id(leaf), place) != place:
                    args[place] = args[first[id(leaf)]]
                    self.repeated = True
        self.inputs = [a for a in args if type(a) is Input]

    def arguments(self) -> tuple[Any, Any]:
        """Arguments for a replay; every input must be there."""
        args = [a.give() if type(a) is Input else a for a in self.args]
        if self.repeated:  # one tensor given twice stays one: code asks whether ``query is key``
            first: dict[int, Any] = {}
            args = [first.setdefault(id(a), value) for a, value in zip(self.args, args, strict=True)]
        if self.spec is None:
            return args, {}
        return nested.unflatten(args, self.spec)

    def release(self) -> None:
        """After a replay: rebuilt inputs live on only if someone else saved them."""
        for a in self.inputs:
            a.box = None

    def check_inputs_unchanged(self, leaves: Sequence[Any]) -> None:
        """Refuse a step that wrote into its own input: its replay would start from the changed one, or change what
        others rebuilt."""
        for a, leaf in zip(self.args, leaves, strict=True):
            if type(a) is Input and version_of(leaf) != a.version:
                raise RuntimeError(
                    f"{self.where} modified its own input in place; a replayed step must leave its inputs alone: "
                    f"use the out-of-place operation"
                )


def flatten(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], nested.Spec | None]:
    """The leaves of a call's arguments.  The general path costs tens of microseconds and is taken only for nested or
    keyword arguments."""
    if not kwargs:
        for a in args:
            if type(a) is not Tensor and nested.is_nested(a):
                break
        else:
            return args, None
    return nested.flatten((args, dict(kwargs)))


def _is_activation(value: Any) -> bool:
    return type(value) is Tensor or (isinstance(value, Tensor) and not is_itself_parameter(value))


def tensors_of(result: Any) -> list[Tensor]:
    """The tensors of a step's result, in a fixed order."""
    if isinstance(result, Tensor):
        return [result]
    if type(result) in (tuple, list) and all(isinstance(r, Tensor) or r is None for r in result):
        return [r for r in result if r is not None]
    return [leaf for leaf in nested.flatten(result)[0] if isinstance(leaf, Tensor)]


def autocast_state() -> list[tuple[str, torch.dtype]]:
    """Devices on which autocast is on now, with its type."""
    if not torch._C._is_any_autocast_enabled():
        return []
    return [(d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]


def autocast_as(wanted: list[tuple[str, torch.dtype]]) -> AbstractContextManager[None]:
    """The forward's autocast state, weight cache off; nothing at all when autocast is off then and now."""
    now = autocast_state()
    return _autocast(now, wanted) if now or wanted else _NOTHING


_NOTHING = nullcontext()


@contextmanager
def _autocast(now: list[tuple[str, torch.dtype]], wanted: list[tuple[str, torch.dtype]]) -> Iterator[None]:
    contexts = []
    for device in dict.fromkeys(d for d, _ in (*now, *wanted)):
        dtype = dict(wanted).get(device)
        contexts.append(torch.autocast(device, dtype=dtype, enabled=dtype is not None, cache_enabled=False))
    for context in contexts:
        context.__enter__()
    try:
        yield
    finally:
        for context in reversed(contexts):
            context.__exit__(None, None, None)
