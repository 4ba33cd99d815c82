"""The words of a pipeline layout, as Megatron's documentation has them."""

from __future__ import annotations

import pytest

from megackpt.config.errors import UsageError
from megackpt.config.stage_layout import layer_counts


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("EtL", (1,)),
        ("Et*3|(tt|)*29,t|L", (3, *[2] * 29, 1, 0)),  # the documented example, its m a t
        ("E|(t|)*3 , t|t||L", (0, 1, 1, 1, 1, 1, 0, 0)),
        ("E||t|L", (0, 0, 1, 0)),
        ("Et|(t*2|(t|)*2)*2tL", (1, 2, 1, 1, 2, 1, 1, 1)),
        ("E,(t)*4,L", (4,)),
        ("Et|*2tL", (1, 0, 1)),
    ],
)
def test_layers_of_every_chunk(text: str, counts: tuple[int, ...]) -> None:
    assert layer_counts(text) == counts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Ett|m|L", "at character 5: megackpt has no multi-token-prediction layers (m)."),
        ("Ett|x|L", "at character 5: 'x' is none of E, t, L, |, *, ( and )."),
        ("Et*|L", "at character 4: a number belongs after *."),
        ("E(t|*2L", "at character 8: a ( without its )."),
        ("Et)|L", "at character 3: a ) without its (."),
        ("tt|tL", "E (the embedding) belongs once into the first chunk, and nowhere else."),
        ("Et|EtL", "E (the embedding) belongs once into the first chunk, and nowhere else."),
        ("Et*2|tLL", "L (the loss) belongs once into the last chunk, and nowhere else."),
        ("EtL|t", "L (the loss) belongs once into the last chunk, and nowhere else."),
        ("tE|tL", "E comes before all layers and L after all of them."),
        ("", "E (the embedding) belongs once into the first chunk, and nowhere else."),
        ("Et*99999999999999999999L", "at character 24: repeated, this comes to more than 100000 letters."),
        ("E(t*1000)*1000L", "at character 15: repeated, this comes to more than 100000 letters."),
        ("Et*60000t*60000L", "at character 16: more than 100000 letters so far."),
        ("Et*²L", "at character 4: a number belongs after *."),
        ("E" + "(" * 3000 + "t" + ")" * 3000 + "L", "at character 53: more than 50 brackets in one another."),
    ],
)
def test_what_is_no_layout(text: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        layer_counts(text)
    assert str(refused.value).startswith(f"--pipeline-model-parallel-layout {text!r}")
    assert str(refused.value).endswith(message)
