"""How many tokens a run has, and tokens of another tokenizer."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from megackpt.config.errors import UsageError
from megackpt.config.run import RunConfig
from megackpt.data.cache import Arrays, cached_arrays
from megackpt.data.indexed_writer import IndexedWriter
from megackpt.mesh.launch import LaunchEnvironment
from megackpt.train.agree import together
from megackpt.train.checkpoint import load_run
from megackpt.train.loop import run, train
from tests.data_room.tokenizer_files import gpt2_files
from tests.layouts import SMALL_GPT, Flags, Layout, built, logged, train_all
from tests.pool import run_distributed


def _flags(folder: Path, highest: int) -> Flags:
    """A run over documents whose tokens go up to `highest`, each ended by it."""
    with IndexedWriter(folder / "data", np.dtype("<u2")) as writer:
        for first in range(40):
            writer.add([*range(first, first + 20), highest])
    given = {key: value for key, value in SMALL_GPT.items() if key != "mock-data"}
    return given | {"data-path": str(folder / "data"), "train-iters": 2, "split": "1,0,0"}


def test_null_tokenizer_counts_its_end_of_document(tmp_path: Path) -> None:
    """--vocab-size is the user's ids, 0 to 508; the end of a document is 509, which a run can be trained on."""
    flags = _flags(tmp_path, 509) | {"tokenizer-type": "NullTokenizer", "metrics-file": str(tmp_path / "log.jsonl")}
    run_distributed(train_all, 1, flags, Layout())
    assert [number for (number,) in logged(tmp_path / "log.jsonl", "iteration")] == [1, 2]


def _refused(rank: int, world_size: int, flags: Flags, layout: Layout) -> str:
    with pytest.raises(UsageError) as refusal:
        built(flags, layout)
    return str(refusal.value)


def test_data_of_another_tokenizer_is_refused_before_the_first_step(tmp_path: Path) -> None:
    first, second = run_distributed(_refused, 2, _flags(tmp_path, 509), Layout(pp=2))
    assert first == second
    assert f"{tmp_path}/data: holds token ids from" in first and "to 509, but there are 509 ids" in first


def test_a_token_too_large_in_the_middle_of_a_run_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with IndexedWriter(tmp_path / "data", np.dtype("<u2")) as writer:
        for document in range(60):
            writer.add([*range(20), 600 if document == 30 else 508])
    flags = {key: value for key, value in SMALL_GPT.items() if key != "mock-data"} | {"device": "cpu"}
    flags |= {"data-path": str(tmp_path / "data"), "split": "1,0,0", "train-iters": 20, "log-interval": 1}
    assert run(RunConfig.from_flags(flags), LaunchEnvironment.detect({})) == 1
    out, err = capsys.readouterr()
    assert "iteration        1/      20" in out and "iteration       20/" not in out
    assert err.count("megackpt: error: ") == 1 and "Traceback" not in err
    assert f"UsageError: {tmp_path}/data: holds token ids from 0 to 600, but there are 509 ids" in err


def _resumed_with(rank: int, world_size: int, flags: Flags, other: Flags) -> list[str]:
    """Saved by a run with one tokenizer; what a run with another says, without and with --finetune."""
    train(built(flags))
    said = []
    for more in ({}, {"finetune": True}):
        trainer = built({**flags, **other, **more, "load": flags["save"], "train-iters": 3})
        try:
            said.append(" ".join(load_run(trainer).messages))
        except UsageError as refusal:
            said.append(f"REFUSED {refusal}")
    return said


def test_tokenizer_of_the_checkpoint_is_compared(tmp_path: Path) -> None:
    """The same file in another place is the same tokenizer; another one is refused, and with --finetune it is said."""
    vocab, merges = gpt2_files(tmp_path)
    size = len(json.loads(Path(vocab).read_text()))
    files: Flags = {"tokenizer-type": "GPT2BPETokenizer", "vocab-file": vocab, "merge-file": merges}
    flags = {k: v for k, v in _flags(tmp_path, size - 1).items() if k != "vocab-size"}
    flags |= {**files, "save": str(tmp_path / "save")}
    (tmp_path / "same").mkdir()
    moved = gpt2_files(tmp_path / "same")
    (same,) = run_distributed(_resumed_with, 1, flags, {"vocab-file": moved[0], "merge-file": moved[1]})
    assert "iteration 2" in same[0] and "not that of the checkpoint" not in " ".join(same)
    lines = Path(moved[1]).read_text().splitlines(keepends=True)
    Path(moved[1]).write_text("".join([lines[0], lines[2], lines[1], *lines[3:]]))
    (other,) = run_distributed(_resumed_with, 1, flags, {"vocab-file": moved[0], "merge-file": moved[1]})
    assert other[0].startswith("REFUSED the tokenizer is not that of the checkpoint: GPT2BPETokenizer")
    assert "--finetune" in other[0] and "the tokenizer is not that of the checkpoint" in other[1]
    null: Flags = {"tokenizer-type": "NullTokenizer", "vocab-size": size - 1}
    (prepared,) = run_distributed(_resumed_with, 1, flags, null)
    assert "iteration 2" in prepared[0] and "not that of the checkpoint" not in prepared[0]


def _slow_build(rank: int, world_size: int, folder: str) -> float:
    """Rank 0 builds an index for longer than the collectives of the group may take; rank 1 waits for it."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    dist.barrier()
    if rank == 1:
        time.sleep(0.3)  # rank 0 has the lock by then

    def build() -> Arrays:
        assert rank == 0
        time.sleep(4)
        return {"a": np.arange(3)}

    begin = time.monotonic()
    found = together(lambda: cached_arrays(folder, {"what": "slow"}, build))
    dist.barrier(group=group)
    assert found["a"].tolist() == [0, 1, 2]
    return time.monotonic() - begin


def test_an_index_that_takes_long_times_no_collective_out(tmp_path: Path) -> None:
    """OP-06: the others wait at a file lock, not in a collective."""
    seconds = run_distributed(_slow_build, 2, str(tmp_path / "cache"))
    assert min(seconds) > 3
