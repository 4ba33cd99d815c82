"""What is needed to call a step again: its function, its arguments as they were, and its surroundings."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from megackpt.recompute import nested
from megackpt.recompute.handle import Box, Cell, Kept, Tag, geometry_of, is_itself_parameter, seen_as, version_of
from megackpt.recompute.producer import Producer

Autocast = list[tuple[str, torch.dtype]]
autocast_is_on = torch._C._is_any_autocast_enabled


class Reading:
    """A tensor argument of a dropped step that was dropped itself: an output seen through its geometry.  The box is
    held until the step has replayed, so that it is not rebuilt twice."""

    __slots__ = ("cell", "box", "geometry", "needs_grad", "version")

    def __init__(self, tensor: Tensor, tag: Tag) -> None:
        self.needs_grad = tensor.requires_grad
        self.version = version_of(tensor)
        self.cell: Cell = tag.cell()
        self.box: Box | None = self.cell.open()
        self.geometry = geometry_of(tensor)

    def missing(self) -> Producer | None:
        """Who must go before this can be given, if anybody."""
        if self.box is None:
            self.box = self.cell.open()
        return self.cell.producer if self.box.value is None else None

    def get(self) -> Tensor:
        assert self.box is not None and self.box.value is not None
        lane = self.cell.producer.lane
        if lane is not None:
            lane.join(self.box.value)
        return seen_as(self.box.value, self.geometry)


class TwoPhase:
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


def given(args: Sequence[Any], spec: nested.Spec | None, repeated: bool) -> tuple[Any, Any]:
    """Positional and keyword arguments for a replay, each tensor as the forward saw it: its own ``requires_grad``, no
    history.  Every one that was dropped must be there.  ``repeated``: some are one and the same."""
    values = []
    for a in args:
        if type(a) is Kept or type(a) is Reading:
            value = a.get().detach()
            values.append(value.requires_grad_(True) if a.needs_grad else value)
        else:
            values.append(a)
    if repeated:  # one tensor given twice stays one: code asks whether ``query is key``
        first: dict[int, Any] = {}
        values = [first.setdefault(id(a), value) for a, value in zip(args, values, strict=True)]
    if spec is None:
        return values, {}
    return nested.unflatten(values, spec)  # type: ignore[no-any-return]


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


def is_activation(value: Any) -> bool:
    return type(value) is Tensor or (isinstance(value, Tensor) and not is_itself_parameter(value))


def tensors_of(result: Any) -> list[Tensor]:
    """The tensors of a step's result, in a fixed order."""
    if isinstance(result, Tensor):
        return [result]
    if type(result) in (tuple, list) and all(isinstance(r, Tensor) or r is None for r in result):
        return [r for r in result if r is not None]
    return [leaf for leaf in nested.flatten(result)[0] if isinstance(leaf, Tensor)]


def autocast_state() -> Autocast:
    """Devices on which autocast is on now, with its type."""
    if not autocast_is_on():
        return []
    return [(d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]


def autocast_as(wanted: Autocast) -> AbstractContextManager[None]:
    """The forward's autocast state, weight cache off; nothing at all when autocast is off then and now."""
    now = autocast_state()
    return _autocast(now, wanted) if now or wanted else _NOTHING


_NOTHING = nullcontext()


@contextmanager
def _autocast(now: Autocast, wanted: Autocast) -> Iterator[None]:
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
