"""A record remembers how to run one dropped step again.

It is alive exactly as long as something can still ask it: an internal's handle, a cell of its outputs, or its tag
while the tape is open.  It holds no handle strongly, so dropping a graph drops everything below it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from megackpt.recompute.handle import Box, Cell, Internal, Kept, live_tag

if TYPE_CHECKING:
    from megackpt.recompute.tape import Tape


class Input:
    """A tensor argument of a dropped step: kept, or a dropped output seen through its geometry.  The box of a
    dropped one is held until the record has replayed, so that it is not rebuilt twice."""

    __slots__ = ("kept", "cell", "box", "geometry", "requires_grad")

    def __init__(self, tensor: Tensor, where: str, outer: tuple[Any, Any] | None) -> None:
        self.requires_grad = tensor.requires_grad
        self.kept: Kept | None = None
        self.box: Box | None = None
        tag = live_tag(tensor)
        if tag is None:
            self.kept = Kept(tensor, where, outer)
        else:
            self.cell: Cell = tag.cell()
            self.box = self.cell.open()
            self.geometry = (tensor.size(), tensor.stride(), tensor.storage_offset())

    def missing(self) -> Record | None:
        """The record that must replay before this input can be given, if any."""
        if self.kept is not None:
            return None
        if self.box is None:
            self.box = self.cell.open()
        return self.cell.record if self.box.value is None else None

    def give(self) -> Tensor:
        """The argument as the forward saw it: its own ``requires_grad``, no history."""
        if self.kept is not None:
            tensor = self.kept.get()
        else:
            assert self.box is not None and self.box.value is not None
            tensor = self.box.value.as_strided(*self.geometry)
        return tensor.detach().requires_grad_(self.requires_grad)


class Record:
    """One dropped step of one forward."""

    __slots__ = (
        "where", "tape", "fn", "args", "kwargs", "spec", "rng", "autocast", "masks", "inner", "packs", "slots", "cells",
        "__weakref__",
    )  # fmt: skip

    def __init__(self, where: str, tape: Tape, fn: Callable, masks: str, inner: int) -> None:
        self.where = where
        self.tape = tape
        self.fn = fn
        self.masks = masks
        self.inner = inner  # how steps inside this one behave in its replay, see context.State.inner
        self.args: list[Any] = []
        self.kwargs: Mapping[str, Any] = {}
        self.spec: pytree.TreeSpec | None = None
        self.rng: tuple[object, ...] | None = None  # state before the step, only if the step drew
        self.autocast: list[tuple[str, torch.dtype]] = []
        self.packs = 0
        self.slots: dict[int, weakref.ref[Internal]] = {}
        self.cells: dict[int, weakref.ref[Cell]] = {}

    def hold_inputs(self, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """Remember the arguments.  The general (pytree) path costs tens of microseconds and is taken only for
        nested or keyword arguments."""
        if not kwargs and not any(isinstance(a, (list, tuple, dict)) for a in args):
            self.args = [self._hold(a) for a in args]
        else:
            leaves, self.spec = pytree.tree_flatten((args, dict(kwargs)))
            self.args = [self._hold(a) for a in leaves]

    def _hold(self, a: Any) -> Any:
        if isinstance(a, Tensor) and not isinstance(a, torch.nn.Parameter):
            return Input(a, self.where, self.tape.outer)
        return a

    def inputs(self) -> Iterator[Input]:
        return (a for a in self.args if type(a) is Input)

    def arguments(self) -> tuple[list[Any], Mapping[str, Any]]:
        """Arguments for a replay; every input must be there."""
        args = [a.give() if type(a) is Input else a for a in self.args]
        if self.spec is None:
            return args, {}
        return pytree.tree_unflatten(args, self.spec)

    def release_inputs(self) -> None:
        """After a replay: rebuilt inputs live on only if someone else saved them."""
        for a in self.inputs():
            if a.kept is None:
                a.box = None

    def check_inputs_unchanged(self) -> None:
        """Refuse a step that wrote into its own input: its replay would start from the changed one."""
        for a in self.inputs():
            if a.kept is not None and not a.kept.unchanged:
                raise RuntimeError(
                    f"{self.where} modified its own input in place; a replayed step must leave its inputs alone: "
                    f"use the out-of-place operation"
                )

    def wanted_slots(self) -> dict[int, Internal]:
        return {i: h for i, ref in self.slots.items() if (h := ref()) is not None and h.value is None}

    def wanted_boxes(self) -> dict[int, Box]:
        boxes: dict[int, Box] = {}
        for index, ref in self.cells.items():
            cell = ref()
            box = cell.box() if cell is not None and cell.box is not None else None
            if box is not None and box.value is None:
                boxes[index] = box
        return boxes

    def clear(self) -> None:
        """Forget what was rebuilt (end of a backward that retains its graph)."""
        for slot in self.slots.values():
            if (h := slot()) is not None:
                h.value = None
        for ref in self.cells.values():
            cell = ref()
            if cell is not None and cell.box is not None and (box := cell.box()) is not None:
                box.value = None


def tensors_of(result: Any) -> list[Tensor]:
    """The tensors of a step's result, in a fixed order."""
    if isinstance(result, Tensor):
        return [result]
    if type(result) in (tuple, list) and all(isinstance(r, Tensor) or r is None for r in result):
        return [r for r in result if r is not None]
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
