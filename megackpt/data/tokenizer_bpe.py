"""Tokenizers that the package `tokenizers` runs: GPT-2's two files, and Hugging Face's tokenizer.json.

GPT2BPETokenizer reads text as text: `<|endoftext|>` inside a document becomes ordinary pieces, never the id that
ends one.  HuggingFaceTokenizer does what its file says, and that is usually to see special tokens in the text.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from megackpt.config.errors import UsageError
from megackpt.config.tokenizer import GPT2_BPE, HUGGING_FACE
from megackpt.data.tokenizer_base import SpecialIds, Tokenizer, digest_of, read_file, read_json

GPT2_EOD = "<|endoftext|>"

# By convention, where no tokenizer_config.json says more.
_BY_CONVENTION = {
    "bos": ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>"),
    "eos": ("</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>"),
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|padding|>"),
    "unk": ("<unk>", "[UNK]"),
}
_MODELS = ("BPE", "Unigram", "WordPiece", "WordLevel")
_MAX_UNUSED = 2  # largest id + 1 may be this many times the number of tokens; more is a damaged file
_DEPTH = 64  # levels of nesting that a tokenizer.json may have

T = TypeVar("T")


class _RustTokenizer(Tokenizer):
    """What both kinds share."""

    def __init__(self, kind: str, path: str, make: Callable[[Any], Any], include_special_tokens: bool) -> None:
        self.type, self.path = kind, path
        self._include = include_special_tokens
        package = _package(kind)
        self._tokenizer = _guarded(lambda: make(package), f"{path}: is not a tokenizer that `tokenizers` can read")
        _guarded(self._tokenizer.no_truncation, path)
        _guarded(self._tokenizer.no_padding, path)

    def tokenize_batch(self, texts: Sequence[str], workers: int = 1) -> list[list[int]]:
        """Ids of each text, in order; with several ``workers`` by as many threads as `tokenizers` likes
        (RAYON_NUM_THREADS limits them), else by one."""
        message = f"{self}: cannot encode"
        if workers > 1 and len(texts) > 1:
            many = _guarded(
                lambda: self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=self._include), message
            )
            return [encoding.ids for encoding in many]
        return [_guarded(partial(self._encode, text), message) for text in texts]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=self._include).ids
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        numbers = self._checked(ids)
        return str(_guarded(lambda: self._tokenizer.decode(numbers, skip_special_tokens=False), f"{self}"))

    def __str__(self) -> str:
        return f"{self.type} {self.path}, {self.vocab_size} ids"


class GPT2BPETokenizer(_RustTokenizer):
    """GPT-2's byte-level BPE from vocab.json and merges.txt.  eod is <|endoftext|>."""

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        raw = read_file("--vocab-file", vocab_file, "GPT-2's vocab.json")
        vocab = _vocabulary(vocab_file, read_json("--vocab-file", vocab_file, "a vocabulary", raw))
        merges_raw = read_file("--merge-file", merge_file, "GPT-2's merges.txt")
        merges = _merges(merge_file, merges_raw, vocab)

        def make(package: Any) -> Any:
            tokenizer = package.Tokenizer(package.models.BPE(vocab, merges))
            tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = package.decoders.ByteLevel()
            return tokenizer

        super().__init__(GPT2_BPE, os.fspath(vocab_file), make, include_special_tokens=False)
        self.vocab_size = len(vocab)
        end = vocab.get(GPT2_EOD)
        self.special = SpecialIds(bos=end, eos=end, eod=end)
        self.digest = digest_of("gpt2", vocab, merges)


class HuggingFaceTokenizer(_RustTokenizer):
    """A tokenizer.json, given itself or by its folder.

    Special ids are those that tokenizer_config.json or special_tokens_map.json beside it name; without them, the
    one special token that bears a usual name.  A name that the vocabulary lacks is refused.
    """

    def __init__(self, model: str | os.PathLike[str], include_special_tokens: bool = False) -> None:
        flag, path = "--tokenizer-model", Path(model)
        if path.is_dir():
            path = path / "tokenizer.json"
        elif not path.exists() and path.suffix != ".json":
            raise UsageError(
                f"{flag} {model}: there is no such file or folder. Names of a hub are not looked up: download the"
                " tokenizer and give its folder."
            )
        raw = read_file(flag, path, "a tokenizer.json")
        content = read_json(flag, path, "a tokenizer.json", raw)
        _check_content(f"{flag} {path}", content)
        text = raw.decode("utf-8")
        super().__init__(HUGGING_FACE, str(path), lambda p: p.Tokenizer.from_str(text), include_special_tokens)
        ids = _guarded(lambda: self._tokenizer.get_vocab(with_added_tokens=True), f"{path}")
        if not ids:
            raise UsageError(f"{flag} {path}: has no tokens")
        self.vocab_size = max(ids.values()) + 1
        if self.vocab_size > _MAX_UNUSED * len(ids) + 1024:
            raise UsageError(f"{flag} {path}: {len(ids)} tokens but ids up to {self.vocab_size - 1}: it is damaged")
        _check_added(f"{flag} {path}", content, ids)
        self.special = _special_ids(flag, path, content, ids)
        canonical = json.dumps(content, sort_keys=True).encode()  # white space and the order of keys do not matter
        self.digest = digest_of("tokenizer.json", include_special_tokens, canonical)


def _package(kind: str) -> Any:
    try:
        import tokenizers  # optional package
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
    except ImportError as error:
        raise UsageError(f"--tokenizer-type {kind} needs the package tokenizers ({error})") from error
    return tokenizers


def _guarded(call: Callable[[], T], message: str) -> T:
    """A call into Rust, where a fault can also be a panic, which is no Exception."""
    try:
        return call()
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        raise UsageError(f"{message} ({str(error)[:200]})") from None


def _vocabulary(path: str, content: Any) -> dict[str, int]:
    where = f"--vocab-file {path}"
    if not isinstance(content, dict) or not content:
        raise UsageError(f"{where}: must hold an object of pieces and ids")
    ids = list(content.values())
    if any(type(i) is not int for i in ids) or sorted(ids) != list(range(len(ids))):
        raise UsageError(f"{where}: its {len(ids)} ids must be 0 to {len(ids) - 1}, each once")
    missing = [symbol for symbol in byte_symbols() if symbol not in content]
    if missing:
        raise UsageError(f"{where}: {len(missing)} of the 256 bytes have no id: their text would be lost")
    return content


def _merges(path: str, raw: bytes, vocab: dict[str, int]) -> list[tuple[str, str]]:
    where = f"--merge-file {path}"
    try:
        lines = raw.decode("utf-8").split("\n")
    except UnicodeDecodeError:
        raise UsageError(f"{where}: is not text") from None
    merges = []
    for number, line in enumerate(lines, start=1):
        line = line.removesuffix("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        parts = line.split(" ")
        if len(parts) != 2 or any(piece not in vocab for piece in (*parts, "".join(parts))):
            raise UsageError(f"{where}, line {number}: {line[:40]!r} does not join two pieces of the vocabulary to one")
        merges.append((parts[0], parts[1]))
    return merges


def byte_symbols() -> list[str]:
    """The character that stands for each byte in GPT-2's vocabulary: itself if it is visible, else from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(b) if b in visible else chr(next(others)) for b in range(256)]


def _check_content(where: str, content: Any) -> None:
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list):
        raise UsageError(f"{where}: is not a tokenizer.json: it has no model with a vocab")
    if model.get("type", "BPE") not in _MODELS:
        raise UsageError(f"{where}: its model is a {str(model.get('type'))[:40]}, known are {', '.join(_MODELS)}")
    level, depth = [content], 0
    while level:
        depth += 1
        if depth > _DEPTH:
            raise UsageError(f"{where}: is nested deeper than {_DEPTH} levels: it is damaged")
        level = [v for x in level for v in (x.values() if isinstance(x, dict) else x) if isinstance(v, dict | list)]


def _check_added(where: str, content: dict[str, Any], ids: dict[str, int]) -> None:
    """The package gives an added token the next free id, whatever the file says."""
    added = content.get("added_tokens")
    for entry in added if isinstance(added, list) else []:
        token, said = (entry.get("content"), entry.get("id")) if isinstance(entry, dict) else (None, None)
        if isinstance(token, str) and isinstance(said, int) and ids.get(token, said) != said:
            where = f"{where}: the token {token[:40]!r}"
            raise UsageError(f"{where} is to have the id {said}, but {ids[token]} is the next")


def _special_ids(flag: str, path: Path, content: dict[str, Any], ids: dict[str, int]) -> SpecialIds:
    named = _named_tokens(flag, path)
    found: dict[str, int | None] = {}
    for name, usual in _BY_CONVENTION.items():
        if named is None:
            there = [ids[token] for token in usual if token in ids and _is_special(content, token)]
            found[name] = there[0] if len(there) == 1 else None
            continue
        token = named.get(f"{name}_token")
        if token is not None and token not in ids:
            raise UsageError(f"{flag} {path}: the {name} token {token!r} of its configuration has no id")
        found[name] = None if token is None else ids[token]
    return SpecialIds(**found, eod=found["eos"])


def _named_tokens(flag: str, path: Path) -> dict[str, str] | None:
    """`eos_token` and so on by the files beside tokenizer.json; None if there are none."""
    named: dict[str, str] | None = None
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        file = path.with_name(name)
        if not file.exists():
            continue
        content = read_json(flag, file, f"a {name}", read_file(flag, file, f"a {name}"))
        if not isinstance(content, dict):
            raise UsageError(f"{flag} {file}: must hold an object")
        named = named or {}
        for key, value in content.items():
            token = value.get("content") if isinstance(value, dict) else value
            if key.removesuffix("_token") in _BY_CONVENTION and key.endswith("_token") and isinstance(token, str):
                named[key] = token
    return named


def _is_special(content: dict[str, Any], token: str) -> bool:
    added = content.get("added_tokens")
    entries = added if isinstance(added, list) else []
    return any(isinstance(e, dict) and e.get("content") == token and e.get("special") is True for e in entries)
