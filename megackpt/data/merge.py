"""Several indexed datasets as one."""

from __future__ import annotations

import os
from collections.abc import Sequence

from megackpt.config.errors import UsageError
from megackpt.data.indexed import IndexedDataset
from megackpt.data.indexed_writer import IndexedWriter


def merge_datasets(prefixes: Sequence[str], output: str) -> tuple[int, int]:
    """Write the documents of several datasets, one dataset after another, as one.  Returns documents and tokens.

    Tokens and index are what megatron-core's own merge writes.  Raises UsageError if a dataset is damaged, if their
    token types differ, or if the output is one of them.
    """
    if os.path.abspath(output) in map(os.path.abspath, prefixes):
        raise UsageError(f"--output-prefix {output}: is one of the datasets to merge")
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    with IndexedWriter(output, datasets[0].dtype) as writer:
        for dataset in datasets:
            writer.append(dataset)
    return writer.documents, writer.total_tokens
