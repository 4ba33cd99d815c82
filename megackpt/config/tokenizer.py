"""Which tokenizer, by Megatron's names, and the files it is made of."""

from __future__ import annotations

from dataclasses import dataclass

from megackpt.config.checks import at_least, one_of
from megackpt.config.errors import UsageError

SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
GPT2_BPE = "GPT2BPETokenizer"
HUGGING_FACE = "HuggingFaceTokenizer"
TIKTOKEN = "TikTokenizer"
NULL = "NullTokenizer"
TOKENIZERS = (*SENTENCEPIECE, GPT2_BPE, HUGGING_FACE, TIKTOKEN, NULL)

TIKTOKEN_PATTERNS = ("v1", "v2")

_MODEL_FILES = {
    **dict.fromkeys(SENTENCEPIECE, "its .model file"),
    HUGGING_FACE: "its tokenizer.json, or the folder that holds it",
    TIKTOKEN: "its file of ranks, .json or .tiktoken",
}


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """All that decides which ids a text becomes."""

    type: str
    """One of TOKENIZERS."""
    model: str | None = None
    """SentencePiece model, tokenizer.json (or its folder), or file of ranks."""
    vocab_file: str | None = None
    """vocab.json of GPT2BPETokenizer."""
    merge_file: str | None = None
    """merges.txt of GPT2BPETokenizer."""
    vocab_size: int | None = None
    """Ids of NullTokenizer without its eod; all ids of TikTokenizer, None = what its file has, at most 131072."""
    include_special_tokens: bool = False
    """HuggingFaceTokenizer adds what its own template says, such as a first bos."""
    tiktoken_pattern: str = "v2"
    """How TikTokenizer cuts text into words: v1 keeps case changes together, v2 cuts at them."""
    tiktoken_num_special_tokens: int = 1000
    """Ids before the first rank."""
    tiktoken_special_tokens: tuple[str, ...] = ()
    """Names of the first of those; () = Megatron's <unk> <s> </s> <mask> <pad> <cls> <sep>."""

    def __post_init__(self) -> None:
        one_of("--tokenizer-type", self.type, TOKENIZERS)
        at_least("--vocab-size", self.vocab_size, 1)
        one_of("--tiktoken-pattern", self.tiktoken_pattern, TIKTOKEN_PATTERNS)
        at_least("--tiktoken-num-special-tokens", self.tiktoken_num_special_tokens, 0)
        if self.type in _MODEL_FILES and self.model is None:
            raise UsageError(f"--tokenizer-type {self.type} needs --tokenizer-model: {_MODEL_FILES[self.type]}.")
        if self.type == GPT2_BPE and (self.vocab_file is None or self.merge_file is None):
            raise UsageError(
                f"--tokenizer-type {GPT2_BPE} needs --vocab-file and --merge-file: GPT-2's vocab.json and merges.txt."
            )
        if self.type == NULL and self.vocab_size is None:
            raise UsageError(
                f"--tokenizer-type {NULL} needs --vocab-size: nothing else says how many tokens there are."
            )
        names = self.tiktoken_special_tokens
        if len(set(names)) != len(names):
            raise UsageError(f"--tiktoken-special-tokens {' '.join(names)}: a name stands there twice.")
        if len(names) > self.tiktoken_num_special_tokens:
            raise UsageError(
                f"--tiktoken-special-tokens names {len(names)} tokens, --tiktoken-num-special-tokens has room for"
                f" {self.tiktoken_num_special_tokens}. Nearest valid: --tiktoken-num-special-tokens {len(names)}."
            )
