#!/usr/bin/env python3
"""Tokenise text into <output-prefix>_<key>_document.{bin,idx}, the files that --data-path names.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus --append-eod \\
        --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model data/tokenizer.model --workers 4

JSON lines: one object per line with the text under --json-keys. Plain text: cut into documents at blank lines.
Empty lines, missing keys and other odd documents are left out and counted.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone, installed or not

from megackpt.config.errors import UsageError
from megackpt.config.tokenizer import TOKENIZERS, TokenizerConfig
from megackpt.data.documents import FORMATS
from megackpt.data.preprocess import PreprocessReport, preprocess
from megackpt.data.tokenizer import build_tokenizer


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    p.add_argument("--input", nargs="+", required=True, metavar="FILE", help="JSONL or text files, .gz allowed")
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
    p.add_argument("--tokenizer-type", required=True, metavar="NAME", help=", ".join(TOKENIZERS))
    p.add_argument("--tokenizer-model", metavar="FILE", help="SentencePiece model")
    p.add_argument("--vocab-size", type=int, metavar="N", help="number of ids for NullTokenizer, eod not counted")
    p.add_argument("--strict", action="store_true", help="exit with code 1 if any document was odd")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 2 for a mistake of the user, or 1 for odd documents with --strict."""
    args = parser().parse_args(argv)
    start = time.monotonic()
    try:
        tokenizer = build_tokenizer(
            TokenizerConfig(type=args.tokenizer_type, model=args.tokenizer_model, vocab_size=args.vocab_size)
        )
        report = preprocess(
            args.input,
            args.output_prefix,
            tokenizer,
            keys=args.json_keys,
            append_eod=args.append_eod,
            workers=args.workers,
            input_format=args.input_format,
            document_chars=args.document_chars,
            say=lambda line: print(line, flush=True),
        )
    except UsageError as error:
        print(f"preprocess_data.py: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # no permission, a full disk; inputs are checked when they are opened
        print(f"preprocess_data.py: --output-prefix {args.output_prefix}: cannot be written: {error}", file=sys.stderr)
        return 2
    _print(report, time.monotonic() - start)
    return 1 if args.strict and report.odd else 0


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
