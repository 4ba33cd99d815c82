#!/usr/bin/env python3
"""Read indexed datasets from end to end: figures, what is wrong with them, and some documents as text.

    python tools/inspect_data.py data/corpus_text_document \\
        --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model data/tokenizer.model --documents 3

Exit code 0: all can be trained on; 1: something is wrong; 2: a mistake on the command line.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone, installed or not

from megackpt.config.errors import UsageError
from megackpt.data.command_line import add_tokenizer_flags, tokenizer_of
from megackpt.data.indexed import IndexedDataset
from megackpt.data.inspect import Inspection, inspect, sample_documents
from megackpt.data.tokenizer import Tokenizer, build_tokenizer


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    p.add_argument("prefix", nargs="+", help="--data-path of each dataset, without .bin or .idx")
    p.add_argument("--documents", type=int, default=0, metavar="N", help="show N documents of each (default 0)")
    p.add_argument("--characters", type=int, default=300, metavar="N", help="of each at most so many (default 300)")
    add_tokenizer_flags(p, required=False)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 1 if a dataset is damaged, or 2 for a mistake of the user."""
    args = parser().parse_args(argv)
    try:
        named = tokenizer_of(args)
        tokenizer = build_tokenizer(named) if named is not None else None
    except UsageError as error:
        print(f"inspect_data.py: {error}", file=sys.stderr)
        return 2
    wrong = 0
    for prefix in args.prefix:
        try:
            found = inspect(prefix, tokenizer)
        except (UsageError, OSError) as error:
            print(f"{prefix}\n  WRONG: {error}")
            wrong += 1
            continue
        _print(found)
        if found.problems:
            wrong += 1
        else:
            _show(prefix, tokenizer, args.documents, args.characters)
    return 1 if wrong else 0


def _print(found: Inspection) -> None:
    print(found.prefix)
    print(f"  {found.documents:,} documents in {found.sequences:,} sequences, {found.empty:,} of them empty")
    print(f"  {found.tokens:,} tokens of type {found.dtype}, {found.data_bytes:,} bytes")
    if found.lengths:
        names = ("shortest", "5 %", "median", "95 %", "longest")
        print("  tokens per document: " + ", ".join(f"{n} {x:,}" for n, x in zip(names, found.lengths, strict=True)))
    if found.tokens:
        print(f"  ids {found.smallest} to {found.largest}, {found.distinct:,} different ones", end="")
        print(f", entropy {found.entropy:.4f} nats per token" if found.distinct else "")
    if found.ends is not None:
        print(f"  {found.ends:,} documents end with the end-of-document token")
    for problem in found.problems:
        print(f"  WRONG: {problem}")


def _show(prefix: str, tokenizer: Tokenizer | None, count: int, characters: int) -> None:
    indexed = IndexedDataset(prefix)
    for number in sample_documents(indexed, count):
        # A character takes one token at least, in all but odd cases: no need to decode more.
        ids = indexed.get(number, 0, min(int(indexed.lengths[number]), characters)).tolist()
        text = tokenizer.detokenize(ids) if tokenizer is not None else " ".join(map(str, ids))
        print(f"  document {number:,}, {int(indexed.lengths[number]):,} tokens: {text[:characters]!r}")


if __name__ == "__main__":
    sys.exit(main())
