"""SentencePiece models."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from megackpt.config.errors import UsageError
from megackpt.data.tokenizer_base import SpecialIds, Tokenizer, digest_of, read_file

_EOD_PIECES = ("<EOD>", "<eod>", "<|endoftext|>")  # used where the model has no eos


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model. Llama2Tokenizer puts bos before every text."""

    def __init__(self, model: str | os.PathLike[str], kind: str = "SentencePieceTokenizer") -> None:
        self.type = kind
        self.path = os.fspath(model)
        raw = read_file("--tokenizer-model", self.path, "a SentencePiece model (tools/train_tokenizer.py makes one)")
        self._processor = _load(self.path, raw)
        add_bos = kind == "Llama2Tokenizer"
        self.digest = digest_of("sentencepiece", add_bos, raw)
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
        bos = self.special.bos
        if add_bos and bos is None:
            raise UsageError(
                f"--tokenizer-type {kind} puts bos before every text, and {self} has none: use SentencePieceTokenizer."
            )
        self._prefix = [bos] if add_bos and bos is not None else []

    def tokenize_batch(self, texts: Sequence[str], workers: int = 1) -> list[list[int]]:
        """Ids of each text, in order, encoded by `workers` threads outside Python."""
        if not texts:
            return []
        encoded: list[list[int]] = self._processor.encode(list(texts), out_type=int, num_threads=max(1, workers))
        return [self._prefix + ids for ids in encoded] if self._prefix else encoded

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(self._processor.decode(self._checked(ids)))

    def __str__(self) -> str:
        return f"SentencePiece model {self.path}, {self.vocab_size} pieces"


def _load(path: str, raw: bytes) -> Any:
    try:
        import sentencepiece  # optional package
    except ImportError as error:
        raise UsageError(f"SentencePiece tokenizers need the package sentencepiece ({error})") from error
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=raw)
        if processor.get_piece_size() < 1:
            raise UsageError(f"--tokenizer-model {path}: is a SentencePiece model without pieces")
        return processor
    except (RuntimeError, OSError) as error:
        raise UsageError(f"--tokenizer-model {path}: is not a SentencePiece model ({error})") from error


def _id_or_none(value: int) -> int | None:
    return value if value >= 0 else None
