"""Handles: what autograd holds in the place of a saved tensor.

* :class:`Kept`: the tensor itself, with the version it had; checked on use, because saved-tensor hooks switch
  autograd's own in-place check off.
* :class:`Internal`: a slot of a record (a tensor saved inside a dropped step), filled when the record replays.
* :class:`View`: a dropped output seen through size, stride and offset.  All views of one storage share a
  :class:`Box`, which holds the rebuilt value.

Who holds whom (the whole memory behaviour follows from it)::

    autograd node ─▶ View ─▶ Box ─▶ Cell ─▶ Producer ─▶ inputs (Kept, or Cell + Box until replayed)
    storage ─▶ Tag ─▶ Producer (cut when the tape ends)      Producer ┄▷ slots and cells (weak)

A rebuilt value lives in a Box or an Internal, so it dies with the node that saved it; there are no use counts.
A record that still has to replay also holds the boxes of its inputs, so that an input rebuilt for someone else
is not rebuilt a second time.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

if TYPE_CHECKING:
    from megackpt.recompute.producer import Producer
    from megackpt.recompute.replay import Record

MARK = "_megackpt"
"""What a storage is to the engine, as an attribute of it: a dropped output's :class:`Tag`, or a stored mask."""
_MASK = "mask"


class ReplayError(RuntimeError):
    """A replay could not give back what the forward saved.  The message names layer, step and tensor."""


def version_of(tensor: Tensor) -> int:
    """Version counter, or -1 for inference tensors, which have none."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


def is_itself_parameter(tensor: Tensor) -> bool:
    """``isinstance(tensor, Parameter)``, without its slow path for the one type that nearly all tensors have."""
    kind = type(tensor)
    return kind is Parameter or (kind is not Tensor and isinstance(tensor, Parameter))


def is_parameter(tensor: Tensor) -> bool:
    """A parameter or a view of one (``F.linear`` saves ``weight.t()``)."""
    kind, base = type(tensor), tensor._base
    if kind is Tensor:
        return base is not None and is_itself_parameter(base)
    return kind is Parameter or isinstance(tensor, Parameter) or (base is not None and is_itself_parameter(base))


def storage_key(tensor: Tensor) -> int:
    """Where a tensor's data lies: its storage, as long as that lives.  Sparse and nested tensors have no single storage
    and stand for themselves; nothing of them is dropped that would have to be found again by its storage."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else -id(tensor)


Meta = tuple[torch.Size, torch.dtype, torch.device]
Hooks = tuple[Any, Any]


def meta_of(tensor: Tensor) -> Meta:
    """What a rebuilt tensor must have in common with the forward's."""
    return tensor.shape, tensor.dtype, tensor.device


class Kept:
    """A kept tensor.  ``outer`` is the pair of saved-tensor hooks that was active outside the tape: the tensor
    passes through it, so that ``save_on_cpu`` and ``torch.utils.checkpoint`` around us keep working.

    An argument of a dropped step is one too, with what its replay must know of it; where the step saves that very
    tensor, autograd holds the same object."""

    __slots__ = ("held", "version", "outer", "where", "needs_grad", "of_parameter", "__weakref__")

    def __init__(self, tensor: Tensor, where: str, outer: Hooks | None = None) -> None:
        try:
            self.version = tensor._version
        except RuntimeError:  # an inference tensor
            self.version = -1
        self.outer = outer
        self.where = where
        self.needs_grad: bool  # these two are set for arguments only
        self.of_parameter: bool  # if the bytes kept are counted
        self.held: Any  # what the outer hooks made of it, if there are any
        if outer is not None:
            self.held = outer[0](tensor)
        elif type(tensor) is Parameter:  # the leaf of all graphs
            self.held = tensor
        else:  # detached: a saved output would otherwise hold its own node, a cycle no collector sees
            self.held = tensor.detach()

    def get(self) -> Tensor:
        if self.outer is not None:
            unpacked: Tensor = self.outer[1](self.held)
            return unpacked
        held: Tensor = self.held
        if self.version >= 0 and held._version != self.version:
            raise changed(held, self.version, self.where)
        return held

    @property
    def unchanged(self) -> bool:
        """Whether nobody wrote into the tensor since it was kept (unknown, so True, behind outer hooks)."""
        return self.outer is not None or self.version < 0 or self.held._version == self.version

    @property
    def storage(self) -> torch.UntypedStorage | None:
        whole = self.outer is None and self.held.layout is torch.strided
        return self.held.untyped_storage() if whole else None


def changed(tensor: Tensor, version: int, where: str) -> RuntimeError:
    """The error for a tensor that was written to after it was saved."""
    return RuntimeError(
        f"a tensor kept for the backward of {where} was modified by an inplace operation: "
        f"shape {tuple(tensor.shape)}, version {tensor._version}, expected {version}"
    )


class Internal:
    """A tensor saved inside a dropped step, the ``number``-th of it.  ``value``: once the record has replayed, the
    tensor, or the handle that a step inside the step made of it.  ``version``: the one it had when it was saved, in
    forward and then in the replay."""

    __slots__ = ("record", "where", "number", "meta", "version", "value", "__weakref__")

    def __init__(self, record: Record, where: str, number: int, tensor: Tensor) -> None:
        self.record = record
        self.where = where  # the step, also where the record is one of several
        self.number = number
        self.meta = (tensor.shape, tensor.dtype, tensor.device)
        self.version = tensor._version
        self.value: Tensor | Kept | Internal | View | None = None


class Cell:
    """The identity of one dropped output storage of one producer."""

    __slots__ = ("producer", "index", "box", "__weakref__")

    def __init__(self, producer: Producer, index: int) -> None:
        self.producer = producer
        self.index = index
        self.box: weakref.ref[Box] | None = None

    def open(self) -> Box:
        """The box that is alive now, or a fresh empty one."""
        box = self.box() if self.box is not None else None
        if box is None:
            box = Box(self)
            self.box = weakref.ref(box)
        return box


class Box:
    """Where a rebuilt output storage lives: any tensor over it."""

    __slots__ = ("cell", "value", "__weakref__")

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.value: Tensor | None = None


Geometry = tuple[torch.Size, tuple[int, ...], int]


def geometry_of(tensor: Tensor) -> Geometry:
    """How a tensor sees its storage."""
    return tensor.shape, tensor.stride(), tensor.storage_offset()  # type: ignore[return-value]


def seen_as(base: Tensor, geometry: Geometry) -> Tensor:
    """The storage of ``base`` seen so: mostly as ``base`` itself sees it."""
    return base if geometry_of(base) == geometry else base.as_strided(*geometry)


class View:
    """A dropped output as its consumer saw it."""

    __slots__ = ("box", "geometry", "__weakref__")

    def __init__(self, box: Box, geometry: Geometry) -> None:
        self.box = box
        self.geometry = geometry


class Tag:
    """Written on the storage object of a dropped output: says who rebuilds it.

    The Python object of a storage lives exactly as long as the storage and takes attributes, so no table of
    addresses exists and a reused address cannot be mistaken.
    """

    __slots__ = ("producer", "index", "dtype", "version", "__weakref__")

    def __init__(self, producer: Producer, index: int, tensor: Tensor) -> None:
        self.producer: Producer | None = producer  # None once the tape has ended
        self.index = index
        self.dtype = tensor.dtype
        try:
            self.version = tensor._version
        except RuntimeError:  # an inference tensor
            self.version = -1

    def fits(self, tensor: Tensor) -> bool:
        """Whether ``tensor``, over the same storage, is seen as it was: not changed, not through another type."""
        if tensor.dtype != self.dtype or version_of(tensor) != self.version:
            return False
        return not (tensor.is_conj() or tensor.is_neg())

    def cell(self) -> Cell:
        assert self.producer is not None
        return self.producer.cell(self.index)


def mark_mask(tensor: Tensor) -> None:
    """Say of a stored dropout mask what it is: the decision for masks counts for it, not the one for internals."""
    setattr(tensor.untyped_storage(), MARK, _MASK)


def is_mask(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and getattr(tensor.untyped_storage(), MARK, None) is _MASK


def live_tag(tensor: Tensor) -> Tag | None:
    """The tag of a dropped output this tensor can be rebuilt from, else None: untagged, tag cut, changed in place
    since its step ended, or seen through another type or a lazy conjugate."""
    if tensor.layout is not torch.strided:
        return None
    tag = getattr(tensor.untyped_storage(), MARK, None)
    return tag if type(tag) is Tag and tag.producer is not None and tag.fits(tensor) else None
