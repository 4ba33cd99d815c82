"""Tensors in nested arguments and results: tuples, lists, dicts, whatever PyTorch's pytree knows, and dataclasses.

PyTorch's pytree takes a dataclass for a leaf unless somebody registered it in a process-wide table.  Here it is a
node: its fields are walked, and a copy of the object is filled with them again, without running its ``__init__``.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class _Object:
    """A dataclass instance without its fields."""

    hollow: Any
    names: tuple[str, ...]
    spec: Spec
    count: int


@dataclass(frozen=True)
class Spec:
    """How to build the value again: the pytree, and which of its leaves are dataclass instances."""

    tree: pytree.TreeSpec
    objects: dict[int, _Object]


def is_nested(value: Any) -> bool:
    """Whether tensors may hide in ``value``."""
    return not isinstance(value, Tensor) and (isinstance(value, (list, tuple, dict)) or is_node(value))


def is_node(value: Any) -> bool:
    """A dataclass instance, unless it is a tensor or a module."""
    return hasattr(value, "__dataclass_fields__") and not isinstance(value, (type, Tensor, Module))


def flatten(value: Any) -> tuple[list[Any], Spec]:
    """The leaves of ``value``, in a fixed order, and what :func:`unflatten` needs."""
    leaves, tree = pytree.tree_flatten(value)
    flat: list[Any] = []
    objects: dict[int, _Object] = {}
    for place, leaf in enumerate(leaves):
        if not is_node(leaf):
            flat.append(leaf)
            continue
        assert is_dataclass(leaf)
        names = tuple(f.name for f in fields(leaf) if hasattr(leaf, f.name))
        inner, spec = flatten([getattr(leaf, name) for name in names])
        hollow = copy.copy(leaf)
        for name in names:
            object.__setattr__(hollow, name, None)
        objects[place] = _Object(hollow, names, spec, len(inner))
        flat += inner
    return flat, Spec(tree, objects)


def unflatten(leaves: Sequence[Any], spec: Spec) -> Any:
    """The value again, from other leaves in the same order."""
    if not spec.objects:
        return pytree.tree_unflatten(leaves, spec.tree)
    rest = list(reversed(leaves))
    values = []
    for place in range(spec.tree.num_leaves):
        node = spec.objects.get(place)
        if node is None:
            values.append(rest.pop())
            continue
        contents = unflatten([rest.pop() for _ in range(node.count)], node.spec)
        value = copy.copy(node.hollow)
        for name, content in zip(node.names, contents, strict=True):
            object.__setattr__(value, name, content)
        values.append(value)
    return pytree.tree_unflatten(values, spec.tree)
