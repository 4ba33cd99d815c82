"""Defaults and derived values, as Megatron has them, and the sections on their own."""

from __future__ import annotations

import dataclasses

import pytest

from megackpt.config.batch import BatchConfig
from megackpt.config.data import parse_data_path, parse_split
from megackpt.config.errors import UsageError
from megackpt.config.model import ModelConfig
from megackpt.config.parallel import ParallelConfig
from megackpt.config.recompute import RecomputeConfig
from tests.config.base import run


def model(**fields: object) -> ModelConfig:
    shape: dict[str, object] = {"num_layers": 3, "hidden_size": 96, "num_attention_heads": 8, "seq_length": 40}
    return ModelConfig(**(shape | fields))  # type: ignore[arg-type]


def test_megatron_defaults() -> None:
    config = run(drop="--global-batch-size", world_size=3)
    assert config.batch.global_batch_size == 2 * 3
    optimizer = config.optimizer
    assert (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.adam_eps) == (0.9, 0.999, 1e-8)
    assert (optimizer.weight_decay, optimizer.clip_grad, optimizer.min_lr) == (0.01, 1.0, 0.0)
    assert optimizer.lr_decay_style == "linear" and optimizer.lr_decay_iters is None
    assert (config.train.eval_interval, config.train.eval_iters, config.train.seed) == (1000, 100, 1234)
    assert (config.data.split, config.data.num_workers, config.logging.log_interval) == ("969,30,1", 2, 100)
    assert (config.model.hidden_dropout, config.model.attention_dropout, config.model.init_method_std) == (
        0.1,
        0.1,
        0.02,
    )
    assert config.model.tie_embeddings and config.model.add_bias_linear and config.model.normalization == "LayerNorm"
    assert config.parallel.timeout_minutes == 10.0 and config.recompute.granularity == "none"


def test_derived_shape() -> None:
    plain = model()
    assert (plain.kv_channels, plain.num_query_groups, plain.ffn_hidden_size) == (12, 8, 384)
    assert plain.max_position_embeddings == 40
    assert model(kv_channels=7, hidden_size=100).kv_channels == 7


@pytest.mark.parametrize(("hidden", "ffn"), [(96, 256), (1024, 2688), (4096, 10880), (8, 64)])
def test_swiglu_width_is_rounded_down_to_64_as_megatron_does(hidden: int, ffn: int) -> None:
    assert model(hidden_size=hidden, swiglu=True).ffn_hidden_size == ffn
    assert model(hidden_size=hidden, swiglu=True, ffn_hidden_size=3 * hidden).ffn_hidden_size == 3 * hidden


@pytest.mark.parametrize(
    ("vocab", "multiple", "tensor", "padded"),
    [(50257, 128, 1, 50304), (50257, 128, 8, 51200), (512, 128, 4, 512), (509, 1, 4, 512), (257, 1, 1, 257)],
)
def test_padded_vocabulary(vocab: int, multiple: int, tensor: int, padded: int) -> None:
    assert model(make_vocab_size_divisible_by=multiple).padded_vocab_size(vocab, tensor) == padded


def test_query_groups() -> None:
    assert run("--group-query-attention").model.num_query_groups == 1
    assert run("--group-query-attention --num-query-groups 4").model.num_query_groups == 4
    assert run("--num-query-groups 8").model.num_query_groups == 8


def test_positions_bound_the_sequence_only_when_learned() -> None:
    assert run("--max-position-embeddings 20 --position-embedding-type rope").model.seq_length == 40
    assert run("--max-position-embeddings 20 --position-embedding-type none").model.seq_length == 40


@pytest.mark.parametrize(("layers", "stages"), [(n, p) for n in range(1, 13) for p in range(1, 5)])
def test_every_split_of_layers_is_legal_unless_a_stage_is_empty(layers: int, stages: int) -> None:
    line = f"--num-layers {layers} --pipeline-model-parallel-size {stages}"
    if layers >= stages:
        assert run(line, world_size=stages).model.num_layers == layers
    else:
        with pytest.raises(UsageError, match="a stage would be empty"):
            run(line, world_size=stages)


def test_recompute_groups_need_not_divide_the_layers() -> None:
    config = run("--num-layers 7 --recompute-granularity full --recompute-num-layers 3")
    assert (config.recompute.method, config.recompute.num_layers) == ("uniform", 3)
    assert RecomputeConfig(granularity="full", method="block", num_layers=99).num_layers == 99


def test_mesh_sizes() -> None:
    parallel = ParallelConfig(tensor=2, pipeline=3, world_size=12, sequence_parallel=True)
    assert (parallel.model, parallel.data, parallel.sequence_parallel) == (6, 2, True)
    assert not ParallelConfig(world_size=2, sequence_parallel=True).sequence_parallel
    with pytest.raises(UsageError, match="--context-parallel-size 2 is not available in this version"):
        ParallelConfig(context=2, world_size=2)


def test_micro_batches_of_a_step() -> None:
    batch = BatchConfig(micro_batch_size=2, global_batch_size=24)
    assert [batch.micro_batches(d) for d in (1, 2, 3, 4, 6, 12)] == [12, 6, 4, 3, 2, 1]
    with pytest.raises(UsageError, match="--global-batch-size 24 is not divisible"):
        batch.micro_batches(5)


def test_iterations_of_a_run() -> None:
    assert run().total_iterations == 5
    by_samples = run("--train-samples 83", drop="--train-iters")
    assert by_samples.train.by_samples and by_samples.total_iterations == 10


def test_split_shares_are_normalised() -> None:
    assert parse_split("949,50,1") == (0.949, 0.05, 0.001)
    assert parse_split("8, 2") == (0.8, 0.2, 0.0)
    assert parse_split("100") == (1.0, 0.0, 0.0)


def test_data_path_weights_are_normalised() -> None:
    assert parse_data_path(["a"]) == ((1.0, "a"),)
    assert parse_data_path(["3", "a", "1", "b"]) == ((0.75, "a"), (0.25, "b"))
    assert parse_data_path(["a", "b", "c"]) == ((None, "a"), (None, "b"), (None, "c"))
    assert parse_data_path(["7"]) == ((1.0, "7"),)


def test_sections_are_frozen() -> None:
    for field in dataclasses.fields(run()):
        section = getattr(run(), field.name)
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(section, dataclasses.fields(section)[0].name, 1)
