#!/usr/bin/env python3
"""Write a corpus of real text as JSON lines: {"text": …, "source": …}, one document per line.

    python tools/build_corpus.py --output data/corpus.jsonl --max-bytes 6000000     # Python's standard library
    python tools/build_corpus.py --output data/corpus.jsonl --text book.txt         # your own text

The order of documents is the same on every machine with the same Python.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone, installed or not

from megackpt.config.errors import UsageError
from megackpt.data.corpus import Document, source_documents, standard_library_root, text_documents


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    p.add_argument("--output", required=True, metavar="FILE", help="file to write")
    p.add_argument("--format", choices=("jsonl", "text"), default="jsonl", help="default jsonl")
    p.add_argument("--text", nargs="+", metavar="FILE", help="UTF-8 text files to use instead of Python sources")
    p.add_argument("--sources", metavar="DIR", help="another directory of Python sources")
    p.add_argument("--max-bytes", type=int, metavar="N", help="stop at this many bytes of text (per --text file)")
    p.add_argument(
        "--document-chars",
        type=int,
        default=8_192,
        metavar="N",
        help="--text: cut at the first blank line after N characters (default 8192; 0: one document per file)",
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 2 for a mistake of the user."""
    args = parser().parse_args(argv)
    try:
        count, size = _write(Path(args.output), args.format, _documents(args))
    except UsageError as error:
        print(f"build_corpus.py: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # no permission, a full disk; inputs are checked when they are opened
        print(f"build_corpus.py: --output {args.output}: cannot be written: {error}", file=sys.stderr)
        return 2
    print(f"{count:,} documents, {size / 1e6:.2f} MB of text: {args.output}", flush=True)
    return 0


def _documents(args: argparse.Namespace) -> Iterator[Document]:
    if args.text:
        parts = (text_documents(Path(path), args.document_chars, args.max_bytes) for path in args.text)
        return chain.from_iterable(parts)
    return source_documents(Path(args.sources) if args.sources else standard_library_root(), args.max_bytes)


def _write(path: Path, file_format: str, documents: Iterator[Document]) -> tuple[int, int]:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    count = size = 0
    try:
        with open(partial, "w", encoding="utf-8", newline="\n") as stream:
            for document in documents:
                if file_format == "jsonl":
                    record = {"text": document.text, "source": document.source}
                    stream.write(json.dumps(record, ensure_ascii=False) + "\n")
                else:
                    stream.write(document.text.rstrip("\n") + "\n\n")
                count += 1
                size += len(document.text.encode("utf-8"))
        if count == 0:
            raise UsageError("found no text")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return count, size


if __name__ == "__main__":
    sys.exit(main())
