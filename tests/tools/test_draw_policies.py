"""The picture of the policies says what the design's table says, and is the one in docs/."""
from __future__ import annotations

from tests.pool import ROOT
from tools.draw_policies import GPT3, OUTPUT, draw, rows


def test_bytes_and_shares_are_those_of_the_policy_table() -> None:
    s, h = GPT3.seq, GPT3.hidden
    whole = 72 + 12 * s / h
    expected = {
        "none": (32, 0.0),
        "free": (20, 0.0),
        "selective": (30, 4 * s / h / whole),
        "full": (4, (14 + 4 * s / h) / whole),
        "full, layer input only": (2, (16 + 4 * s / h) / whole),
        "torch.utils.checkpoint": (2, 1 / 3),
    }
    assert {row.name: (row.kept_bytes, round(row.share, 12)) for row in rows()} == {
        name: (kept, round(share, 12)) for name, (kept, share) in expected.items()
    }


def test_consumers_and_reductions_are_not_run_again() -> None:
    by_name = {row.name: row.rebuilt for row in rows()}
    for name in ("none", "free", "selective", "full"):
        assert not by_name[name] & {"attn.proj", "attn.reduce", "mlp.down", "mlp.reduce"}
    assert by_name["full, layer input only"] & {"attn.proj", "attn.reduce", "mlp.down", "mlp.reduce"} == {
        "attn.proj", "attn.reduce",
    }  # fmt: skip


def test_the_picture_in_docs_is_current() -> None:
    assert (ROOT / OUTPUT).read_text() == draw(rows())
