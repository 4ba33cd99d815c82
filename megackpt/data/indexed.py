"""Tokenised documents on disk: `<prefix>.bin` (raw tokens) and `<prefix>.idx` (MMIDIDX version 1).

The `.idx` file, little-endian, arrays unaligned; S sequences, D document bounds (documents + 1):

    offset          bytes  content
    0               9      magic `MMIDIDX\\0\\0`
    9               8      uint64 version, 1
    17              1      uint8 dtype code (DTYPES)
    18              8      uint64 S
    26              8      uint64 D
    34              4S     int32 tokens per sequence
    34+4S           8S     int64 byte offset of each sequence in .bin
    34+12S          8D     int64 first sequence of each document, then S
    34+12S+8D       S      int8 modes, optional, ignored here

It is Megatron-LM's format: files written there are read here, and ours are byte-identical to its own. Byte
offsets and token counts are 64-bit throughout. The unit here is the document; a document of several sequences
is read as their concatenation.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megackpt.config.errors import UsageError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPES: dict[int, str] = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_HEADER_BYTES = 34


class IndexedDataset:
    """Read-only documents, memory-mapped.

    `lengths` is the token count of each document (int32 or int64 [documents]); `sequence_lengths` that of each
    sequence, and document d is the sequences `bounds[d]` to `bounds[d + 1]`. Opening validates the whole index
    (magic, version, sizes, monotone offsets, bounds of `.bin`, integer tokens) and raises UsageError with the
    file and the figure that is wrong, so that a damaged file is found before training and not in its middle.
    `flag`: what named the prefix, for the message about a file that is not there.
    """

    def __init__(self, prefix: str | os.PathLike[str], flag: str = "") -> None:
        self.prefix = os.fspath(prefix)
        index_path, data_path = Path(self.prefix + ".idx"), Path(self.prefix + ".bin")
        _require_files(f"{flag} {self.prefix}".strip(), self.prefix, index_path, data_path)
        lengths, pointers, bounds, self.dtype = _read_index(index_path)
        data_bytes = data_path.stat().st_size
        _check_sequences(index_path, lengths, pointers, bounds, self.dtype.itemsize, data_bytes)

        self.sequence_lengths: NDArray[np.int32] = lengths
        self.bounds: NDArray[np.int64] = bounds
        # First token of each document, counted in tokens; an empty one at the end has no sequence to point at.
        self.lengths: NDArray[np.int32] | NDArray[np.int64]
        self._first: NDArray[np.int64]
        if len(bounds) == len(lengths) + 1 and bool(np.all(np.diff(bounds) == 1)):  # the usual: one sequence each
            self.lengths, self._first = np.array(lengths), pointers // self.dtype.itemsize
        else:
            totals = np.zeros(len(lengths) + 1, dtype=np.int64)
            np.cumsum(lengths, out=totals[1:])
            self.lengths = totals[bounds[1:]] - totals[bounds[:-1]]
            self._first = np.append(pointers, np.int64(0))[bounds[:-1]] // self.dtype.itemsize
        self._data: NDArray[np.generic] = _map_tokens(data_path, self.dtype, data_bytes // self.dtype.itemsize)

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.lengths)

    @property
    def total_tokens(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))

    def get(self, document: int, offset: int = 0, length: int | None = None) -> NDArray[np.generic]:
        """Tokens [offset, offset + length) of a document, in the type on disk, as a view of the mapped file."""
        size = int(self.lengths[document])
        stop = size if length is None else offset + length
        if not 0 <= offset <= stop <= size:
            raise IndexError(f"tokens {offset} to {stop} of document {document}, which has {size}: {self.prefix}")
        first = int(self._first[document])
        return self._data[first + offset : first + stop]

    def last_tokens(self) -> NDArray[np.generic]:
        """The last token of every document that has one, in the type on disk."""
        filled = self.lengths > 0
        return self._data[self._first[filled] + self.lengths[filled] - 1]

    def runs(self) -> Iterator[NDArray[np.generic]]:
        """All tokens in the order of the documents, as views of stretches without a gap."""
        filled = np.flatnonzero(self.lengths)
        first = self._first[filled]
        ends = first + self.lengths[filled]
        breaks = (np.flatnonzero(first[1:] != ends[:-1]) + 1).tolist()
        for low, high in zip([0, *breaks], [*breaks, len(filled)], strict=True):
            if high > low:
                yield self._data[int(first[low]) : int(ends[high - 1])]

    def digest(self) -> str:
        """Digest of what the order of samples depends on: the length of every document."""
        return hashlib.blake2b(self.lengths.astype(np.int64).data, digest_size=16).hexdigest()


def _require_files(said: str, prefix: str, index_path: Path, data_path: Path) -> None:
    for path in (index_path, data_path):
        if path.is_file():
            continue
        guesses = [prefix.removesuffix(".bin").removesuffix(".idx"), prefix + "_text_document"]
        found = [guess for guess in guesses if Path(guess + ".idx").is_file() and guess != prefix]
        hint = f"; did you mean {found[0]}" if found else "; tools/preprocess_data.py makes such files"
        raise UsageError(f"{said}: there is no file {path}{hint}")


def _map_tokens(path: Path, dtype: np.dtype[np.generic], count: int) -> NDArray[np.generic]:
    # An empty file cannot be mapped. The plain array view avoids the cost of memmap's own slicing.
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", shape=(count,))) if count else np.empty(0, dtype)


def _read_index(path: Path) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64], np.dtype[np.generic]]:
    """(sequence lengths, sequence byte offsets, document bounds, token dtype) after checks of the header."""
    size = path.stat().st_size
    if size < _HEADER_BYTES:
        raise UsageError(f"{path}: {size} bytes is less than the header of an index ({_HEADER_BYTES} bytes)")
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    header = raw[:_HEADER_BYTES].tobytes()
    if header[:9] != MAGIC:
        raise UsageError(f"{path}: is not an indexed dataset (it begins with {header[:9]!r}, not {MAGIC!r})")
    version = int.from_bytes(header[9:17], "little")
    if version != VERSION:
        raise UsageError(f"{path}: index version {version}, only version {VERSION} is known")
    code = header[17]
    if code not in DTYPES or np.dtype(DTYPES[code]).kind == "f":
        raise UsageError(f"{path}: token type code {code} is not an integer type (1 to 5 or 8)")
    sequences = int.from_bytes(header[18:26], "little")
    documents = int.from_bytes(header[26:34], "little")
    expected = _HEADER_BYTES + 12 * sequences + 8 * documents
    if size not in (expected, expected + sequences):
        raise UsageError(
            f"{path}: {size} bytes, but {sequences} sequences and {documents} document bounds take {expected}"
            " (or one byte more per sequence with modes): the file is damaged or cut off"
        )
    lengths = np.frombuffer(raw, "<i4", sequences, _HEADER_BYTES)
    pointers = np.frombuffer(raw, "<i8", sequences, _HEADER_BYTES + 4 * sequences)
    bounds = np.frombuffer(raw, "<i8", documents, _HEADER_BYTES + 12 * sequences)
    return lengths, pointers, bounds, np.dtype(DTYPES[code])


def _check_sequences(
    path: Path,
    lengths: NDArray[np.int32],
    pointers: NDArray[np.int64],
    bounds: NDArray[np.int64],
    itemsize: int,
    data_bytes: int,
) -> None:
    """Refuse an index whose parts contradict each other or the size of the data file."""
    sequences = len(lengths)
    if len(bounds) == 0 or bounds[0] != 0 or bounds[-1] != sequences or bool(np.any(np.diff(bounds) < 0)):
        raise UsageError(f"{path}: document bounds must rise from 0 to the number of sequences, {sequences}")
    if sequences == 0:
        return
    if int(lengths.min()) < 0:
        raise UsageError(f"{path}: sequence {int(lengths.argmin())} has the length {int(lengths.min())}")
    ends = pointers + lengths.astype(np.int64) * itemsize
    if int(pointers[0]) < 0 or bool(np.any(pointers % itemsize)) or bool(np.any(pointers[1:] < ends[:-1])):
        raise UsageError(f"{path}: byte offsets must rise, not overlap, and be multiples of {itemsize}")
    if int(ends[-1]) > data_bytes:
        raise UsageError(
            f"{path}: the last sequence ends at byte {int(ends[-1])}, but {path.with_suffix('.bin')} has {data_bytes}"
        )
    gaps = pointers[1:] != ends[:-1]
    inside = np.ones(sequences, dtype=bool)
    inside[bounds[:-1][bounds[:-1] < sequences]] = False  # first sequences of documents may follow a gap
    if bool(np.any(gaps & inside[1:])):
        raise UsageError(f"{path}: the sequences of one document must lie next to each other in the .bin file")
