#!/usr/bin/env python3
"""Join indexed datasets, one after another, into one.

    python tools/merge_datasets.py --input data/part_00_text_document data/part_01_text_document \\
        --output-prefix data/all_text_document

--input may also name folders: then all datasets in them are joined, in the order of their names.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone, installed or not

from megackpt.config.errors import UsageError
from megackpt.data.merge import merge_datasets


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 2 for a mistake of the user."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    p.add_argument("--input", nargs="+", required=True, metavar="PREFIX", help="datasets without suffix, or folders")
    p.add_argument("--output-prefix", required=True, metavar="PREFIX", help="path and name of the files to write")
    args = p.parse_args(argv)
    try:
        prefixes = _prefixes(args.input)
        documents, tokens = merge_datasets(prefixes, args.output_prefix)
    except (UsageError, OSError) as error:
        print(f"merge_datasets.py: {error}", file=sys.stderr)
        return 2
    print(f"{len(prefixes)} datasets, {documents:,} documents, {tokens:,} tokens: {args.output_prefix}.bin")
    return 0


def _prefixes(inputs: Sequence[str]) -> list[str]:
    found: list[str] = []
    for given in inputs:
        folder = Path(given)
        if not folder.is_dir():
            found.append(given)
            continue
        inside = sorted(str(path.with_suffix("")) for path in folder.glob("*.idx"))
        if not inside:
            raise UsageError(f"--input {given}: the folder has no .idx files")
        found += inside
    return found


if __name__ == "__main__":
    sys.exit(main())
