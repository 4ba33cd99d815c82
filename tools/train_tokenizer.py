#!/usr/bin/env python3
"""Train a SentencePiece model for --tokenizer-type GPTSentencePieceTokenizer.

    python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 8192 --output data/tokenizer.model

Every text can be encoded and decodes to itself: white space and line ends are kept, unknown characters become
byte pieces. Ids: unk 0, bos 1, eos (end of document) 2, no pad.
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
from megackpt.data.documents import FORMATS
from megackpt.data.train_tokenizer import MODEL_TYPES, train_sentencepiece


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    p.add_argument("--input", nargs="+", required=True, metavar="FILE", help="JSONL or text files, .gz allowed")
    p.add_argument("--json-key", default="text", metavar="KEY", help="key to take text from (default text)")
    p.add_argument("--input-format", choices=FORMATS, default="auto", help="auto: by the file's suffix")
    p.add_argument("--vocab-size", type=int, required=True, metavar="N", help="pieces, special ones included")
    p.add_argument("--model-type", choices=MODEL_TYPES, default="bpe", help="default bpe; unigram is far slower")
    p.add_argument("--output", required=True, metavar="FILE.model", help="model file to write")
    p.add_argument("--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="threads")
    p.add_argument(
        "--max-bytes",
        type=int,
        default=200_000_000,
        metavar="N",
        help="of a larger input take every k-th document (default 200000000)",
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 2 for a mistake of the user."""
    args = parser().parse_args(argv)
    start = time.monotonic()
    print(f"training a {args.model_type} model of {args.vocab_size:,} pieces …", flush=True)
    try:
        pieces = train_sentencepiece(
            args.input,
            args.output,
            args.vocab_size,
            model_type=args.model_type,
            key=args.json_key,
            input_format=args.input_format,
            workers=args.workers,
            max_bytes=args.max_bytes,
        )
    except UsageError as error:
        print(f"train_tokenizer.py: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # no permission, a full disk; inputs are checked when they are opened
        print(f"train_tokenizer.py: --output {args.output}: cannot be written: {error}", file=sys.stderr)
        return 2
    print(f"{pieces:,} pieces in {time.monotonic() - start:.1f} s: {args.output}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
