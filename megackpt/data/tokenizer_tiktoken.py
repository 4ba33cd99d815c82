"""TikTokenizer: tiktoken with a local file of ranks, laid out as Megatron does.

    id 0 … n - 1     special tokens: those named, then <SPECIAL_k>        n = --tiktoken-num-special-tokens
    id n …           the ranks of the file in order, cut at --vocab-size

The file is Megatron's JSON ([{"rank": 0, "token_bytes": base64, "token_str": …}, …]) or tiktoken's own text (one
`base64 rank` a line).  Text is read as text: a special token's name inside a document is never its id.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any

from megackpt.config.errors import UsageError
from megackpt.config.tokenizer import TIKTOKEN, TokenizerConfig
from megackpt.data.tokenizer_base import SpecialIds, Tokenizer, digest_of, read_file, read_json

DEFAULT_SPECIAL = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
LARGEST_DEFAULT = 2**17
_LONGEST_TOKEN = 4096

_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": "|".join(
        (
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
            r"\p{N}",
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    ),
}


class TikTokenizer(Tokenizer):
    """See the head of this file.  bos is <s>, eos and eod are </s>, if they are among the special tokens."""

    def __init__(self, config: TokenizerConfig) -> None:
        assert config.model is not None
        self.type, self.path = TIKTOKEN, config.model
        where = f"--tokenizer-model {self.path}"
        tokens = _read_ranks(where, self.path)
        count = config.tiktoken_num_special_tokens
        available = count + len(tokens)
        self.vocab_size = config.vocab_size or min(available, LARGEST_DEFAULT)
        if not count + 256 <= self.vocab_size <= available:
            raise UsageError(
                f"--vocab-size {self.vocab_size}: {where} has {len(tokens)} tokens and there are {count} special ones."
                f" Nearest valid: --vocab-size {min(max(self.vocab_size, count + 256), available)}."
            )
        ranks = {token: count + rank for rank, token in enumerate(tokens[: self.vocab_size - count])}
        self._names = _special_names(config)
        self.special = _special_ids(self._names)
        self.digest = digest_of("tiktoken", config.tiktoken_pattern, self._names, b"\n".join(map(_hex, ranks)))
        try:
            import tiktoken  # optional package
        except ImportError as error:
            raise UsageError(f"--tokenizer-type {TIKTOKEN} needs the package tiktoken ({error})") from error
        self._encoding = tiktoken.Encoding(
            name=self.digest, pat_str=_PATTERNS[config.tiktoken_pattern], mergeable_ranks=ranks, special_tokens={}
        )
        self._count = count

    def tokenize_batch(self, texts: Sequence[str], workers: int = 1) -> list[list[int]]:
        """Ids of each text, in order, encoded by `workers` threads outside Python."""
        if workers > 1 and len(texts) > 1:
            many: list[list[int]] = self._encoding.encode_ordinary_batch(list(texts), num_threads=workers)
            return many
        return [self._encoding.encode_ordinary(text) for text in texts]

    def detokenize(self, ids: Sequence[int]) -> str:
        parts = []
        for i in self._checked(ids):
            special = i < self._count
            parts.append(self._names[i].encode() if special else self._encoding.decode_single_token_bytes(i))
        return b"".join(parts).decode("utf-8", errors="replace")

    def __str__(self) -> str:
        return f"{TIKTOKEN} {self.path}, {self.vocab_size} ids"


def _hex(token: bytes) -> bytes:
    return token.hex().encode()


def _special_names(config: TokenizerConfig) -> list[str]:
    count = config.tiktoken_num_special_tokens
    names = list(config.tiktoken_special_tokens or DEFAULT_SPECIAL[:count])
    return names + [f"<SPECIAL_{i}>" for i in range(len(names), count)]


def _special_ids(names: list[str]) -> SpecialIds:
    ids = {name: i for i, name in enumerate(names)}
    eos = ids.get("</s>")
    return SpecialIds(bos=ids.get("<s>"), eos=eos, pad=ids.get("<pad>"), unk=ids.get("<unk>"), eod=eos)


def _read_ranks(where: str, path: str) -> list[bytes]:
    """The tokens by rank.  Each is there once, and every single byte is one of them: else some text has no ids."""
    what = "a file of ranks"
    raw = read_file("--tokenizer-model", path, what)
    if raw[:1] == b"[":
        tokens = _from_json(where, read_json("--tokenizer-model", path, what, raw))
    else:
        tokens = _from_lines(where, raw)
    if len(set(tokens)) != len(tokens):
        raise UsageError(f"{where}: a token has two ranks")
    missing = 256 - len({token for token in tokens[:256] if len(token) == 1})
    if missing:
        raise UsageError(f"{where}: its first 256 ranks must be the single bytes, {missing} of them are not")
    return tokens


def _from_json(where: str, content: Any) -> list[bytes]:
    tokens: list[bytes] = []
    for rank, entry in enumerate(content):
        if not isinstance(entry, dict) or entry.get("rank") != rank:
            raise UsageError(f'{where}: entry {rank} must be an object with "rank": {rank}')
        tokens.append(_decoded(where, rank, entry.get("token_bytes")))
    return tokens


def _from_lines(where: str, raw: bytes) -> list[bytes]:
    tokens: list[bytes] = []
    for line in raw.splitlines():
        if not line:
            continue
        words = line.split()
        rank = len(tokens)
        if len(words) != 2 or words[1] != b"%d" % rank:
            raise UsageError(f"{where}: is not a file of ranks: line {rank + 1} must be a token in base64 and {rank}")
        tokens.append(_decoded(where, rank, words[0]))
    return tokens


def _decoded(where: str, rank: int, text: Any) -> bytes:
    try:
        token = base64.b64decode(text, validate=True)
    except (TypeError, ValueError, binascii.Error):
        token = b""
    if not 0 < len(token) <= _LONGEST_TOKEN:
        raise UsageError(f"{where}: the token of rank {rank} is not 1 to {_LONGEST_TOKEN} bytes in base64")
    return token
