"""What may leave the process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from megackpt.observe.redaction import HIDDEN, is_secret, redact


@pytest.mark.parametrize(
    "key",
    ["token", "hf_token", "HF_TOKEN", "apikey", "api-key", "WANDB_API_KEY", "client_secret", "dbPassword",
     "accessTokens", "tokenizer_token", "tokenizer-api-key"],
)  # fmt: skip
def test_secret_keys(key: str) -> None:
    assert is_secret(key)
    assert redact({key: "abc"}) == {key: HIDDEN}
    assert redact({"outer": [{key: ["abc", {"x": 1}]}]}) == {"outer": [{key: HIDDEN}]}


@pytest.mark.parametrize("key", ["tokenizer_type", "tokenizer_model", "tokenizer", "tokenized_path", "hidden_size"])
def test_known_words_are_shown(key: str) -> None:
    assert redact({key: "abc"}) == {key: "abc"}


def test_switches_and_nothing_are_shown_numbers_are_not() -> None:
    assert redact({"apply_query_key_layer_scaling": True, "hf_token": None, "password": 1234}) == {
        "apply_query_key_layer_scaling": True,
        "hf_token": None,
        "password": HIDDEN,
    }


def test_texts() -> None:
    assert redact({"data_path": "https://me:pw@host/x"}) == {"data_path": f"https://{HIDDEN}@host/x"}
    assert redact(["A_TOKEN=abc", "tokenizer_model=m"]) == [f"A_TOKEN={HIDDEN}", "tokenizer_model=m"]
    assert redact(["--api-key", "abc", "--hidden-size", "64"]) == ["--api-key", HIDDEN, "--hidden-size", "64"]
    assert redact(["--use-token", "--hidden-size", "64"]) == ["--use-token", "--hidden-size", "64"]


def test_dataclasses_become_plain() -> None:
    @dataclass(frozen=True)
    class Inner:
        secret: str
        path: Path

    @dataclass(frozen=True)
    class Outer:
        inner: Inner
        sizes: tuple[int, ...]

    assert redact(Outer(Inner("abc", Path("a/b")), (1, 2))) == {
        "inner": {"secret": HIDDEN, "path": "a/b"},
        "sizes": [1, 2],
    }
