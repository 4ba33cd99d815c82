"""Reading parts of tensors out of a safetensors file: no byte that is not wanted, no more than a block in memory.

A mapped file would count as this process's memory and bring in whole pages and read-ahead. Nothing in the header is
believed: sizes are compared with the file before anything is allocated.
"""

from __future__ import annotations

import itertools
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megackpt.persist.tensor_file import BLOCK, DTYPES

_LONGEST_HEADER = 100 << 20  # the format's own limit
_LONGEST_TENSOR = 1 << 60  # elements; their bytes fit in 64 bits
_MOST_DIMENSIONS = 64


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: its bytes are [begin, end) of the whole file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class Staging:
    """Room for a block on its way, made once: memory that is freed is not always given back."""

    def __init__(self) -> None:
        self._bytes: Tensor | None = None

    def room(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """A tensor of at most a block, valid until the next call."""
        if self._bytes is None:
            self._bytes = torch.empty(BLOCK, dtype=torch.uint8)
        return self._bytes[: prod(shape) * dtype.itemsize].view(dtype).view(shape)


class TensorReader:
    """A safetensors file, open. `entries`: what its header names."""

    def __init__(self, path: Path, staging: Staging | None = None) -> None:
        """Raises OSError if the file cannot be opened, ValueError saying what is wrong with its header."""
        self.name = path.name
        self._file = open_regular(path)
        self._staging = staging or Staging()
        try:
            self.entries = read_header(self._file)
        except BaseException:
            os.close(self._file)
            raise

    def close(self) -> None:
        os.close(self._file)

    def read(self, entry: str, offsets: tuple[int, ...], target: Tensor) -> None:
        """Fill `target` with the box of its shape at `offsets` of a tensor, converting its type if need be.

        Raises ValueError if the file has no such box, OSError if it cannot be read.
        """
        found = self.entries.get(entry)
        if found is None:
            raise ValueError(f"{self.name} has no {entry}")
        lengths = tuple(target.shape)
        if len(lengths) != len(found.shape) or any(
            a < 0 or a + n > whole for a, n, whole in zip(offsets, lengths, found.shape, strict=True)
        ):
            raise ValueError(f"{self.name}: {entry} has shape {list(found.shape)}, not {lengths} at {offsets}")
        if not lengths:
            offsets, target, found = (0,), target.view(1), Entry(found.dtype, (1,), found.begin, found.end)
        if target.numel():
            self._fill(found.dtype, found.begin, found.shape, offsets, target)

    def _fill(
        self, dtype: torch.dtype, begin: int, shape: tuple[int, ...], offsets: tuple[int, ...], target: Tensor
    ) -> None:
        """Cut the box along its first dimension until a part fits into a block."""
        rows, size = target.shape[0], target.numel() * dtype.itemsize
        if size <= BLOCK:
            self._fill_block(dtype, begin, shape, offsets, target)
        elif rows > 1:
            step = max(1, rows * BLOCK // size)
            for start in range(0, rows, step):
                part = target.narrow(0, start, min(step, rows - start))
                self._fill(dtype, begin, shape, (offsets[0] + start, *offsets[1:]), part)
        else:
            row = prod(shape[1:]) * dtype.itemsize
            self._fill(dtype, begin + offsets[0] * row, shape[1:], offsets[1:], target[0])

    def _fill_block(
        self, dtype: torch.dtype, begin: int, shape: tuple[int, ...], offsets: tuple[int, ...], target: Tensor
    ) -> None:
        direct = target.is_contiguous() and target.dtype == dtype and target.device.type == "cpu"
        block = target if direct else self._staging.room(dtype, tuple(target.shape))
        view, at = block.detach().view(-1).view(torch.uint8).numpy().data, 0
        for start, length in runs(shape, offsets, tuple(target.shape)):
            length *= dtype.itemsize
            self._read_into(view[at : at + length], begin + start * dtype.itemsize)
            at += length
        if not direct:
            target.copy_(block)

    def _read_into(self, view: memoryview, position: int) -> None:
        while view:
            count = os.preadv(self._file, [view], position)
            if count == 0:
                raise ValueError(f"{self.name} ends at byte {position}, within a tensor")
            view, position = view[count:], position + count


def runs(
    shape: tuple[int, ...], offsets: tuple[int, ...], lengths: tuple[int, ...]
) -> Iterator[tuple[int, int]]:
    """(start, length) in elements of the stretches that a box takes in the flattened tensor, in the box's order."""
    last = len(shape) - 1
    while last > 0 and lengths[last] == shape[last]:
        last -= 1
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    length = lengths[last] * strides[last]
    for place in itertools.product(*(range(lengths[dim]) for dim in range(last))):
        start = sum((offsets[dim] + place[dim]) * strides[dim] for dim in range(last))
        yield start + offsets[last] * strides[last], length


def open_regular(path: Path) -> int:
    """A descriptor to read from. OSError also for what is no regular file: opening a pipe would wait for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(None, "it is not a regular file", str(path))
    return descriptor


def read_header(descriptor: int) -> dict[str, Entry]:
    """The entries of a safetensors file. Raises ValueError saying what is wrong with it."""
    size = os.fstat(descriptor).st_size
    start = os.pread(descriptor, 8, 0)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(_LONGEST_HEADER, size - 8):
        raise ValueError("it has no safetensors header")
    return parse_header(os.pread(descriptor, length, 8), 8 + length, size)


def parse_header(text: bytes, begin: int, end: int) -> dict[str, Entry]:
    """The entries that a header describes, of a file whose tensors lie in bytes [begin, end). ValueError if wrong."""
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its safetensors header is damaged ({error})") from None
    if not isinstance(header, dict):
        raise ValueError("its safetensors header is no list of tensors")
    header.pop("__metadata__", None)
    return {name: _entry(name, content, begin, end) for name, content in header.items()}


def _entry(name: str, content: Any, begin: int, end: int) -> Entry:
    fields = content if isinstance(content, dict) else {}
    dtype, shape, place = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES or not are_sizes(shape) or not are_sizes(place):
        raise ValueError(f"its header describes {name[:100]} by {str(content)[:100]}")
    assert isinstance(shape, list) and isinstance(place, list)
    bytes_needed = elements(shape) * DTYPES[dtype].itemsize
    if len(place) != 2 or place[1] - place[0] != bytes_needed or begin + place[1] > end:
        raise ValueError(f"its header puts {name[:100]} ({dtype} {shape}) at bytes {place} of {end - begin}")
    return Entry(DTYPES[dtype], tuple(shape), begin + place[0], begin + place[1])


def are_sizes(value: object) -> bool:
    """`value` is a list of integers of at least 0 that fit in 64 bits."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def elements(shape: list[int] | tuple[int, ...]) -> int:
    """Number of elements; ValueError if no tensor can have as many."""
    if len(shape) <= _MOST_DIMENSIONS:
        count = prod(shape)
        if count <= _LONGEST_TENSOR:
            return count
    raise ValueError(f"a tensor of shape {list(shape)[:8]} is larger than any")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is given twice")
    return found
