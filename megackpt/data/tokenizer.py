"""Text to token ids. Names and special ids as Megatron-LM's `--tokenizer-type` has them.

A special id that a model lacks (SentencePiece says -1) is None here, and asking for it by name is an error that
says so: -1 used as an index would silently mean the last row of the vocabulary.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megackpt.config.data import SENTENCEPIECE, TOKENIZERS
from megackpt.config.errors import UsageError

NULL_TYPE = "NullTokenizer"

_EOD_PIECES = ("<EOD>", "<eod>", "<|endoftext|>")  # used where the model has no eos


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
    """Common face of all tokenizers."""

    vocab_size: int
    """Number of ids, special ones included, before padding for tensor parallelism."""
    special: SpecialIds

    @abstractmethod
    def tokenize_batch(self, texts: Sequence[str], workers: int = 1) -> list[list[int]]:
        """Ids of each text, in order. Raises UsageError for text it cannot read."""

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ids."""

    def tokenize(self, text: str) -> list[int]:
        """Ids of one text."""
        return self.tokenize_batch([text])[0]

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


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model. `add_bos` puts bos before every text, as Llama2Tokenizer does."""

    def __init__(self, model: str | os.PathLike[str], add_bos: bool = False) -> None:
        self.path = os.fspath(model)
        self._processor = _load_sentencepiece(self.path)
        processor = self._processor
        self.vocab_size = int(processor.get_piece_size())
        eos = _id_or_none(processor.eos_id())
        eod = eos
        if eod is None:
            # piece_to_id answers unk for a piece it does not have.
            found = [i for i in map(processor.piece_to_id, _EOD_PIECES) if i >= 0 and i != processor.unk_id()]
            eod = found[0] if found else None
        self.special = SpecialIds(
            bos=_id_or_none(processor.bos_id()),
            eos=eos,
            pad=_id_or_none(processor.pad_id()),
            unk=_id_or_none(processor.unk_id()),
            eod=eod,
        )
        self._prefix = [self.special.bos] if add_bos and self.special.bos is not None else []

    def tokenize_batch(self, texts: Sequence[str], workers: int = 1) -> list[list[int]]:
        """Ids of each text, in order, encoded by `workers` threads outside Python."""
        if not texts:
            return []
        encoded: list[list[int]] = self._processor.encode(list(texts), out_type=int, num_threads=max(1, workers))
        return [self._prefix + ids for ids in encoded] if self._prefix else encoded

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(self._processor.decode([int(i) for i in ids]))

    def __str__(self) -> str:
        return f"SentencePiece model {self.path}, {self.vocab_size} pieces"


class NullTokenizer(Tokenizer):
    """Reads text that already is numbers. Ids 0 … vocab_size - 1 are the user's, the next one is eod.

    As in Megatron-LM, `--vocab-size` counts without the eod, `vocab_size` here counts with it.
    """

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise UsageError(f"--tokenizer-type {NULL_TYPE} needs --vocab-size of at least 1, not {vocab_size}")
        self.vocab_size = vocab_size + 1
        self.special = SpecialIds(eod=vocab_size)

    def tokenize_batch(self, texts: Sequence[str], workers: int = 1) -> list[list[int]]:
        return [self._read(text) for text in texts]

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(i)) for i in ids)

    def _read(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError:
            raise UsageError(f"{NULL_TYPE} reads numbers between spaces, not {text[:40]!r}") from None
        bad = [i for i in ids if not 0 <= i < self.vocab_size]
        if bad:
            raise UsageError(f"{NULL_TYPE}: id {bad[0]} is outside 0 to {self.vocab_size - 1}")
        return ids

    def __str__(self) -> str:
        return f"{NULL_TYPE}, {self.vocab_size - 1} ids and eod"


def build_tokenizer(
    tokenizer_type: str, tokenizer_model: str | None = None, vocab_size: int | None = None
) -> Tokenizer:
    """The tokenizer that the flags name; UsageError for one that is unknown or lacks its model."""
    if tokenizer_type == NULL_TYPE:
        if vocab_size is None:
            raise UsageError(f"--tokenizer-type {NULL_TYPE} needs --vocab-size")
        return NullTokenizer(vocab_size)
    if tokenizer_type not in SENTENCEPIECE:
        raise UsageError(f"--tokenizer-type {tokenizer_type}: use one of {', '.join(TOKENIZERS)}")
    if not tokenizer_model:
        raise UsageError(f"--tokenizer-type {tokenizer_type} needs --tokenizer-model FILE.model")
    return SentencePieceTokenizer(tokenizer_model, add_bos=tokenizer_type == "Llama2Tokenizer")


def _load_sentencepiece(path: str) -> Any:
    if not Path(path).is_file():
        raise UsageError(f"--tokenizer-model {path}: there is no such file; tools/train_tokenizer.py makes one")
    try:
        import sentencepiece  # optional package
    except ImportError as error:
        raise UsageError(f"SentencePiece tokenizers need the package sentencepiece ({error})") from error
    try:
        return sentencepiece.SentencePieceProcessor(model_file=path)
    except (RuntimeError, OSError) as error:
        raise UsageError(f"--tokenizer-model {path}: is not a SentencePiece model ({error})") from error


def _id_or_none(value: int) -> int | None:
    return value if value >= 0 else None
