"""A checkpoint that does not fit the run is refused with the names of tensors and flags; parts can be left out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megackpt.config.errors import UsageError
from megackpt.mesh.parameter import ParameterRecord
from megackpt.persist import LoadReport, NamedShard, RunState, load, save
from tests.persist.tiny import lone_mesh, mesh_of, rows, same, state_of
from tests.pool import run_distributed

EXTRA = NamedShard("model.layers.2.mlp.up.weight", torch.zeros(2), ParameterRecord((2,)))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save(tmp_path, 10, state_of(lone_mesh(), 1), lone_mesh())
    return tmp_path


def load_into(root: Path, state: RunState, **options: object) -> LoadReport:
    report = load(root, state, lone_mesh(), **options)  # type: ignore[arg-type]
    assert report is not None
    return report


def test_a_key_that_the_checkpoint_lacks_is_named(root: Path) -> None:
    state = state_of(lone_mesh(), None)
    state.tensors.append(EXTRA)
    with pytest.raises(
        UsageError, match=r"iter_0000010 lacks model\.layers\.2\.mlp\.up\.weight, which this run has"
    ):
        load_into(root, state)
    assert "lacks model.layers.2" in load_into(root, state, strictness="log_all").messages[0]
    state.tensors.pop()
    assert same(state, lone_mesh(), 1)  # without strict, the rest was loaded


def test_a_key_that_the_run_lacks_is_named(root: Path) -> None:
    state = state_of(lone_mesh(), None)
    gone = state.tensors.pop(1)
    with pytest.raises(
        UsageError, match=f"iter_0000010 has {gone.key}, which this run has not\n.*--num-layers"
    ):
        load_into(root, state)
    assert load_into(root, state, strictness="log_all").messages == (
        f"{root}/iter_0000010 has {gone.key}, which this run has not",
    )


def test_masters_that_only_one_side_has_point_to_the_number_format(root: Path) -> None:
    state = state_of(lone_mesh(), None)
    state.tensors.append(replace(EXTRA, key="optimizer.master.layers.2.mlp.up.weight"))
    with pytest.raises(UsageError, match=r"which this run has\n.*--bf16, --params-dtype.*--no-load-optim"):
        load_into(root, state)


def test_moments_that_only_one_side_has_point_to_the_optimizer(root: Path) -> None:
    state = state_of(lone_mesh(), None)
    state.tensors.append(replace(EXTRA, key="optimizer.momentum_buffer.layers.2.mlp.up.weight"))
    with pytest.raises(UsageError, match=r"which this run has\nthe optimizer \(--optimizer\).*--no-load-optim"):
        load_into(root, state)
    assert load_into(root, state, strictness="ignore_all").missing == {state.tensors[-1].key}


def test_random_states_of_another_device_are_left_alone_with_a_word(tmp_path: Path) -> None:
    saved = state_of(lone_mesh(), 1)
    saved.per_rank["default.cuda"] = torch.zeros(16, dtype=torch.uint8)
    save(tmp_path, 10, saved, lone_mesh())
    state = state_of(lone_mesh(), None)
    before = {name: tensor.clone() for name, tensor in state.per_rank.items()}
    report = load_into(tmp_path, state)
    assert not report.rng_loaded and len(report.messages) == 1
    assert "of other generators than this run's, as on another device (default.cuda): they are" in report.messages[0]
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.per_rank.items())
    state.per_rank["default.cuda"] = torch.ones(16, dtype=torch.uint8)
    assert load_into(tmp_path, state).rng_loaded and not state.per_rank["default.cuda"].any()


def test_many_keys_are_not_all_listed(root: Path) -> None:
    state = state_of(lone_mesh(), None)
    state.tensors += [replace(EXTRA, key=f"model.{i}") for i in range(9)]
    with pytest.raises(
        UsageError, match=r"model\.0, model\.1, model\.2, model\.3, model\.4 and 4 more, which"
    ):
        load_into(root, state)


def test_another_shape_is_named(root: Path) -> None:
    state = state_of(lone_mesh(), None)
    state.tensors[1] = NamedShard(state.tensors[1].key, torch.zeros(5), ParameterRecord((5,)))
    with pytest.raises(
        UsageError, match=r"model\.layers\.0\.attn\.norm\.weight has shape \[4\] there and \[5\] here"
    ):
        load_into(root, state)
    with pytest.raises(UsageError, match="there and"):
        load_into(root, state, strictness="log_all")


def test_another_vocabulary_is_named(root: Path) -> None:
    state = state_of(lone_mesh(), None, rows(12, 9))
    with pytest.raises(
        UsageError, match=r"embedding\.word\.weight has 7 rows there and 9 here \(--vocab-size\)"
    ):
        load_into(root, state)


@pytest.mark.parametrize(
    ("group", "flags"),
    [("optimizer", ("--no-save-optim", "--no-load-optim")), ("rng", ("--no-save-rng", "--no-load-rng"))],
)
def test_a_part_that_was_not_saved_names_the_flag(tmp_path: Path, group: str, flags: tuple[str, str]) -> None:
    saved = state_of(lone_mesh(), 1)
    if group == "rng":
        saved.per_rank.clear()
    else:
        saved.tensors = [shard for shard in saved.tensors if shard.key.startswith("model.")]
    save(tmp_path, 10, saved, lone_mesh())
    state = state_of(lone_mesh(), None)
    with pytest.raises(UsageError) as caught:
        load_into(tmp_path, state)
    assert all(flag in str(caught.value) for flag in flags)
    report = load_into(tmp_path, state, want={"model", "optimizer", "rng"} - {group})
    assert report.messages == () and report.rng_loaded == (group != "rng")


def test_only_what_is_wanted_is_touched(root: Path) -> None:
    state = state_of(lone_mesh(), None)
    report = load_into(root, state, want={"model"})
    assert report.messages == () and not report.rng_loaded
    for shard in state.tensors:
        assert bool((shard.local == -7).all()) == shard.key.startswith("optimizer.")
    assert int(state.per_rank["stream.tensor"]) == -1
    with pytest.raises(ValueError, match="want has"):
        load_into(root, state, want={"weights"})


def test_a_conversion_is_said(root: Path) -> None:
    state = state_of(lone_mesh(), None)
    name = state.tensors[1]
    state.tensors[1] = replace(name, local=torch.zeros(4, dtype=torch.float64))
    assert load_into(root, state).messages == (f"converted from F32 to F64: {name.key}",)


def one_rank_wants_more(rank: int, world_size: int, root: str) -> str:
    mesh = mesh_of(world_size)
    state = state_of(mesh, None)
    if rank == 1:
        state.tensors.append(EXTRA)
    with pytest.raises(UsageError) as caught:
        load(root, state, mesh)
    return str(caught.value)


def test_all_ranks_refuse_together(root: Path) -> None:
    first, second = run_distributed(one_rank_wants_more, 2, str(root), timeout=30)
    assert first == second and "lacks model.layers.2.mlp.up.weight" in first
