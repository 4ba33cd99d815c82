"""What the checkpoint flags do to a run, in the trainer."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megackpt.config.errors import UsageError
from megackpt.config.parse import parse_all
from megackpt.config.run import RunConfig
from megackpt.data.indexed_writer import IndexedWriter
from megackpt.mesh.launch import LaunchEnvironment
from megackpt.persist.manifest import Manifest, digest_of
from megackpt.train.checkpoint import Start, load_run
from megackpt.train.loop import run, train
from tests.layouts import (
    SMALL_GPT,
    Flags,
    Layout,
    WatchedDataset,
    built,
    logged,
    train_all,
    whole_weights,
    words,
)
from tests.pool import DistributedFailure, run_distributed

FULL = pytest.mark.full
DROPOUT = SMALL_GPT | {"hidden-dropout": 0.1, "attention-dropout": 0.1}


def iterations(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.iterdir() if path.is_dir())


def started(rank: int, world: int, flags: Flags, layout: Layout) -> tuple[Start, dict[str, Any]]:
    """Where a run would begin, and its state then."""
    trainer = built(flags, layout)
    start = load_run(trainer)
    optimizer = sum(float(t.abs().sum()) for k in ("exp_avg",) for t in trainer.optimizer.state_tensors()[k].values())
    rng = trainer.ledger.state_dict()
    return start, {"weights": whole_weights(trainer), "moments": optimizer, "rng": dict(rng)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of five steps with a checkpoint after each but the first."""
    folder = tmp_path_factory.mktemp("saved")
    run_distributed(train_all, 1, DROPOUT | {"save": str(folder / "run"), "save-interval": 2}, Layout())
    assert iterations(folder / "run") == [2, 4, 5]
    return folder / "run"


# -- what is loaded ----------------------------------------------------------------------------------------------------


def test_parts_that_are_not_loaded_begin_afresh(saved: Path) -> None:
    load: Flags = DROPOUT | {"load": str(saved)}
    ((everything, full),) = run_distributed(started, 1, load, Layout())
    assert everything.position.iteration == 5 and full["moments"] > 0
    assert all(position > 0 for position in full["rng"].values())
    ((_, state),) = run_distributed(started, 1, load | {"no-load-optim": True}, Layout())
    assert state["moments"] == 0 and state["rng"] == full["rng"]
    ((_, state),) = run_distributed(started, 1, load | {"no-load-rng": True}, Layout())
    assert state["moments"] == full["moments"] and all(position == 0 for position in state["rng"].values())
    ((start, state),) = run_distributed(started, 1, load | {"finetune": True}, Layout())
    assert start.position.iteration == start.position.consumed_samples == 0
    assert state["moments"] == 0 and all(position == 0 for position in state["rng"].values())
    assert all(torch.equal(weight, full["weights"][name]) for name, weight in state["weights"].items())


@pytest.mark.parametrize("flag", ["no-save-optim", "no-save-rng"])
def test_parts_that_are_not_saved_are_asked_for_by_name(tmp_path: Path, flag: str) -> None:
    flags = DROPOUT | {"train-iters": 1, "save": str(tmp_path), flag: True}
    run_distributed(train_all, 1, flags, Layout())
    what = flag.removeprefix("no-save-")
    keys = Manifest.read(tmp_path / "iter_0000001").groups
    assert keys == {"model", "optimizer", "rng"} - {"optimizer" if what == "optim" else "rng"}
    with pytest.raises(DistributedFailure, match=f"--no-load-{what}"):
        run_distributed(started, 1, flags | {"load": str(tmp_path)}, Layout())
    ((start, _),) = run_distributed(started, 1, flags | {"load": str(tmp_path), f"no-load-{what}": True}, Layout())
    assert start.position.iteration == 1


def test_one_iteration_by_its_number(saved: Path) -> None:
    ((start, _),) = run_distributed(started, 1, DROPOUT | {"load": str(saved), "ckpt-step": 2}, Layout())
    assert start.position.iteration == 2
    with pytest.raises(DistributedFailure, match=r"no checkpoint of iteration 3; it has \[2, 4, 5\]"):
        run_distributed(started, 1, DROPOUT | {"load": str(saved), "ckpt-step": 3}, Layout())
    with pytest.raises(DistributedFailure, match=r"iter_0000004 is one checkpoint; --load takes the folder around it"):
        run_distributed(started, 1, DROPOUT | {"load": str(saved / "iter_0000004")}, Layout())


def test_pretrained_weights_count_until_there_is_a_checkpoint(saved: Path, tmp_path: Path) -> None:
    flags = DROPOUT | {"load": str(tmp_path), "save": str(tmp_path), "pretrained-checkpoint": str(saved)}
    ((start, state),) = run_distributed(started, 1, flags, Layout())
    assert start.position.iteration == 0 and state["moments"] == 0
    ((_, full),) = run_distributed(started, 1, DROPOUT | {"load": str(saved)}, Layout())
    assert all(torch.equal(weight, full["weights"][name]) for name, weight in state["weights"].items())
    run_distributed(train_all, 1, flags | {"exit-interval": 1}, Layout())
    ((start, _),) = run_distributed(started, 1, flags, Layout())
    assert start.position.iteration == 1


def test_a_missing_checkpoint_can_be_the_end(saved: Path, tmp_path: Path) -> None:
    flags = DROPOUT | {"load": str(tmp_path / "typo")}
    ((start, _),) = run_distributed(started, 1, flags, Layout())
    assert start.messages == (f"{tmp_path}/typo has no checkpoint: starting afresh",)
    with pytest.raises(DistributedFailure, match=r"typo has no checkpoint, and --exit-on-missing-checkpoint was given"):
        run_distributed(started, 1, flags | {"exit-on-missing-checkpoint": True}, Layout())
    (tmp_path / "typo").touch()
    with pytest.raises(DistributedFailure, match=r"typo is a file; --load and --pretrained-checkpoint take"):
        run_distributed(started, 1, flags, Layout())


def without_a_tensor(source: Path, target: Path, key: str) -> Path:
    """A copy of a whole checkpoint whose manifest never heard of a tensor."""
    shutil.copytree(source, target)
    directory = target / "iter_0000005"
    manifest = Manifest.read(directory)
    del manifest.tensors[key]
    (directory / "manifest.json").write_bytes(manifest.to_bytes())
    for older in ("iter_0000002", "iter_0000004"):
        shutil.rmtree(target / older)
    return target


def test_a_missing_tensor_is_named_and_an_error_unless_it_is_allowed(saved: Path, tmp_path: Path) -> None:  # CK-12
    key = "model.layers.1.mlp.up.weight"
    load = DROPOUT | {"load": str(without_a_tensor(saved, tmp_path / "less", key))}
    for words_ in ({}, {"dist-ckpt-strictness": "raise_unexpected"}, {"dist-ckpt-strictness": "assume_ok_unexpected"}):
        with pytest.raises(DistributedFailure, match=rf"lacks {key}, which this run has"):
            run_distributed(started, 1, load | words_, Layout())
    for word in ("log_all", "log_unexpected"):
        ((start, _),) = run_distributed(started, 1, load | {"dist-ckpt-strictness": word}, Layout())
        assert start.position.iteration == 5 and f"lacks {key}, which this run has" in start.messages[0]
    ((start, _),) = run_distributed(started, 1, load | {"dist-ckpt-strictness": "ignore_all"}, Layout())
    assert start.messages[0].endswith("1 tensors of this run are not there, 0 others are ignored")


def test_a_surplus_tensor_is_an_error_or_named(saved: Path) -> None:
    shallow = DROPOUT | {"load": str(saved), "num-layers": 1, "no-load-optim": True, "no-load-rng": True}
    with pytest.raises(DistributedFailure, match=r"has model\.layers\.1\.\S+, .* and 7 more, which this run has not"):
        run_distributed(started, 1, shallow, Layout())
    for word in ("raise_unexpected", "log_all"):
        ((start, _),) = run_distributed(started, 1, shallow | {"dist-ckpt-strictness": word}, Layout())
        assert "which this run has not" in start.messages[0]


# -- the model as the checkpoint has it --------------------------------------------------------------------------------


def test_the_model_comes_from_the_checkpoint(saved: Path) -> None:
    given: Flags = DROPOUT | {"load": str(saved), "use-checkpoint-args": True, "num-layers": 9, "hidden-dropout": 0.3}
    for name in ("hidden-size", "num-attention-heads", "ffn-hidden-size", "max-position-embeddings"):
        del given[name]
    parsed = parse_all(words(given), {}, 1)
    model = parsed.config.model
    assert (model.num_layers, model.hidden_size, model.num_attention_heads, model.ffn_hidden_size) == (2, 48, 4, 168)
    assert model.max_position_embeddings == 20 and model.vocab_size == 509
    assert model.hidden_dropout == 0.3 and model.attention_dropout == 0.1  # training may choose these
    assert any("--num-layers 2 instead of 9, from" in notice for notice in parsed.notices)
    assert parse_all(["--config", "/dev/null", *words(DROPOUT)], {}, 1).config.model.num_layers == 2


def test_the_arguments_of_a_checkpoint_need_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--use-checkpoint-args needs --load"):
        parse_all(words(DROPOUT | {"use-checkpoint-args": True}), {}, 1)
    with pytest.raises(UsageError, match=f"{tmp_path} has no checkpoint with a readable run.json"):
        parse_all(words(DROPOUT | {"use-checkpoint-args": True, "load": str(tmp_path)}), {}, 1)
    (tmp_path / "iter_0000001").mkdir()
    (tmp_path / "iter_0000001" / "run.json").write_text(json.dumps({"extra": {"config": "model: 3"}}))
    with pytest.raises(UsageError, match=f"{tmp_path} has no checkpoint with a readable run.json"):
        parse_all(words(DROPOUT | {"use-checkpoint-args": True, "load": str(tmp_path)}), {}, 1)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"async-save": True}, "--async-save needs --save"),
        ({"save-retain-interval": 3}, "--save-retain-interval 3 needs --save"),
        ({"save-retain-last": 3}, "--save-retain-last 3 needs --save"),
        ({"ckpt-step": 0}, "--ckpt-step 0 needs --load"),
        ({"exit-on-missing-checkpoint": True}, "--exit-on-missing-checkpoint needs --load"),
        ({"ckpt-format": "zarr"}, "--ckpt-format takes torch_dist or torch; got 'zarr'"),
        ({"dist-ckpt-strictness": "raise"}, "--dist-ckpt-strictness takes raise_all"),
    ],
)
def test_flags_that_cannot_be_meant_are_refused(flags: Flags, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_all(words(SMALL_GPT | flags), {}, 1)


def test_one_file_cannot_hold_a_sharded_optimizer() -> None:
    flags = SMALL_GPT | {"ckpt-format": "torch", "save": "runs", "use-distributed-optimizer": True}
    with pytest.raises(UsageError, match=r"--ckpt-format torch contradicts --use-distributed-optimizer over 2 data-"):
        parse_all(words(flags), {}, 2)
    assert parse_all(words(flags), {}, 1).config.checkpoint.format == "torch"
    assert not parse_all(words(flags | {"no-save-optim": True}), {}, 2).config.checkpoint.save_optim


# -- how it is saved ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, pp=2), Layout(pp=2, vp=2), Layout(dp=2)], ids=str)
def test_saves_beside_training_are_those_of_blocking_ones(tmp_path: Path, layout: Layout) -> None:  # CD-04
    """Every file, to the bit; the last save is whole although the run ends right after it."""
    deep = DROPOUT | {"num-layers": 4, "save-interval": 1}
    contents = []
    for name, extra in (("blocking", {}), ("beside", {"async-save": True})):
        flags = deep | extra | {"save": str(tmp_path / name)}
        run_distributed(train_all, layout.world_size, flags, layout, timeout=60)
        paths = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file() and path.name != "run.json")
        contents.append({str(path.relative_to(tmp_path / name)): path.read_bytes() for path in paths})
    assert iterations(tmp_path / "beside") == [1, 2, 3, 4, 5]
    blocking, beside = contents
    assert beside.keys() == blocking.keys()
    files = [name for name in blocking if name.endswith(".safetensors")]
    assert [name for name in files if beside[name] != blocking[name]] == [] and len(files) >= 5


@pytest.mark.parametrize("how", [{"async-save": True}, {"ckpt-format": "torch"}], ids=["beside", "torch"])
def test_resuming_from_every_kind_of_save_is_exact(tmp_path: Path, how: Flags) -> None:
    layout = Layout(tp=2, pp=2)
    whole = DROPOUT | {"metrics-file": str(tmp_path / "whole.jsonl")}
    run_distributed(train_all, 4, whole, layout)
    parts = DROPOUT | how | {"save": str(tmp_path / "s"), "load": str(tmp_path / "s"), "save-interval": 1}
    parts |= {"metrics-file": str(tmp_path / "parts.jsonl"), "save-retain-last": 2}
    run_distributed(train_all, 4, parts | {"exit-interval": 2}, layout)
    assert iterations(tmp_path / "s") == [1, 2]
    run_distributed(train_all, 4, parts, layout)
    assert iterations(tmp_path / "s") == [4, 5]
    watched = ("iteration", "lm_loss", "grad_norm")
    assert logged(tmp_path / "parts.jsonl", *watched) == logged(tmp_path / "whole.jsonl", *watched)


def _killed(rank: int, world: int, flags: Flags, layout: Layout, victim: int, after: float) -> None:
    if rank == victim:
        timer = threading.Timer(after, lambda: os.kill(os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    train(built(flags, layout))


@pytest.mark.parametrize(
    ("victim", "after"), [(3, 0.6), pytest.param(0, 0.4, marks=FULL), pytest.param(1, 0.8, marks=FULL)]
)
def test_a_rank_that_is_killed_while_it_trains_and_saves(tmp_path: Path, victim: int, after: float) -> None:  # CD-01
    layout, watched = Layout(tp=2, pp=2), ("iteration", "lm_loss", "grad_norm")
    whole = DROPOUT | {"train-iters": 40, "metrics-file": str(tmp_path / "whole.jsonl")}
    run_distributed(train_all, 4, whole, layout, timeout=60)
    flags = DROPOUT | {"train-iters": 40, "save": str(tmp_path / "s"), "load": str(tmp_path / "s")}
    flags |= {"save-interval": 1, "async-save": True, "save-retain-last": 1, "distributed-timeout-minutes": 1}
    for _ in range(2):
        try:
            run_distributed(_killed, 4, flags, layout, victim, after, timeout=60)
        except DistributedFailure as failure:
            assert "SIGKILL" in str(failure)
    flags |= {"metrics-file": str(tmp_path / "parts.jsonl")}
    run_distributed(train_all, 4, flags, layout, timeout=60)
    assert iterations(tmp_path / "s") == [40]
    seen = logged(tmp_path / "parts.jsonl", *watched)
    assert seen and seen == logged(tmp_path / "whole.jsonl", *watched)[-len(seen) :]


# -- the data goes on --------------------------------------------------------------------------------------------------


def _samples(rank: int, world: int, flags: Flags, layout: Layout) -> tuple[list[int], int, int]:
    trainer = built(flags, layout)
    read: list[int] = []
    object.__setattr__(trainer.datasets, "train", WatchedDataset(trainer.datasets.train, read))
    where = train(trainer)
    return read, where.iteration, where.consumed_samples


def by_step(found: list[tuple[list[int], int, int]], dp: int, batch: int) -> list[list[int]]:
    """The samples of every step, over data-parallel ranks."""
    reads = [read for read, _, _ in found[:dp]]
    share = batch // dp
    steps = len(reads[0]) // share
    assert all(len(read) == steps * share for read in reads)  # CK-11: equal step counts
    return [sorted(n for read in reads for n in read[k * share : (k + 1) * share]) for k in range(steps)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("data") / "corpus"
    draw = np.random.default_rng(0)
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        for _ in range(30):
            writer.add(np.cumsum(draw.integers(0, 9, draw.integers(5, 100))) % 509)
    return prefix


@pytest.mark.parametrize(
    ("before", "after", "micro"),
    [(2, 1, (2, 2)), (2, 4, (2, 2)), (1, 1, (1, 1)), (1, 1, (1, 2)), (1, 2, (1, 1))],
    ids=["dp2-to-1", "dp2-to-4", "m8", "m8-to-m4", "m8-to-dp2-m4"],
)
def test_the_global_order_of_samples_goes_on(
    corpus: Path, tmp_path: Path, before: int, after: int, micro: tuple[int, int]
) -> None:  # CK-02, CK-16
    flags = {key: value for key, value in SMALL_GPT.items() if key != "mock-data"} | {
        "data-path": str(corpus),
        "data-cache-path": str(tmp_path / "cache"),
        "global-batch-size": 8,
        "train-iters": 6,
    }
    expected = by_step(run_distributed(_samples, 1, flags, Layout()), 1, 8)
    parts = flags | {"save": str(tmp_path / "s"), "load": str(tmp_path / "s")}
    first = parts | {"exit-interval": 2, "micro-batch-size": micro[0]}
    found = by_step(run_distributed(_samples, before, first, Layout(dp=before)), before, 8)
    second = run_distributed(_samples, after, parts | {"micro-batch-size": micro[1]}, Layout(dp=after))
    assert found + by_step(second, after, 8) == expected
    assert {(iteration, consumed) for _, iteration, consumed in second} == {(6, 48)}


def test_a_tail_that_does_not_fill_a_step_is_left_on_every_rank(corpus: Path, tmp_path: Path) -> None:  # CK-11
    flags = {key: value for key, value in SMALL_GPT.items() if key not in ("mock-data", "train-iters")} | {
        "data-path": str(corpus),
        "data-cache-path": str(tmp_path / "cache"),
        "global-batch-size": 8,
        "train-samples": 30,
    }
    found = run_distributed(_samples, 2, flags, Layout(dp=2), timeout=60)
    assert len(by_step(found, 2, 8)) == 3
    assert [(iteration, consumed) for _, iteration, consumed in found] == [(3, 24), (3, 24)]


def test_other_data_are_announced(corpus: Path, saved: Path, tmp_path: Path) -> None:  # CK-04
    flags = {key: value for key, value in DROPOUT.items() if key != "mock-data"} | {"load": str(saved)}
    flags |= {"data-path": str(corpus), "data-cache-path": str(tmp_path / "cache")}
    ((start, _),) = run_distributed(started, 1, flags, Layout())
    (said,) = [message for message in start.messages if "not what the checkpoint was trained on" in message]
    assert str(corpus) in said and "mock data" in said and "sample 20" in said and "--finetune" in said
    assert start.position.consumed_samples == 20


def test_a_run_that_cannot_load_is_refused_with_code_2(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torn = tmp_path / "torn" / "iter_0000005"
    shutil.copytree(saved / torn.name, torn)
    (torn / "rank_00000.safetensors").write_bytes(b"")
    for flags, said in (
        ({"load": str(torn.parent)}, "no checkpoint can be loaded\n"),
        ({"load": str(tmp_path / "none"), "exit-on-missing-checkpoint": True}, f"{tmp_path}/none has no checkpoint"),
        ({"load": str(saved), "ckpt-step": 3}, f"{saved} has no checkpoint of iteration 3"),
        ({"load": str(saved), "hidden-size": 96}, f"{saved}/iter_0000005 does not fit this run: "),
    ):
        assert run(RunConfig.from_flags(DROPOUT | flags | {"device": "cpu"}), LaunchEnvironment.detect({})) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"megackpt: error: {said}") and "Traceback" not in err, err


def test_a_run_with_nothing_left_says_so(saved: Path) -> None:
    for flags in ({"train-iters": 5}, {"train-iters": 3}):
        ((start, _),) = run_distributed(started, 1, DROPOUT | {"load": str(saved)} | flags, Layout())
        said = f"nothing is left to train: the checkpoint is at the end of --train-iters {flags['train-iters']}, or"
        assert start.position.iteration == 5 and start.messages[-1].startswith(said)
    ((start, _),) = run_distributed(started, 1, DROPOUT | {"load": str(saved), "train-iters": 6}, Layout())
    assert "nothing" not in str(start.messages)


def test_a_run_file_that_says_too_little_is_an_error(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "copy")
    directory = tmp_path / "copy" / "iter_0000005"
    run = json.loads((directory / "run.json").read_text())
    del run["extra"]["consumed_samples"]
    (directory / "run.json").write_text(json.dumps(run))
    manifest = Manifest.read(directory)
    manifest.files["run.json"] = digest_of(directory / "run.json")
    (directory / "manifest.json").write_bytes(manifest.to_bytes())
    said = r"does not say where its run stood \(KeyError\('consumed_samples'\)\)"
    with pytest.raises(DistributedFailure, match=said):
        run_distributed(started, 1, DROPOUT | {"load": str(tmp_path / "copy")}, Layout())
