"""Text to token ids, by Megatron-LM's `--tokenizer-type` names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megackpt.config.tokenizer import GPT2_BPE, HUGGING_FACE, NULL, TIKTOKEN, TokenizerConfig
from megackpt.data.tokenizer_base import NullTokenizer, SpecialIds, Tokenizer
from megackpt.data.tokenizer_bpe import GPT2BPETokenizer, HuggingFaceTokenizer
from megackpt.data.tokenizer_sentencepiece import SentencePieceTokenizer
from megackpt.data.tokenizer_tiktoken import TikTokenizer

__all__ = ["NullTokenizer", "SpecialIds", "Tokenizer", "build_tokenizer", "other_tokenizer"]


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer that the flags name.  Raises UsageError if a file is missing, damaged or of another kind, and
    where the package that runs it is not installed."""
    if config.type == NULL:
        assert config.vocab_size is not None
        return NullTokenizer(config.vocab_size)
    if config.type == GPT2_BPE:
        assert config.vocab_file is not None and config.merge_file is not None
        return GPT2BPETokenizer(config.vocab_file, config.merge_file)
    assert config.model is not None
    if config.type == HUGGING_FACE:
        return HuggingFaceTokenizer(config.model, config.include_special_tokens)
    if config.type == TIKTOKEN:
        return TikTokenizer(config)
    return SentencePieceTokenizer(config.model, config.type)


def other_tokenizer(saved: Mapping[str, Any] | None, tokenizer: Tokenizer | None) -> str | None:
    """How the tokenizer of a run differs from that of a checkpoint (its `identity`); None if it does not, or if one
    of them has no files to compare: a run on prepared ids needs no tokenizer, and NullTokenizer is none."""
    if saved is None or tokenizer is None or NULL in (saved.get("type"), tokenizer.type):
        return None
    if saved.get("digest") == tokenizer.digest:
        return None
    return (
        f"the tokenizer is not that of the checkpoint: {tokenizer} (digest {tokenizer.digest[:12]}) here,"
        f" {saved.get('description')} (digest {str(saved.get('digest'))[:12]}) there. The same text gives other ids."
    )
