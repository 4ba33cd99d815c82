"""The command lines of `megackpt convert` and `megackpt generate`: what they refuse, and what they print."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megackpt.cli.main import main
from megackpt.persist.convert import read_folder, write_checkpoint
from tests.persist.convert.made import GPT2, equal, tensors_of, weights_of


def ends(argv: list[str]) -> int:
    try:
        return main(argv)
    except SystemExit as end:
        assert isinstance(end.code, int)
        return end.code


def test_a_checkpoint_becomes_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "ours", weights_of(GPT2))
    argv = ["convert", "--load", str(tmp_path / "ours"), "--save", str(tmp_path / "theirs")]
    assert ends(argv) == 0
    assert "5 layers, hidden 48, vocabulary 257, float32" in capsys.readouterr().out
    assert equal(read_folder(tmp_path / "theirs"), tensors_of(GPT2))
    assert ends(argv) == 2
    assert f"{tmp_path / 'theirs'} exists already: give a new folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["convert", "--load", "{}/none", "--save", "{}/b"], 2, "{}/none is not a folder"),
        (["convert", "--load", "{}", "--save", "{}/b"], 2, "{} is none of: a Hugging Face folder (config.json)"),
        (["convert", "--load", "{}/ours", "--save", "{}/b", "--iteration", "3"], 2, "no checkpoint of iteration 3"),
        (["convert", "--load", "{}/ours", "--save", "{}/b", "--max-file-gib", "0"], 2, "--max-file-gib must be above"),
        (["convert", "--load", "{}/ours", "--save", "{}/b", "--vocab-size", "300"], 2, "has 257 rows"),
        (["convert", "--load", "{}/ours", "--save", "{}/ours/"], 2, "--save {}/ours/ is what --load reads"),
        (["convert", "--load", "{}/ours", "--save", "/proc/none/b"], 2, "/proc/none/b cannot be written: [Errno 2]"),
        (["generate", "--load", "{}/ours", "--prompt", "1", "--num-tokens", "0"], 2, "--num-tokens must be at least 1"),
        (["generate", "--load", "{}/ours", "--prompt", "1", "--top-k", "5"], 2, "no effect without --temperature"),
        (
            ["generate", "--load", "{}/ours", "--prompt", "1", "--tensor-model-parallel-size", "2"],
            2,
            "torchrun --nproc-per-node 2 -m megackpt.cli generate",
        ),
    ],
)
def test_refusals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], code: int, words: str
) -> None:
    write_checkpoint(tmp_path / "ours", weights_of(GPT2))
    assert ends([word.format(tmp_path) for word in argv]) == code
    said = capsys.readouterr().err
    assert words.format(tmp_path) in said and said.count("error:") == 1


def test_a_damaged_checkpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_checkpoint(tmp_path / "ours", weights_of(GPT2)) / "rank_00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    assert ends(["convert", "--load", str(tmp_path / "ours"), "--save", str(tmp_path / "b")]) == 2
    assert "rank_00000.safetensors has changed since it was written" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_another_checkpoint_than_the_newest_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = write_checkpoint(tmp_path / "ours", weights_of(GPT2))
    torn = whole.with_name("iter_0000003")
    shutil.copytree(whole, torn)
    (torn / "rank_00000.safetensors").write_bytes(b"")
    (tmp_path / "ours" / "latest_checkpointed_iteration.txt").write_text("3")
    argv = ["generate", "--load", str(tmp_path / "ours"), "--prompt", "7 8", "--num-tokens", "2"]
    assert ends(argv) == 0
    out, err = capsys.readouterr()
    assert out.startswith("7 8 ") and len(out.split()) == 4
    assert err.startswith(f"megackpt: {torn} is not whole: ") and err.endswith(": loading iter_0000000 instead\n"), err
    shutil.rmtree(torn)
    assert ends(argv) == 0
    assert capsys.readouterr().out == out
