#!/usr/bin/env python3
"""Unigram entropy of tokenised corpora, in nats per token: the loss of the best model that sees no context.

python tools/corpus_entropy.py data/corpus_text_document
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone, installed or not

from megackpt.config.errors import UsageError
from megackpt.data.entropy import corpus_statistics


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 2 for a mistake of the user."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    p.add_argument("prefix", nargs="+", help="--data-path of each corpus; several are counted together")
    p.add_argument("--number-only", action="store_true", help="print the entropy alone, for scripts")
    args = p.parse_args(argv)
    try:
        found = corpus_statistics(args.prefix)
    except UsageError as error:
        print(f"corpus_entropy.py: {error}", file=sys.stderr)
        return 2
    if args.number_only:
        print(f"{found.entropy:.6f}")
    else:
        size = f"{found.tokens:,} tokens, {found.distinct:,} distinct"
        print(f"unigram entropy {found.entropy:.4f} nats per token ({size})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
