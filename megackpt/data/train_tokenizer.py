"""Training a SentencePiece model that gives back every text exactly, code included."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megackpt.config.errors import UsageError
from megackpt.data.documents import DocumentReader

MODEL_TYPES = ("bpe", "unigram")
_MAX_LINE_BYTES = 1 << 20


def train_sentencepiece(
    inputs: Sequence[str | os.PathLike[str]],
    model_path: str | os.PathLike[str],
    vocab_size: int,
    model_type: str = "bpe",
    key: str = "text",
    input_format: str = "auto",
    workers: int = 1,
    max_bytes: int = 200_000_000,
) -> int:
    """Train on the documents of `inputs`, write `model_path` whole or not at all, return the number of pieces.

    Ids: unk 0, bos 1, eos 2, no pad. Bytes without a piece of their own are spelled by byte pieces, white space
    and line ends are kept, nothing is normalised: decoding gives the text back. Of more than `max_bytes` of input
    every k-th document is used. Raises UsageError if the input has no text or too little for `vocab_size`.
    """
    if model_type not in MODEL_TYPES:
        raise UsageError(f"--model-type {model_type}: use one of {', '.join(MODEL_TYPES)}")
    try:
        import sentencepiece  # optional package
    except ImportError as error:
        raise UsageError(f"training a tokenizer needs the package sentencepiece ({error})") from error
    lines = _lines(inputs, key, input_format, max_bytes)
    first = next(lines, None)
    if first is None:
        raise UsageError(f"no text under the key {key!r} in {', '.join(map(str, inputs))}")
    out = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_chain(first, lines), model_writer=out, **_options(vocab_size, model_type, workers)
        )
    except (RuntimeError, OSError) as error:
        raise UsageError(f"--vocab-size {vocab_size}: SentencePiece refuses: {error}") from error
    target = Path(model_path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
    partial.write_bytes(out.getvalue())
    os.replace(partial, target)
    return int(sentencepiece.SentencePieceProcessor(model_proto=out.getvalue()).get_piece_size())


def _options(vocab_size: int, model_type: str, workers: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "model_type": model_type,
        "num_threads": max(1, workers),
        "unk_id": 0,
        "bos_id": 1,
        "eos_id": 2,
        "pad_id": -1,
        "byte_fallback": True,
        "character_coverage": 0.9999,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "allow_whitespace_only_pieces": True,
        "split_digits": True,
        "user_defined_symbols": ["\n", "\t"],  # otherwise each costs a byte piece
        "max_sentence_length": _MAX_LINE_BYTES,
        "minloglevel": 1,
    }


def _lines(inputs: Sequence[str | os.PathLike[str]], key: str, input_format: str, max_bytes: int) -> Iterator[str]:
    readers = [DocumentReader(path, (key,), input_format, 16_384) for path in inputs]
    stride = max(1, math.ceil(sum(reader.path.stat().st_size for reader in readers) / max_bytes))
    number = 0
    for reader in readers:
        for document in reader:
            if number % stride == 0:
                yield from (line for line in document[key].splitlines() if line.strip())
            number += 1


def _chain(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest
