"""Small tokenizers of every kind, made on the spot, and a slow BPE of our own to compare them with."""

from __future__ import annotations

import base64
import json
from functools import cache
from pathlib import Path
from typing import Any

import regex
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from megackpt.data.tokenizer_bpe import byte_symbols

SENTENCES = ["the cat sat on the mat", "a dog and a cat", "we sat on a log", "def f(x):", "return x + 1"] * 20
TEXTS = [
    "the cat  sat\n\n on the MAT",
    "def f(x):\n\treturn x+1  ",
    "",
    "é 日本 \U0001f600 <|endoftext|> <s>",
    "it's 12345 don'T\r\n",
    "x" * 300,
    " ",
]
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@cache
def bpe() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a byte-level BPE; <|endoftext|> is its last id, as in GPT-2."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False, initial_alphabet=byte_symbols())
    trained.train_from_iterator(SENTENCES, trainer)
    model = json.loads(trained.to_str())["model"]
    vocab = dict(model["vocab"])
    vocab["<|endoftext|>"] = len(vocab)
    return vocab, [tuple(merge) for merge in model["merges"]]


def gpt2_files(folder: Path) -> tuple[str, str]:
    """vocab.json and merges.txt."""
    vocab, merges = bpe()
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
    return str(folder / "vocab.json"), str(folder / "merges.txt")


def hugging_face(folder: Path, template: bool = False, **named: Any) -> str:
    """tokenizer.json with two special tokens, and tokenizer_config.json with ``named`` if there are any."""
    vocab, merges = bpe()
    made = tokenizers.Tokenizer(models.BPE(vocab, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>", "<s>"])
    if template:
        first = made.token_to_id("<s>")
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", first)])
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(made.to_str())
    if named:
        (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return str(folder)


def rank_tokens() -> list[bytes]:
    """The tokens of the BPE above by rank: 256 bytes, then the merged ones."""
    byte_of = {symbol: b for b, symbol in enumerate(byte_symbols())}
    _, merges = bpe()
    return [bytes([b]) for b in range(256)] + [bytes(byte_of[c] for c in a + b) for a, b in merges]


def rank_file(path: Path) -> str:
    """Megatron's JSON, or for any other suffix tiktoken's lines."""
    if path.suffix == ".json":
        entries = [
            {"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": t.decode(errors="replace")}
            for i, t in enumerate(rank_tokens())
        ]
        path.write_text(json.dumps(entries))
    else:
        path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(rank_tokens())))
    return str(path)


def slow_bpe(text: str, pattern: str, rank_of_pair: dict[tuple[bytes, bytes], int]) -> list[bytes]:
    """Byte-pair encoding as the paper says it: join the pair of lowest rank, until none is left."""
    out: list[bytes] = []
    for word in regex.findall(pattern, text):
        parts = [bytes([b]) for b in word.encode()]
        while len(parts) > 1:
            ranks = [rank_of_pair.get(pair, 1 << 30) for pair in zip(parts, parts[1:], strict=False)]
            best = min(ranks)
            if best == 1 << 30:
                break
            i = ranks.index(best)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        out += parts
    return out


def slow_gpt2(text: str) -> list[int]:
    """Ids of the BPE above."""
    vocab, merges = bpe()
    symbols = byte_symbols()
    byte_of = {symbol: b for b, symbol in enumerate(symbols)}
    pairs = {(bytes(map(byte_of.get, a)), bytes(map(byte_of.get, b))): i for i, (a, b) in enumerate(merges)}
    return [vocab["".join(symbols[b] for b in piece)] for piece in slow_bpe(text, GPT2_PATTERN, pairs)]
