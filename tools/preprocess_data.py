#!/usr/bin/env python3
"""Tokenise text into <output-prefix>_<key>_document.{bin,idx}, the files that --data-path names.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus --append-eod \\
        --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model data/tokenizer.model --workers 4

JSON lines: one object per line with the text under --json-keys. Plain text: cut into documents at blank lines.
Empty lines, missing keys and other odd documents are left out and counted. A run that was stopped goes on where it
was when it is started again with the same arguments; docs/data.md says more.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone, installed or not

from megackpt.config.errors import UsageError
from megackpt.data.command_line import add_tokenizer_flags, tokenizer_of
from megackpt.data.documents import FORMATS
from megackpt.data.preprocess import preprocess
from megackpt.data.preprocess_part import PreprocessOptions, PreprocessReport


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    p.add_argument("--input", nargs="+", required=True, metavar="FILE", help="JSONL or text, also .gz, .zst, patterns")
    p.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys to take text from")
    p.add_argument("--input-format", choices=FORMATS, default="auto", help="auto: by the file's suffix")
    p.add_argument(
        "--document-chars",
        type=int,
        default=16_384,
        metavar="N",
        help="plain text: cut at the first blank line after N characters (default 16384; 0: one document per file)",
    )
    p.add_argument("--output-prefix", required=True, metavar="PREFIX", help="path and name of the files to write")
    p.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document token")
    p.add_argument("--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="threads that tokenise")
    p.add_argument("--partitions", type=int, default=1, metavar="N", help="processes that share the input (default 1)")
    p.add_argument("--log-interval", type=float, default=2.0, metavar="S", help="seconds between progress lines")
    p.add_argument("--keep-sequential-samples", action="store_true", help="documents always keep their order")
    p.add_argument("--strict", action="store_true", help="exit with code 1 if any document was odd")
    add_tokenizer_flags(p, required=True)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 2 for a mistake of the user, or 1 for odd documents with --strict."""
    args = parser().parse_args(argv)
    start = time.monotonic()
    try:
        report = preprocess(args.input, args.output_prefix, _options(args), **_work(args))
    except UsageError as error:
        print(f"preprocess_data.py: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # no permission, a full disk; inputs are checked when they are opened
        print(f"preprocess_data.py: --output-prefix {args.output_prefix}: cannot be written: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("preprocess_data.py: stopped; the same command goes on with what is missing", file=sys.stderr)
        return 130
    _print(report, time.monotonic() - start)
    return 1 if args.strict and report.odd else 0


def _options(args: argparse.Namespace) -> PreprocessOptions:
    tokenizer = tokenizer_of(args)
    assert tokenizer is not None
    return PreprocessOptions(tokenizer, tuple(args.json_keys), args.append_eod, args.input_format, args.document_chars)


def _work(args: argparse.Namespace) -> dict[str, Any]:
    for name in ("workers", "partitions"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name} must be at least 1; got {getattr(args, name)}.")
    return {
        "workers": args.workers,
        "partitions": args.partitions,
        "interval_s": args.log_interval,
        "say": lambda line: print(line, flush=True),
    }


def _print(report: PreprocessReport, seconds: float) -> None:
    for key, prefix in report.prefixes.items():
        print(f"{report.documents[key]:,} documents, {report.tokens[key]:,} tokens in {seconds:.1f} s: {prefix}.bin")
    for reason, count in sorted(report.odd.items()):
        print(f"left out or changed: {count:,} x {reason}")
    for example in report.examples[:12]:
        print(f"  {example}")
    print("use it with: --data-path " + " ".join(report.prefixes.values()), flush=True)


if __name__ == "__main__":
    sys.exit(main())
