"""Special ids of SentencePiece models with and without them, exact round trips, NullTokenizer, refusals."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from megackpt.config.errors import UsageError
from megackpt.config.tokenizer import TokenizerConfig
from megackpt.data.tokenizer import SpecialIds, Tokenizer, build_tokenizer
from megackpt.data.tokenizer_sentencepiece import SentencePieceTokenizer
from megackpt.data.train_tokenizer import train_sentencepiece

SENTENCES = ["the cat sat on the mat", "a dog and a cat", "we sat on a log", "def f(x):", "return x + 1"] * 20
CODE = "def f(x):\n    return  x + 1\n\n\n\t# é 日本 \U0001f600\n"


def train(path: Path, **options: Any) -> str:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES), model_writer=out, vocab_size=48, model_type="bpe", minloglevel=2, **options
    )
    path.write_bytes(out.getvalue())
    return str(path)


def named(kind: str, model: str | None = None, vocab_size: int | None = None) -> Tokenizer:
    return build_tokenizer(TokenizerConfig(type=kind, model=model, vocab_size=vocab_size))


CASES: dict[str, tuple[dict[str, Any], SpecialIds]] = {
    "usual": ({}, SpecialIds(bos=1, eos=2, pad=None, unk=0, eod=2)),
    "with pad": ({"pad_id": 3}, SpecialIds(bos=1, eos=2, pad=3, unk=0, eod=2)),
    "no bos": ({"bos_id": -1, "eos_id": 1}, SpecialIds(bos=None, eos=1, pad=None, unk=0, eod=1)),
    "pad first": (
        {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": 3},
        SpecialIds(bos=3, eos=1, pad=0, unk=2, eod=1),
    ),
    "no eos": ({"eos_id": -1}, SpecialIds(bos=1, eos=None, pad=None, unk=0, eod=None)),
    "eod piece": (
        {"eos_id": -1, "user_defined_symbols": ["<|endoftext|>"]},
        SpecialIds(bos=1, eos=None, pad=None, unk=0, eod=2),
    ),
    "none": ({"bos_id": -1, "eos_id": -1}, SpecialIds(bos=None, eos=None, pad=None, unk=0, eod=None)),
}


@pytest.mark.parametrize("case", CASES)
def test_special_ids(tmp_path: Path, case: str) -> None:
    """VC-07: every id is right, and one that is not there is an error, never -1 or another token."""
    options, expected = CASES[case]
    for kind in ("GPTSentencePieceTokenizer", "SentencePieceTokenizer", "Llama2Tokenizer"):
        if kind == "Llama2Tokenizer" and expected.bos is None:
            continue
        tokenizer = named(kind, train(tmp_path / "m.model", **options))
        assert tokenizer.special == expected and tokenizer.vocab_size == 48
        for name in ("bos", "eos", "pad", "unk", "eod"):
            value = getattr(expected, name)
            if value is None:
                with pytest.raises(UsageError, match=f"this tokenizer has no {name} token .*m.model, 48 pieces"):
                    getattr(tokenizer, name)
            else:
                assert getattr(tokenizer, name) == value


def test_llama_puts_bos_before_each_text_and_the_others_nothing(tmp_path: Path) -> None:
    model = train(tmp_path / "m.model")
    plain = named("GPTSentencePieceTokenizer", model).tokenize_batch(["the cat", "a dog"])
    assert named("SentencePieceTokenizer", model).tokenize_batch(["the cat", "a dog"]) == plain
    assert named("Llama2Tokenizer", model).tokenize_batch(["the cat", "a dog"]) == [[1, *ids] for ids in plain]
    without = train(tmp_path / "n.model", bos_id=-1, eos_id=1)
    with pytest.raises(UsageError, match=r"puts bos before every text, and .*n\.model, 48 pieces has none"):
        named("Llama2Tokenizer", without)


def test_trained_model_gives_every_text_back(tmp_path: Path) -> None:
    corpus = tmp_path / "c.txt"
    corpus.write_text("\n".join(SENTENCES))
    assert train_sentencepiece([corpus], tmp_path / "sub" / "t.model", 320) == 320
    tokenizer = SentencePieceTokenizer(tmp_path / "sub" / "t.model")
    assert tokenizer.detokenize(tokenizer.tokenize(CODE)) == CODE
    assert tokenizer.special == SpecialIds(bos=1, eos=2, pad=None, unk=0, eod=2)
    assert 0 not in tokenizer.tokenize(CODE)
    assert tokenizer.tokenize_batch([CODE, "", "cat"], workers=2) == [tokenizer.tokenize(t) for t in (CODE, "", "cat")]
    assert tokenizer.tokenize_batch([]) == []
    assert list((tmp_path / "sub").iterdir()) == [tmp_path / "sub" / "t.model"]


def test_training_refuses_what_it_cannot_use(tmp_path: Path) -> None:
    corpus, empty = tmp_path / "c.txt", tmp_path / "e.txt"
    corpus.write_text("a b")
    empty.write_text("\n\n")
    with pytest.raises(UsageError, match="--vocab-size 64: SentencePiece refuses"):
        train_sentencepiece([corpus], tmp_path / "t.model", 64)
    with pytest.raises(UsageError, match="no text under the key 'text'"):
        train_sentencepiece([empty], tmp_path / "t.model", 320)
    with pytest.raises(UsageError, match="--model-type word: use one of bpe, unigram"):
        train_sentencepiece([corpus], tmp_path / "t.model", 320, model_type="word")
    assert not (tmp_path / "t.model").exists()


def test_null_tokenizer() -> None:
    """As in Megatron-LM: --vocab-size ids and the eod after them."""
    tokenizer = named("NullTokenizer", vocab_size=10)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.special.pad) == (11, 10, None)
    assert tokenizer.tokenize(" 3 0\n9 10 ") == [3, 0, 9, 10] and tokenizer.detokenize([3, 0]) == "3 0"
    with pytest.raises(UsageError, match="reads numbers between spaces, not '3 x'"):
        tokenizer.tokenize("3 x")
    for bad in ("11", "-1"):
        with pytest.raises(UsageError, match=f"id {bad} is outside 0 to 10"):
            tokenizer.tokenize(bad)


def test_refusals(tmp_path: Path) -> None:
    (tmp_path / "bad.model").write_bytes(b"no model")
    for arguments, message in [
        (
            ("BertWordPieceCase", "x"),
            "--tokenizer-type takes .*HuggingFaceTokenizer.* or NullTokenizer; got 'BertWordPieceCase'",
        ),
        (("Llama2Tokenizer",), "needs --tokenizer-model"),
        (("NullTokenizer",), "needs --vocab-size"),
        (("NullTokenizer", None, 0), "--vocab-size must be at least 1; got 0"),
        (
            ("Llama2Tokenizer", str(tmp_path / "none")),
            "none: there is no such file; a SentencePiece model .tools/train_tokenizer.py makes one",
        ),
        (("Llama2Tokenizer", str(tmp_path / "bad.model")), "bad.model: is not a SentencePiece model"),
    ]:
        with pytest.raises(UsageError, match=message):
            named(*arguments)
