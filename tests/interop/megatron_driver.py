"""Runs inside megatron-core's own environment: writes and reads datasets as test_megatron_core.py asks.

python megatron_driver.py FOLDER        reads FOLDER/task.json, leaves files and FOLDER/answer.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets import helpers
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder, _IndexWriter


def main(folder: Path) -> None:
    task = json.loads((folder / "task.json").read_text())
    answer: dict[str, Any] = {"read": {}, "dtypes": [DType.optimal_dtype(v).__name__ for v in task["vocabularies"]]}
    for name, (dtype, documents) in task["write"].items():
        builder = IndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=getattr(np, dtype))
        for sequences in documents:
            tokens = [token for sequence in sequences for token in sequence]
            builder.add_document(tokens, [len(sequence) for sequence in sequences])
        builder.finalize(str(folder / f"{name}.idx"))
    for name, parts in task["merge"].items():
        dtype = IndexedDataset(str(folder / parts[0])).index.dtype
        builder = IndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=dtype)
        for part in parts:
            builder.add_index(str(folder / part))
        builder.finalize(str(folder / f"{name}.idx"))
    for name in task["read"]:
        read = IndexedDataset(str(folder / name))
        answer["read"][name] = {
            "sequences": [[int(token) for token in read[i]] for i in range(len(read))],
            "documents": [int(bound) for bound in read.document_indices],
            "dtype": read.index.dtype.__name__,
        }
    name, offset, length = task["far"]
    far = IndexedDataset(str(folder / name))
    answer["far"] = [int(token) for token in far.get(len(far) - 1, offset=offset, length=length)]
    with _IndexWriter(str(folder / "sparse.idx"), np.int32) as writer:
        writer.write(task["sparse"], None, list(range(len(task["sparse"]) + 1)))
    for number, (sizes, order, seq_length, epochs) in enumerate(task["samples"]):
        tokens = sum(sizes)
        found = helpers.build_sample_idx(
            np.array(sizes, np.int32), np.array(order, np.int32), seq_length, epochs, tokens, True, True
        )
        np.save(folder / f"samples-{number}.npy", found)
    (folder / "answer.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
