"""What all tokenizers have in common: special ids that are right or refused, and an identity to compare.

A special id that a model lacks (SentencePiece says -1) is None here, and asking for it by name is an error that
says so: -1 used as an index would silently mean the last row of the vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megackpt.config.errors import UsageError
from megackpt.config.tokenizer import NULL

_MAX_FILE_BYTES = 1 << 30  # no tokenizer is that large: what is larger is another file


@dataclass(frozen=True)
class SpecialIds:
    """Ids with a meaning of their own; None where the tokenizer has no such token."""

    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    unk: int | None = None
    eod: int | None = None
    """End of document: eos where there is one."""


class Tokenizer(ABC):
    """Common face of all tokenizers.  Safe to use from several threads."""

    type: str
    """Its --tokenizer-type."""
    vocab_size: int
    """Number of ids, special ones included, before padding for tensor parallelism."""
    special: SpecialIds
    digest: str
    """Of everything that decides which ids a text becomes: equal digests give equal ids."""

    @abstractmethod
    def tokenize_batch(self, texts: Sequence[str], workers: int = 1) -> list[list[int]]:
        """Ids of each text, in order. Raises UsageError for text it cannot read."""

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ids.  Raises UsageError for an id outside the vocabulary."""

    def tokenize(self, text: str) -> list[int]:
        """Ids of one text."""
        return self.tokenize_batch([text])[0]

    def identity(self) -> dict[str, Any]:
        """JSON-able facts for a checkpoint."""
        return {
            "type": self.type,
            "digest": self.digest,
            "vocab_size": self.vocab_size,
            "special": asdict(self.special),
            "description": str(self),
        }

    @property
    def bos(self) -> int:
        return self._required("bos")

    @property
    def eos(self) -> int:
        return self._required("eos")

    @property
    def pad(self) -> int:
        return self._required("pad")

    @property
    def unk(self) -> int:
        return self._required("unk")

    @property
    def eod(self) -> int:
        return self._required("eod")

    def _required(self, name: str) -> int:
        value = getattr(self.special, name)
        if value is None:
            raise UsageError(f"this tokenizer has no {name} token ({self})")
        return int(value)

    def _checked(self, ids: Sequence[int]) -> list[int]:
        numbers = [int(i) for i in ids]
        for i in numbers:
            if not 0 <= i < self.vocab_size:
                raise UsageError(f"id {i} is outside 0 to {self.vocab_size - 1} ({self})")
        return numbers


class NullTokenizer(Tokenizer):
    """Reads text that already is numbers. Ids 0 … vocab_size - 1 are the user's, the next one is eod.

    As in Megatron-LM, `--vocab-size` counts without the eod, `vocab_size` here counts with it.
    """

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise UsageError(f"--tokenizer-type {NULL} needs --vocab-size of at least 1, not {vocab_size}")
        self.type = NULL
        self.vocab_size = vocab_size + 1
        self.special = SpecialIds(eod=vocab_size)
        self.digest = digest_of(NULL, vocab_size)

    def tokenize_batch(self, texts: Sequence[str], workers: int = 1) -> list[list[int]]:
        return [self._read(text) for text in texts]

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, self._checked(ids)))

    def _read(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError:
            raise UsageError(f"{NULL} reads numbers between spaces, not {text[:40]!r}") from None
        bad = [i for i in ids if not 0 <= i < self.vocab_size]
        if bad:
            raise UsageError(f"{NULL}: id {bad[0]} is outside 0 to {self.vocab_size - 1}")
        return ids

    def __str__(self) -> str:
        return f"{NULL}, {self.vocab_size - 1} ids and eod"


def digest_of(*parts: Any) -> str:
    """Digest of bytes and JSON-able values, in their order."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        raw = part if isinstance(part, bytes) else json.dumps(part, sort_keys=True).encode()
        found.update(len(raw).to_bytes(8, "little") + raw)
    return found.hexdigest()


def read_file(flag: str, path: str | os.PathLike[str], what: str) -> bytes:
    """The bytes of a tokenizer's file; UsageError that names ``flag`` if there is none that could be ``what``."""
    try:
        size = Path(path).stat().st_size
        if not Path(path).is_file():
            raise UsageError(f"{flag} {path}: is not a file; {what} is expected")
        if size > _MAX_FILE_BYTES:
            raise UsageError(f"{flag} {path}: has {size:,} bytes, which is too large for {what}")
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise UsageError(f"{flag} {path}: there is no such file; {what} is expected") from None
    except OSError as error:
        raise UsageError(f"{flag} {path}: cannot be read: {error.strerror or error}") from error


def read_json(flag: str, path: str | os.PathLike[str], what: str, raw: bytes) -> Any:
    """The value in a JSON file; UsageError if it is not JSON."""
    try:
        return json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{flag} {path}: is not {what}: not JSON ({str(error)[:120]})") from None
