"""Words to runs: spellings, strength of sources, old names, notices, and the round trip through YAML."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import yaml

from megackpt.config.errors import UsageError
from megackpt.config.parse import parse
from megackpt.config.run import RunConfig
from tests.config.base import parsed, run, words

# Every field of every section differs from its default in at least one of these.
RICH = [
    "",
    "--swiglu --disable-bias-linear --untie-embeddings-and-output-weights --normalization RMSNorm"
    " --position-embedding-type rope --rotary-base 500000 --rotary-percent 0.5 --group-query-attention"
    " --num-query-groups 4 --kv-channels 16 --norm-epsilon 1e-6 --hidden-dropout 0 --attention-dropout 0.25"
    " --init-method-std 0.006 --attention-backend unfused --make-vocab-size-divisible-by 64"
    " --max-position-embeddings 4096",
    "--squared-relu --attention-softmax-in-fp32=false --min-lr 1e-5 --lr-decay-style cosine --lr-decay-iters 4"
    " --lr-warmup-iters 1 --lr-warmup-init 1e-7 --weight-decay 0.1 --adam-beta1 0.8 --adam-beta2 0.95 --adam-eps 1e-9"
    " --clip-grad 0.5 --override-opt_param-scheduler --eval-interval 7 --eval-iters 3 --exit-interval 9 --seed 4321",
    "--lr-warmup-fraction 0.01 --use-checkpoint-opt_param-scheduler --params-dtype bf16 --finetune --save a --load b"
    " --save-interval 3 --no-save-optim --no-save-rng --no-load-optim --no-load-rng",
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --distributed-backend gloo"
    " --device cpu --distributed-timeout-minutes 0.5 --recompute-granularity full --recompute-method block"
    " --recompute-num-layers 3 --recompute-keep layer-input --global-batch-size 16",
    "--recompute-granularity selective --recompute-modules layernorm mlp.act --num-workers 0 --split 90,5,5"
    " --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model t.model --data-cache-path c --eod-mask-loss",
    "--log-interval 1 --log-throughput --log-num-zeros-in-grad --log-params-norm --tensorboard-dir tb --wandb-project"
    " 12 --wandb-exp-name null --metrics-file m.jsonl --memory-track-interval 4 --run-dir r --peak-tflops 989.4",
]


@pytest.mark.parametrize("line", RICH)
def test_printed_config_reads_back_to_an_equal_run(line: str, tmp_path: Path) -> None:
    config = run(line, world_size=4)
    file = tmp_path / "run.yaml"
    file.write_text(config.to_yaml(), encoding="utf-8")
    again = parse(["--config", str(file)], {}, 4)
    assert again == config and again.to_yaml() == config.to_yaml()
    assert RunConfig.from_flags(yaml.safe_load(config.to_yaml()), world_size=4) == config
    assert pickle.loads(pickle.dumps(config)) == config
    if line:
        assert config != run(world_size=4)


def test_the_other_forms_read_back_too(tmp_path: Path) -> None:
    for drop, line in (
        ("--train-iters", "--train-samples 100 --lr-decay-samples 90 --lr-warmup-samples 8"),
        ("--mock-data", "--data-path 0.3 a 0.7 b"),
        ("--vocab-size", "--tokenizer-type SentencePieceTokenizer --tokenizer-model m"),
        ("--ffn-hidden-size --global-batch-size", "--group-query-attention"),
    ):
        config = run(line, drop=drop)
        (tmp_path / "run.yaml").write_text(config.to_yaml(), encoding="utf-8")
        assert parse(["--config", str(tmp_path / "run.yaml")], {}, 1) == config


@pytest.mark.parametrize(
    "line",
    [
        "--num_query_groups 8",
        "--num-query_groups=8",
        "--override_opt-param_scheduler",
        "--override-opt-param-scheduler",
    ],
)
def test_dash_and_underscore_are_one(line: str) -> None:
    assert run(line) == run(line.replace("_", "-").replace("opt-param", "opt_param"))


@pytest.mark.parametrize("short", ["--num-layer 4", "--tensor-model-parallel 2", "--see 1"])
def test_no_abbreviations(short: str) -> None:
    with pytest.raises(UsageError, match=f"^unknown flag {short.split()[0]}"):
        run(short)


def test_last_of_two_counts_and_negative_numbers_are_values() -> None:
    assert run("--seed 1 --seed 2").train.seed == 2
    with pytest.raises(UsageError, match="--seed must be at least 0; got -3"):
        run("--seed -3")


def test_strength_of_sources(tmp_path: Path) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("seed: 1\nlr: 1\nclip-grad: 1.5\nweight_decay: 0.5\neval-iters: 9\n")
    second.write_text("optimizer:\n  clip-grad: 2.5\n  weight_decay: 0.25\ntrain: {eval_iters: 8}\n")
    config = run(f"--config {first} --config {second} --eval-iters 6", args="--weight-decay 0.125 --eval_iters 7")
    assert config.train.seed == 1  # only in the first file
    assert config.optimizer.lr == 1e-3  # T0's command line
    assert config.optimizer.clip_grad == 2.5  # the later file
    assert config.optimizer.weight_decay == 0.125  # MEGACKPT_ARGS over files
    assert config.train.eval_iters == 6  # the command line over all


def test_stronger_source_replaces_rivals_and_details(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(run("--recompute-granularity full --recompute-method block --recompute-num-layers 3").to_yaml())
    only = ["--config", str(file)]
    config = parse([*only, "--train-samples", "80", "--recompute-activations", "--bf16"], {}, 1)
    assert (config.train.train_iters, config.train.train_samples) == (None, 80)
    assert (config.recompute.granularity, config.recompute.method) == ("selective", None)
    assert config.precision.params_dtype == "bf16"
    assert parse([*only, "--recompute-granularity", "full"], {}, 1).recompute.num_layers == 3
    data = parse([*only, "--data-path", "a"], {}, 1).data
    assert (data.mock_data, data.data_path) == (False, ("a",))


def test_false_takes_a_switch_back(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("bf16: true\nswiglu: true\n")
    assert run(f"--config {file}").precision.params_dtype == "bf16"
    config = run(f"--config {file} --bf16=false --swiglu=false")
    assert config == run()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sed: 1", "unknown flag sed. Did you mean --seed?"),
        ("seeds: {seed: 1}", "unknown section 'seeds'."),
        ("modl: {num-layers: 1}", "unknown section 'modl'. Did you mean model?"),
        ("use-torch-fsdp2: true", "--use-torch-fsdp2 is not available in this version."),
        ("seed: yes", "--seed takes an integer; got True."),
        ("seed: [1, 2]", "--seed takes one value; got 1 2."),
        ("bf16: 1", "--bf16 is a switch: give it alone, or with =true or =false; got 1."),
        ("seed: 1\nmodel: {seed: 2}", "--seed is given twice."),
        ("config: other.yaml", "--config works on the command line only."),
        ("seed: 1\nseed: 2", "'seed' is given twice"),
        ("- seed", "must hold names and values; it holds a list."),
        ("seed: [", "is not valid YAML"),
    ],
)
def test_faults_in_a_file_name_the_file(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        run(f"--config {file}")
    assert message in str(caught.value) and str(file) in str(caught.value)


def test_missing_file_and_bad_environment_are_named() -> None:
    with pytest.raises(UsageError, match=r"^--config nowhere\.yaml cannot be read: No such file or directory\.$"):
        run("--config nowhere.yaml")
    with pytest.raises(UsageError, match=r"^MEGACKPT_ARGS: --seed takes an integer; got 'x'\.$"):
        run(args="--seed x")
    with pytest.raises(UsageError, match=r"^MEGACKPT_ARGS cannot be split into words"):
        run(args="--save 'a")


def test_yaml_numbers_without_a_dot_are_numbers(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("adam-eps: 1e-6\nrecompute-granularity: none\nsave: null\nfp16: false\n")  # 1e-6: text to PyYAML
    assert run(f"--config {file}") == run("--adam-eps 1e-6")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--recompute-activations", "--recompute-granularity selective"),
        (
            "--checkpoint-activations",
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        ),
        (
            "--checkpoint-activations --checkpoint-num-layers 2",
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
        ),
        (
            "--activations-checkpoint-method block --checkpoint-num-layers 3",
            "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
        ),
        ("--recompute-granularity full", "--recompute-granularity full --recompute-method uniform"),
        ("--bf16", "--params-dtype bf16"),
        ("--fp16", "--params-dtype fp16"),
        ("--bf16 --accumulate-allreduce-grads-in-fp32", "--bf16 --grad-reduce-in-bf16=false"),
        ("--use-rotary-position-embeddings", "--position-embedding-type rope"),
        ("--use-flash-attn", "--attention-backend flash"),
        ("--attention-backend local", "--attention-backend unfused"),
        ("--recompute-activations --recompute-modules core_attn", "--recompute-granularity selective"),
        ("--tie-embeddings", ""),
        ("--context-parallel-size 1 --expert-model-parallel-size 1 --dataloader-type single", ""),
        ("--tensor-model-parallel-size 1 --sequence-parallel", ""),
    ],
)
def test_two_ways_to_say_it(old: str, new: str) -> None:
    assert run(old) == run(new)


def test_old_names_warn_once() -> None:
    assert parsed("--checkpoint-activations").notices == (
        "warning: --checkpoint-activations is an old name: it is read as --recompute-granularity full"
        " --recompute-method uniform --recompute-num-layers 1 (unless those say otherwise).",
    )


def test_selective_core_with_fused_attention_says_that_it_saves_nothing() -> None:
    (notice,) = parsed("--recompute-activations").notices
    assert "saves almost nothing here: fused attention stores no s x s matrices" in notice
    assert parsed("--recompute-activations --attention-backend unfused").notices == ()
    assert parsed("--recompute-activations --recompute-modules core_attn mlp").notices == ()


def test_accepted_flags_make_one_line() -> None:
    line = "--no-masked-softmax-fusion --transformer-impl transformer_engine --no-masked-softmax-fusion --manual-gc"
    assert parsed(line).notices == (
        "accepted, no effect here: --manual-gc, --no-masked-softmax-fusion, --transformer-impl",
    )
    assert parsed(line).config == run()


@pytest.mark.parametrize(
    ("line", "notice"),
    [
        ("--bf16 --initial-loss-scale 64 --hysteresis 3", "--initial-loss-scale, --hysteresis (no loss scale changes"),
        ("--loss-scale-window 10", "--loss-scale-window (no loss scale changes without --fp16)"),
        ("--fp16 --loss-scale 128 --min-loss-scale 2", "--min-loss-scale (--loss-scale is a fixed one)"),
        ("--optimizer sgd --adam-beta2 0.95", "--adam-beta2 (--optimizer is sgd)"),
        ("--sgd-momentum 0.5", "--sgd-momentum (--optimizer is adam)"),
        (
            "--use-rope-scaling --rotary-base 500000",
            "--rotary-base, --use-rope-scaling (--position-embedding-type is learned_absolute)",
        ),
        (
            "--position-embedding-type rope --rope-scaling-factor 32",
            "--rope-scaling-factor (it is a detail of --use-rope-scaling)",
        ),
        ("--recompute-granularity free --recompute-ahead-layers 1", "--recompute-ahead-layers (one stage waits for"),
        ("--sequence-parallel", "--sequence-parallel (--tensor-model-parallel-size is 1)"),
        ("--eod-mask-loss --split 1,1,1", "--eod-mask-loss, --split (--mock-data reads no documents)"),
    ],
)
def test_flags_that_nothing_reads_are_named(line: str, notice: str) -> None:
    (said,) = parsed(line).notices
    assert said.startswith(f"no effect here: {notice}")
    assert parsed("--fp16 --hysteresis 3 --adam-beta1 0.8 --sequence-parallel=false --sgd-momentum 0.9").notices == ()


def test_ignore_unsupported_warns_instead(tmp_path: Path) -> None:
    result = parsed("--use-torch-fsdp2 --padded-vocab-size 512 --num-experts 8 --ignore-unsupported")
    assert result.config == run()
    assert result.notices == (
        "warning: ignored, --use-torch-fsdp2 is not available in this version.",
        "warning: ignored, --padded-vocab-size 512 is not available in this version: use --vocab-size and"
        " --make-vocab-size-divisible-by.",
        "warning: ignored, --num-experts 8 is not part of megackpt: models are dense: leave it out.",
    )
    with pytest.raises(UsageError, match="^unknown flag --zzz"):
        run("--zzz 3 --ignore-unsupported")
    file = tmp_path / "a.yaml"
    file.write_text("ignore-unsupported: true\nuse-torch-fsdp2: true\n")
    assert run(f"--config {file}") == run()


def test_from_flags_takes_python_values() -> None:
    config = RunConfig.from_flags(
        {
            "num_layers": 4,
            "hidden_size": 96,
            "num_attention_heads": 8,
            "ffn_hidden_size": 336,
            "seq_length": 40,
            "vocab_size": 509,
            "micro_batch_size": 2,
            "global_batch_size": 8,
            "lr": 1e-3,
            "train_iters": 5,
            "mock_data": True,
            "bf16": False,
        }
    )
    assert config == run()
    with pytest.raises(UsageError, match="--use-torch-fsdp2 is not available"):
        RunConfig.from_flags({"use-torch-fsdp2": True})


def test_a_typical_megatron_launch_script_is_understood() -> None:
    line = """--use-mcore-models --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --group-query-attention
    --num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope
    --rotary-base 10000 --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0 --init-method-std 0.02
    --micro-batch-size 1 --global-batch-size 512 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --train-iters 5000
    --lr-warmup-fraction .01 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --bf16
    --data-path 0.5 a 0.5 b --split 949,50,1 --tokenizer-type SentencePieceTokenizer --tokenizer-model t.model
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --no-rope-fusion
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --attention-softmax-in-fp32 --log-interval 10
    --save-interval 1000 --eval-interval 1000 --eval-iters 10 --save ckpt --load ckpt --transformer-impl local
    --distributed-backend nccl --overlap-grad-reduce --accumulate-allreduce-grads-in-fp32 --no-load-optim"""
    config = parse(line.split(), {}, 16)
    assert config.parallel.data == 4 and config.micro_batches == 128
    assert config.model.kv_channels == 128 and config.model.gated
    assert config.recompute.num_layers == 1 and config.recompute.keep == "boundaries"


def test_words_of_the_command_line_are_not_changed() -> None:
    line = words("--data-path", "a b", "--split=1,1,1", drop="--mock-data")
    config = parse(line, {}, 1)
    assert config.data.data_path == ("a b",) and config.data.split == "1,1,1"
