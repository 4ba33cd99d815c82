"""Flags that the data tools share."""

from __future__ import annotations

import argparse

from megackpt.config.tokenizer import TIKTOKEN_PATTERNS, TOKENIZERS, TokenizerConfig


def add_tokenizer_flags(parser: argparse.ArgumentParser, required: bool) -> None:
    """The tokenizer flags of training, by the same names."""
    group = parser.add_argument_group("tokenizer")
    group.add_argument("--tokenizer-type", required=required, metavar="NAME", help=", ".join(TOKENIZERS))
    group.add_argument(
        "--tokenizer-model", metavar="FILE", help="SentencePiece model, tokenizer.json or its folder, tiktoken ranks"
    )
    group.add_argument("--vocab-file", metavar="FILE", help="GPT-2's vocab.json")
    group.add_argument("--merge-file", metavar="FILE", help="GPT-2's merges.txt")
    group.add_argument("--vocab-size", type=int, metavar="N", help="ids of NullTokenizer (without eod), TikTokenizer")
    group.add_argument("--tokenizer-hf-include-special-tokens", action="store_true")
    group.add_argument("--tiktoken-pattern", choices=TIKTOKEN_PATTERNS, default="v2")
    group.add_argument("--tiktoken-num-special-tokens", type=int, default=1000, metavar="N")
    group.add_argument("--tiktoken-special-tokens", nargs="+", default=[], metavar="NAME")


def tokenizer_of(args: argparse.Namespace) -> TokenizerConfig | None:
    """The tokenizer that they name, if any.  Raises UsageError if it lacks a file."""
    if args.tokenizer_type is None:
        return None
    return TokenizerConfig(
        type=args.tokenizer_type,
        model=args.tokenizer_model,
        vocab_file=args.vocab_file,
        merge_file=args.merge_file,
        vocab_size=args.vocab_size,
        include_special_tokens=args.tokenizer_hf_include_special_tokens,
        tiktoken_pattern=args.tiktoken_pattern,
        tiktoken_num_special_tokens=args.tiktoken_num_special_tokens,
        tiktoken_special_tokens=tuple(args.tiktoken_special_tokens),
    )
