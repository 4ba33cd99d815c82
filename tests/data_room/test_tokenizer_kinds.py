"""GPT-2 BPE, tokenizer.json and tiktoken: ids against a slow BPE, special ids right or refused, digests, refusals."""

from __future__ import annotations

import base64
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import regex

from megackpt.config.data import DataConfig
from megackpt.config.errors import UsageError
from megackpt.config.tokenizer import TokenizerConfig
from megackpt.data.tokenizer import SpecialIds, Tokenizer, build_tokenizer
from megackpt.data.tokenizer_tiktoken import _PATTERNS
from tests.data_room.tokenizer_files import (
    GPT2_PATTERN,
    TEXTS,
    bpe,
    gpt2_files,
    hugging_face,
    rank_file,
    rank_tokens,
    slow_bpe,
    slow_gpt2,
)


def gpt2(folder: Path) -> Tokenizer:
    vocab, merges = gpt2_files(folder)
    return build_tokenizer(TokenizerConfig(type="GPT2BPETokenizer", vocab_file=vocab, merge_file=merges))


def tiktoken(path: str, **more: Any) -> Tokenizer:
    return build_tokenizer(TokenizerConfig(type="TikTokenizer", model=path, **more))


def hf(folder: str, **more: Any) -> Tokenizer:
    return build_tokenizer(TokenizerConfig(type="HuggingFaceTokenizer", model=folder, **more))


def test_gpt2_ids_are_those_of_a_slow_bpe(tmp_path: Path) -> None:
    tokenizer = gpt2(tmp_path)
    vocab, _ = bpe()
    end = vocab["<|endoftext|>"]
    assert tokenizer.special == SpecialIds(bos=end, eos=end, eod=end) and tokenizer.vocab_size == len(vocab)
    expected = [slow_gpt2(text) for text in TEXTS]
    assert [tokenizer.tokenize(text) for text in TEXTS] == expected
    assert tokenizer.tokenize_batch(TEXTS, workers=2) == expected
    assert [tokenizer.detokenize(ids) for ids in expected] == TEXTS
    assert all(end not in ids for ids in expected)  # <|endoftext|> in a text is text
    assert any(len(ids) < len(text.encode()) for ids, text in zip(expected, TEXTS, strict=True))


def test_merge_file_alone_means_gpt2() -> None:
    config = DataConfig(mock_data=True, vocab_file="v", merge_file="m")
    assert config.tokenizer == TokenizerConfig(type="GPT2BPETokenizer", vocab_file="v", merge_file="m")
    assert DataConfig(mock_data=True, vocab_size=5).tokenizer is None
    with pytest.raises(UsageError, match="--tokenizer-type GPT2BPETokenizer needs --vocab-file and --merge-file"):
        DataConfig(mock_data=True, merge_file="m")


def test_tokenizer_json_gives_the_ids_of_its_bpe_and_sees_special_tokens(tmp_path: Path) -> None:
    tokenizer = hf(hugging_face(tmp_path / "h"))
    vocab, _ = bpe()
    end, first = vocab["<|endoftext|>"], len(vocab)
    assert tokenizer.special == SpecialIds(bos=first, eos=end, eod=end) and tokenizer.vocab_size == first + 1
    for text in TEXTS:
        parts = regex.split(r"(<\|endoftext\|>|<s>)", text)
        special = {"<|endoftext|>": [end], "<s>": [first]}
        expected = [i for part in parts for i in special.get(part, slow_gpt2(part))]
        assert tokenizer.tokenize(text) == expected and tokenizer.detokenize(expected) == text
    file = hf(os.path.join(tmp_path, "h", "tokenizer.json"))
    assert file.digest == tokenizer.digest and file.tokenize_batch(TEXTS, 3) == tokenizer.tokenize_batch(TEXTS)
    template = hf(hugging_face(tmp_path / "t", template=True), include_special_tokens=True)
    assert template.tokenize("cat") == [first, *slow_gpt2("cat")]
    assert template.tokenize_batch(["cat", ""], 2) == [[first, *slow_gpt2("cat")], [first]]
    assert hf(str(tmp_path / "t")).tokenize("cat") == slow_gpt2("cat")


NAMED: dict[str, tuple[dict[str, Any], tuple[int | None, int | None, int | None]]] = {
    "strings": ({"eos_token": "<s>", "bos_token": "<|endoftext|>"}, (-2, -1, None)),
    "objects": ({"eos_token": {"content": "<|endoftext|>", "lstrip": False}}, (None, -2, None)),
    "pad is eos": ({"eos_token": "<s>", "pad_token": "<s>"}, (None, -1, -1)),
    "none": ({"model_max_length": 5, "eos_token": None}, (None, None, None)),
}


@pytest.mark.parametrize("case", NAMED)
def test_special_ids_are_those_of_the_configuration(tmp_path: Path, case: str) -> None:
    """VC-07 for tokenizer.json; -1 and -2 count from the end of the vocabulary."""
    named, (bos, eos, pad) = NAMED[case]
    tokenizer = hf(hugging_face(tmp_path / "h", **named))
    own = [None if i is None else tokenizer.vocab_size + i for i in (bos, eos, pad)]
    assert tokenizer.special == SpecialIds(bos=own[0], eos=own[1], pad=own[2], unk=None, eod=own[1])
    for name, value in zip(("bos", "eos", "pad"), own, strict=True):
        if value is None:
            with pytest.raises(UsageError, match=f"this tokenizer has no {name} token"):
                getattr(tokenizer, name)


def test_a_special_token_without_an_id_or_an_ambiguous_one_is_no_id(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the eos token '</s>' of its configuration has no id"):
        hf(hugging_face(tmp_path / "h", eos_token="</s>"))
    folder = Path(hugging_face(tmp_path / "two"))
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][1], "id": content["added_tokens"][1]["id"] + 1,
                                    "content": "</s>"})  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert hf(str(folder)).special.eos is None  # <|endoftext|> or </s>?


@pytest.mark.parametrize("name", ["ranks.json", "ranks.tiktoken"])
@pytest.mark.parametrize("pattern", ["v1", "v2"])
def test_tiktoken_has_special_ids_first_and_the_ids_of_a_slow_bpe(tmp_path: Path, name: str, pattern: str) -> None:
    tokenizer = tiktoken(rank_file(tmp_path / name), tiktoken_num_special_tokens=10, tiktoken_pattern=pattern)
    tokens = rank_tokens()
    assert tokenizer.vocab_size == 10 + len(tokens)
    assert tokenizer.special == SpecialIds(bos=1, eos=2, pad=4, unk=0, eod=2)
    rank = {token: i for i, token in enumerate(tokens)}
    # tiktoken joins the pair whose joined token has the lowest rank.
    pairs = {(t[:i], t[i:]): r for t, r in rank.items() for i in range(1, len(t)) if t[:i] in rank and t[i:] in rank}
    for text in TEXTS:
        expected = [10 + rank[piece] for piece in slow_bpe(text, _PATTERNS[pattern], pairs)]
        assert tokenizer.tokenize(text) == expected and tokenizer.detokenize(expected) == text
    assert tokenizer.tokenize_batch(TEXTS, 2) == [tokenizer.tokenize(text) for text in TEXTS]
    assert tokenizer.detokenize([1, 8, 10 + ord("a"), 2]) == "<s><SPECIAL_8>a</s>"


def test_tiktoken_special_tokens_and_vocabulary(tmp_path: Path) -> None:
    file = rank_file(tmp_path / "r.json")
    named = tiktoken(file, tiktoken_num_special_tokens=4, tiktoken_special_tokens=("<a>", "</s>"))
    assert named.special == SpecialIds(eos=1, eod=1) and named.detokenize([0, 1, 2]) == "<a></s><SPECIAL_2>"
    assert tiktoken(file).vocab_size == 1000 + len(rank_tokens()) and tiktoken(file).tokenize("A") == [1065]
    fewer = tiktoken(file, tiktoken_num_special_tokens=3, vocab_size=3 + 256)
    assert fewer.special == SpecialIds(bos=1, eos=2, unk=0, eod=2) and len(fewer.tokenize("the cat")) == 7
    with pytest.raises(UsageError, match=r"Nearest valid: --vocab-size 259"):
        tiktoken(file, tiktoken_num_special_tokens=3, vocab_size=258)
    with pytest.raises(UsageError, match=rf"Nearest valid: --vocab-size {3 + len(rank_tokens())}"):
        tiktoken(file, tiktoken_num_special_tokens=3, vocab_size=70_000)
    with pytest.raises(UsageError, match=r"has room for 1. Nearest valid: --tiktoken-num-special-tokens 2"):
        tiktoken(file, tiktoken_num_special_tokens=1, tiktoken_special_tokens=("a", "b"))
    with pytest.raises(UsageError, match="a name stands there twice"):
        tiktoken(file, tiktoken_special_tokens=("a", "a"))


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    made = [gpt2(tmp_path), hf(hugging_face(tmp_path / "h")), tiktoken(rank_file(tmp_path / "r.json"))]
    made.append(build_tokenizer(TokenizerConfig(type="NullTokenizer", vocab_size=10)))
    for tokenizer in made:
        for bad in (-1, tokenizer.vocab_size):
            with pytest.raises(UsageError, match=f"id {bad} is outside 0 to {tokenizer.vocab_size - 1}"):
                tokenizer.detokenize([bad])


def test_digest_is_that_of_the_ids_and_not_of_the_layout_of_the_file(tmp_path: Path) -> None:
    a, b = (tmp_path / name for name in "ab")
    a.mkdir(), b.mkdir()  # type: ignore[func-returns-value]
    one, two = gpt2(a), gpt2(b)
    (b / "vocab.json").write_text(json.dumps(json.loads((b / "vocab.json").read_text()), indent=2))
    assert one.digest == two.digest == gpt2_again(b).digest
    lines = (b / "merges.txt").read_text().splitlines(keepends=True)
    (b / "merges.txt").write_text("".join([lines[0], lines[2], lines[1], *lines[3:]]))
    assert gpt2_again(b).digest != one.digest
    folder = Path(hugging_face(tmp_path / "h"))
    before = hf(str(folder)).digest
    (folder / "tokenizer.json").write_text(json.dumps(json.loads((folder / "tokenizer.json").read_text()), indent=1))
    assert hf(str(folder)).digest == before != hf(str(folder), include_special_tokens=True).digest
    files = [tiktoken(rank_file(tmp_path / name)).digest for name in ("r.json", "r.tiktoken")]
    assert files[0] == files[1] != tiktoken(rank_file(tmp_path / "r.json"), tiktoken_pattern="v1").digest
    assert one.identity()["digest"] == one.digest and one.identity()["special"]["eod"] == one.eod


def gpt2_again(folder: Path) -> Tokenizer:
    files = {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}
    return build_tokenizer(TokenizerConfig(type="GPT2BPETokenizer", **files))


def test_configuration_travels_to_other_processes(tmp_path: Path) -> None:
    vocab, merges = gpt2_files(tmp_path)
    config = TokenizerConfig(type="GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)
    assert pickle.loads(pickle.dumps(config)) == config


# -- files that are not what they should be ---------------------------------------------------------------------------


def edited(path: Path, change: Callable[[Any], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_damaged_gpt2_files_are_refused(tmp_path: Path) -> None:
    gpt2_files(tmp_path)
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    whole, lines = vocab.read_text(), merges.read_text()
    for change, message in [
        (lambda v: v.update({"zz": 7}), r"its 291 ids must be 0 to 290, each once"),
        (lambda v: v.update({"zz": 290.0}), r"its 291 ids must be"),
        (lambda v: v.update({"zz": True}), r"its 291 ids must be"),
        (lambda v: v.update({"A2": v.pop("A")}), "1 of the 256 bytes have no id: their text would be lost"),
        (lambda v: v.clear(), "must hold an object of pieces and ids"),
    ]:
        vocab.write_text(whole)
        edited(vocab, change)
        with pytest.raises(UsageError, match=message):
            gpt2_again(tmp_path)
    for text, message in [("[1]", "must hold an object"), ("{", "not JSON"), ("[" * 100_000, "not JSON")]:
        vocab.write_text(text)
        with pytest.raises(UsageError, match=f"--vocab-file .*vocab.json: .*{message}"):
            gpt2_again(tmp_path)
    vocab.write_text(whole)
    for text in ("#version: 0.2\nq\n", "a b c\n", "zz zz\n", "\x00 a\n"):
        merges.write_text(text)
        with pytest.raises(UsageError, match=r"merges.txt, line [12]: .* does not join two pieces"):
            gpt2_again(tmp_path)
    merges.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="merges.txt: is not text"):
        gpt2_again(tmp_path)
    merges.write_text(lines)
    edited(vocab, lambda v: v.update({"other": v.pop("<|endoftext|>")}))
    with pytest.raises(UsageError, match="this tokenizer has no eod token"):
        gpt2_again(tmp_path).eod  # noqa: B018
    merges.unlink()
    with pytest.raises(UsageError, match="--merge-file .*merges.txt: there is no such file; GPT-2's merges.txt is"):
        gpt2_again(tmp_path)


def test_damaged_tokenizer_json_is_refused(tmp_path: Path) -> None:
    folder = Path(hugging_face(tmp_path / "h"))
    file = folder / "tokenizer.json"
    whole = file.read_text()

    def nest(content: Any) -> None:
        for _ in range(100):
            content["normalizer"] = {"type": "Sequence", "normalizers": [content.get("normalizer")]}

    for change, message in [
        (lambda c: c.pop("model"), "it has no model with a vocab"),
        (lambda c: c["model"].update(vocab=5), "it has no model with a vocab"),
        (lambda c: c["model"].update(type="RNN"), "its model is a RNN, known are BPE, Unigram"),
        (lambda c: c["model"].update(merges=[["q", "zzz"]]), "is not a tokenizer that `tokenizers` can read"),
        (lambda c: c["model"]["vocab"].update(a=4_000_000_000), "tokens but ids up to 4000000000: it is damaged"),
        (lambda c: c["added_tokens"][0].update(id=70_000), r"is to have the id 70000, but \d+ is the next"),
        (nest, "is nested deeper than 64 levels"),
    ]:
        file.write_text(whole)
        edited(file, change)
        with pytest.raises(UsageError, match=message):
            hf(str(folder))
    file.write_text(whole)
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(UsageError, match="tokenizer_config.json: must hold an object"):
        hf(str(folder))
    with pytest.raises(UsageError, match="Names of a hub are not looked up: download the tokenizer"):
        hf("meta/llama")
    with pytest.raises(UsageError, match="tokenizer.json: there is no such file"):
        hf(str(tmp_path))


def test_damaged_rank_files_are_refused(tmp_path: Path) -> None:
    path = Path(rank_file(tmp_path / "r.json"))
    whole = path.read_text()
    for change, message in [
        (lambda c: c[5].update(rank=6), 'entry 5 must be an object with "rank": 5'),
        (lambda c: c[5].update(token_bytes="?"), "the token of rank 5 is not 1 to 4096 bytes in base64"),
        (lambda c: c[5].update(token_bytes=""), "the token of rank 5 is not"),
        (lambda c: c[5].update(token_bytes=None), "the token of rank 5 is not"),
        (lambda c: c[5].update(token_bytes=base64.b64encode(b"x" * 5000).decode()), "the token of rank 5 is not"),
        (lambda c: c[280].update(token_bytes=c[279]["token_bytes"]), "a token has two ranks"),
        (lambda c: c[5].update(token_bytes=base64.b64encode(b"xyzq").decode()), "the single bytes, 1 of them are not"),
        (lambda c: c.clear(), "the single bytes, 256 of them are not"),
    ]:
        path.write_text(whole)
        edited(path, change)
        with pytest.raises(UsageError, match=f"r.json: .*{message}"):
            tiktoken(str(path))
    path.write_bytes(b"YQ== 0\nYg== 2\n")
    with pytest.raises(UsageError, match="line 2 must be a token in base64 and 1"):
        tiktoken(str(path))


def test_the_pattern_of_the_slow_bpe_is_gpt2s() -> None:
    assert regex.findall(GPT2_PATTERN, "it's  12 x") == ["it", "'s", " ", " 12", " x"]
