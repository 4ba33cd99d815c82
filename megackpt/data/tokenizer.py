"""Text to token ids, by Megatron-LM's `--tokenizer-type` names."""

from __future__ import annotations

from megackpt.config.tokenizer import GPT2_BPE, HUGGING_FACE, NULL, TIKTOKEN, TokenizerConfig
from megackpt.data.tokenizer_base import NullTokenizer, SpecialIds, Tokenizer
from megackpt.data.tokenizer_bpe import GPT2BPETokenizer, HuggingFaceTokenizer
from megackpt.data.tokenizer_sentencepiece import SentencePieceTokenizer
from megackpt.data.tokenizer_tiktoken import TikTokenizer

__all__ = ["NullTokenizer", "SpecialIds", "Tokenizer", "build_tokenizer"]


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
