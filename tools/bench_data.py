#!/usr/bin/env python3
"""Time and peak memory of the sample index: 100 million tokens in one million documents, beside megatron-core.

    python tools/bench_data.py

tests/interop/run.sh installs megatron-core; without it only our own figures are printed. Both sides get the same
documents; memory is what numpy allocates (tracemalloc), in a run of its own, because tracing costs time.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone, installed or not

from megackpt.data.blend import blend_order
from megackpt.data.sample_index import _sample_starts, build_sample_index

ROOT = Path(__file__).resolve().parents[1]
SEED = 1234


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--documents", type=int, default=1_000_000, metavar="N")
    p.add_argument("--seq-length", type=int, default=2048, metavar="N")
    p.add_argument("--epochs", type=int, default=1, metavar="N")
    p.add_argument("--repeat", type=int, default=5, metavar="N", help="the best of so many runs")
    p.add_argument("--megatron-core", type=Path, default=ROOT / ".interop", metavar="FOLDER", help="where it lies")
    args = p.parse_args()

    lengths = np.random.default_rng(SEED).integers(1, 200, args.documents, dtype=np.int32)
    tokens = int(lengths.sum(dtype=np.int64))
    samples = (args.epochs * tokens - 1) // args.seq_length
    print(f"{args.documents:,} documents, {tokens:,} tokens, {args.epochs} epochs, --seq-length {args.seq_length}:"
          f" {samples:,} samples")  # fmt: skip

    def ours() -> Any:
        return build_sample_index(lengths, range(args.documents), args.seq_length, SEED, samples)

    index = ours()
    size = index.documents.nbytes + index.starts.nbytes + index.shuffle.nbytes
    del index
    peak = _peak(ours)
    print(f"peak memory   megackpt {peak / 2**20:6.1f} MiB = {peak / size:.2f} x the index of {size / 2**20:.1f} MiB")
    order = build_sample_index(lengths, range(args.documents), args.seq_length, SEED, samples).documents
    helpers = _helpers(args.megatron_core)
    whole = [("megackpt", ours)]
    starts = [("megackpt", lambda: _sample_starts(lengths, order, args.seq_length, samples))]
    if helpers is None:
        print(f"megatron-core is not in {args.megatron_core}: no comparison")
    else:
        sizes, narrow = lengths, order.astype(np.int32)
        starts.append(
            ("megatron-core", lambda: helpers(sizes, narrow, args.seq_length, args.epochs, tokens, True, 1))
        )
        whole.append(("megatron-core", lambda: _theirs(helpers, sizes, args.seq_length, args.epochs, tokens)))
    _compare("sample starts", starts, args.repeat)
    _compare("whole index", whole, args.repeat)
    begin = time.perf_counter()
    blend_order([0.5, 0.3, 0.2], 1_000_000)
    print(f"blend of 3 sets, 1,000,000 samples: {time.perf_counter() - begin:.2f} s, once, then cached")
    return 0


def _helpers(folder: Path) -> Callable[..., Any] | None:
    """megatron-core's compiled builder, loaded alone: the package around it takes ten seconds to import."""
    found = sorted(folder.glob("megatron/core/datasets/helpers_cpp*.so"))
    if not found:
        return None
    spec = importlib.util.spec_from_file_location("helpers_cpp", found[0])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    builder: Callable[..., Any] = module.build_sample_idx_int32
    return builder


def _theirs(helpers: Callable[..., Any], sizes: Any, seq_length: int, epochs: int, tokens: int) -> Any:
    """The three arrays of its GPTDataset, by the same calls: shuffled documents, its helper, shuffled samples."""
    state = np.random.RandomState(SEED)
    documents = np.tile(np.arange(len(sizes), dtype=np.int32), epochs)
    state.shuffle(documents)
    starts = helpers(sizes, documents, seq_length, epochs, tokens, True, 1)
    shuffle = np.arange(len(starts) - 1, dtype=np.uint32)
    state.shuffle(shuffle)
    return documents, starts, shuffle


def _peak(call: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _compare(what: str, calls: list[tuple[str, Callable[[], Any]]], repeat: int) -> None:
    """Side by side, in turn, so that both meet the same machine."""
    best = {name: float("inf") for name, _ in calls}
    for _ in range(repeat):
        for name, call in calls:
            begin = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - begin)
    text = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in best.items())
    ratio = f"  (ratio {best['megatron-core'] / best['megackpt']:.2f})" if len(best) > 1 else ""
    print(f"{what:13} {text}{ratio}")


if __name__ == "__main__":
    sys.exit(main())
