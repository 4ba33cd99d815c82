"""Counter-based shuffling: a permutation is a pure function of (seed, purpose, epoch, length).

A generator object would tie the order of the data to numpy's stream-compatibility policy and to the order in
which epochs are drawn. Here every element of every epoch gets a 64-bit key from the SplitMix64 finaliser
(Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014) and an epoch is sorted by its keys.
Within one epoch the map from element to key is a bijection, so keys never tie and the sort needs no stability.

Above _SORTED elements a sort would be the slowest part of an index and need three times its memory. There the
permutation is computed: multiplications by odd numbers, additions and shifted exclusive-ors, all bijections of the
numbers of k bits, with constants hashed from (seed, purpose, epoch); what is not below the length is left out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

UInt64 = NDArray[np.uint64]
Int64 = NDArray[np.int64]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_CHUNK = 1 << 16  # elements worked on at once: temporary memory stays below a few MB, and in the cache
_SORTED = 1 << 16
_ROUNDS = 5


def _mix_int(x: int) -> int:
    """SplitMix64's finaliser on one Python integer."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _mix(x: UInt64) -> UInt64:
    """SplitMix64's finaliser on an array it may overwrite."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def hash64(seed: int, purpose: str, group: Int64 | np.int64, index: Int64) -> UInt64:
    """One uniform 64-bit key per element of the broadcast of `group` and `index`.

    `purpose` separates uses of one seed (`documents`, `samples`, …). For a fixed group the keys of distinct
    indices are distinct.
    """
    base = _mix_int(seed)
    for byte in purpose.encode():
        base = _mix_int(base + _GOLDEN * (byte + 1))
    golden = np.uint64(_GOLDEN)
    # Arrays wrap around silently, as wanted; scalars would warn.
    row = _mix(np.uint64(base) + (np.atleast_1d(group).astype(np.uint64) + np.uint64(1)) * golden)
    return _mix(row + (np.atleast_1d(index).astype(np.uint64) + np.uint64(1)) * golden)


def permutation(seed: int, purpose: str, group: int, length: int, out: Int64) -> Int64:
    """The permutation of range(length) that belongs to `group`, or its first elements if `out` is shorter."""
    wanted = len(out)
    if length <= _SORTED:
        keys = hash64(seed, purpose, np.int64(group), np.arange(length, dtype=np.int64))
        out[:] = np.argsort(keys)[:wanted]
        return out
    bits = (length - 1).bit_length()
    mask, half = np.uint64((1 << bits) - 1), np.uint64((bits + 1) // 2)
    constants = hash64(seed, purpose, np.int64(group), np.arange(2 * _ROUNDS, dtype=np.int64)) & mask
    counting = np.arange(_CHUNK, dtype=np.uint64)
    x, shifted = np.empty_like(counting), np.empty_like(counting)
    filled = 0
    for first in range(0, 1 << bits, _CHUNK):
        np.add(counting, np.uint64(first), out=x)
        for add, multiply in constants.reshape(_ROUNDS, 2):
            np.add(x, add, out=x)
            np.multiply(x, multiply | np.uint64(1), out=x)
            np.bitwise_and(x, mask, out=x)
            np.right_shift(x, half, out=shifted)
            np.bitwise_xor(x, shifted, out=x)
        kept = x[x < np.uint64(length)][: wanted - filled]
        out[filled : filled + len(kept)] = kept
        filled += len(kept)
        if filled == wanted:
            break
    return out


def epoch_permutations(seed: int, purpose: str, epochs: int, length: int, out: Int64 | None = None) -> Int64:
    """Permutations of range(length), one row per epoch: int64 [epochs, length], in `out` if it is given.

    Row e depends on (seed, purpose, e, length) alone, so a longer run begins with the rows of a shorter one.
    """
    out = np.empty((epochs, length), dtype=np.int64) if out is None else out
    if length > _SORTED:
        for epoch in range(epochs):
            permutation(seed, purpose, epoch, length, out[epoch])
        return out
    index = np.arange(length, dtype=np.int64)
    rows = max(1, _CHUNK // max(1, length))
    for first in range(0, epochs, rows):
        group = np.arange(first, min(epochs, first + rows), dtype=np.int64)[:, None]
        out[first : first + rows] = np.argsort(hash64(seed, purpose, group, index[None, :]), axis=1)
    return out


def shuffle_within_groups(seed: int, purpose: str, bounds: Int64) -> Int64:
    """A permutation of range(bounds[-1]) that moves elements only inside [bounds[g], bounds[g + 1]).

    `bounds` is non-decreasing and starts at 0. Group g's order depends on (seed, purpose, g, its bounds) alone.
    """
    out = np.empty(int(bounds[-1]), dtype=np.int64)
    groups = len(bounds) - 1
    first = 0
    while first < groups:
        low = int(bounds[first])
        size = int(bounds[first + 1]) - low
        if size > _SORTED:
            inside = permutation(seed, purpose, first, size, out[low : low + size])
            inside += low
            first += 1
            continue
        # As many whole groups as fit in a chunk, at least one.
        last = int(np.searchsorted(bounds, low + _CHUNK, side="right")) - 1
        last = min(groups, max(first + 1, last))
        high = int(bounds[last])
        index = np.arange(low, high, dtype=np.int64)
        group = np.repeat(np.arange(first, last, dtype=np.int64), np.diff(bounds[first : last + 1]))
        keys = hash64(seed, purpose, group, index)
        order = np.argsort(keys) if last == first + 1 else np.lexsort((keys, group))
        out[low:high] = index[order]
        first = last
    return out
