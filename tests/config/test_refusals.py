"""Words, names, data and files: every refusal by its whole message.  The lines are added to T0 (see base.py)."""

from __future__ import annotations

import pytest

from megackpt.config.errors import UsageError
from tests.config.base import Refusal, check_refused, ids_of, run

# (flags of T0 left out, flags added, processes, message)
TABLE: list[Refusal] = [
    # data
    ("--mock-data", "", 1, "Data are missing: give --data-path PREFIX, or --mock-data for made-up samples."),
    ("", "--data-path a", 1, "--mock-data and --data-path a contradict each other: give one of them."),
    (
        "--mock-data",
        "--data-path 1 b c",
        1,
        "--data-path has 3 words: give prefixes alone, or weights and prefixes in turn, such as --data-path 30 corpus_a"
        " 70 corpus_b.",
    ),
    (
        "--mock-data",
        "--data-path a 1 b 2",
        1,
        "--data-path: 'a' stands where the weight of 1 is expected; with weights each prefix has its own before it.",
    ),
    (
        "--mock-data",
        "--data-path 1 a x b",
        1,
        "--data-path: 'x' stands where the weight of b is expected; with several datasets each prefix has its weight"
        " before it.",
    ),
    (
        "--mock-data",
        "--data-path a --train-data-path b",
        1,
        "--data-path a and --train-data-path b contradict each other: give one of them.",
    ),
    ("", "--valid-data-path v", 1, "--valid-data-path v needs --train-data-path."),
    (
        "--mock-data",
        "--train-data-path a --multiple-validation-sets",
        1,
        "--multiple-validation-sets needs --valid-data-path with a prefix for each set.",
    ),
    (
        "--mock-data",
        "--train-data-path a --valid-data-path 1 b 2 c --multiple-validation-sets",
        1,
        "--multiple-validation-sets evaluates each set alone: leave the weights of --valid-data-path out.",
    ),
    (
        "",
        "--reset-attention-mask",
        1,
        "--reset-attention-mask with --mock-data has no effect: made-up samples have no documents.",
    ),
    ("--mock-data", "--data-path -1 a", 1, "--data-path: the weight -1 of a must be finite and at least 0."),
    ("--mock-data", "--data-path 1e308 a 1e308 b", 1, "--data-path: the sum of the weights is not a finite number."),
    (
        "",
        "--split 1e308,1e308,1",
        1,
        "--split takes numbers of at least 0, one of them above 0; got '1e308,1e308,1'.",
    ),
    ("--mock-data", "--data-path 0 a 0 b", 1, "--data-path: all weights are 0; at least one must be above 0."),
    ("", "--split a,b", 1, "--split takes numbers separated by commas, such as 949,50,1; got 'a,b'."),
    ("", "--split 1,2,3,4", 1, "--split takes at most 3 numbers (training, validation, test); got '1,2,3,4'."),
    ("", "--split 1,-1,0", 1, "--split takes numbers of at least 0, one of them above 0; got '1,-1,0'."),
    ("", "--split 0,1,0", 1, "--split 0,1,0 leaves nothing to train on: its first number must be above 0."),
    (
        "--vocab-size",
        "--tokenizer-type NullTokenizer",
        1,
        "--tokenizer-type NullTokenizer needs --vocab-size: nothing else says how many tokens there are.",
    ),
    (
        "--vocab-size",
        "",
        1,
        "A run without --tokenizer-type needs --vocab-size: nothing else says how many tokens there are.",
    ),
    (
        "",
        "--tokenizer-type SentencePieceTokenizer",
        1,
        "--tokenizer-type SentencePieceTokenizer needs --tokenizer-model: its .model file.",
    ),
    (
        "",
        "--tokenizer-type BertWordPieceCase",
        1,
        "--tokenizer-type takes SentencePieceTokenizer, GPTSentencePieceTokenizer, Llama2Tokenizer, GPT2BPETokenizer,"
        " HuggingFaceTokenizer, TikTokenizer or NullTokenizer; got 'BertWordPieceCase'.",
    ),
    (
        "",
        "--tokenizer-type GPT2BPETokenizer --vocab-file v",
        1,
        "--tokenizer-type GPT2BPETokenizer needs --vocab-file and --merge-file: GPT-2's vocab.json and merges.txt.",
    ),
    # files and logging
    (
        "",
        "--save-interval 5",
        1,
        "--save-interval 5 needs --save: the folder to write to. Add it, or leave --save-interval out.",
    ),
    ("", "--peak-tflops 0", 1, "--peak-tflops must be above 0; got 0.0."),
    # words
    ("", "--train-iters 5k", 1, "--train-iters takes an integer; got '5k'."),
    ("", "--train-iters 1.5", 1, "--train-iters takes an integer; got '1.5'."),
    ("", "--lr high", 1, "--lr takes a number; got 'high'."),
    ("", "--lr nan", 1, "--lr takes a finite number; got 'nan'."),
    ("", "--lr", 1, "--lr takes one value; got none."),
    ("", "--data-path", 1, "--data-path needs at least one value."),
    ("", "--swiglu=maybe", 1, "--swiglu is a switch: give it alone, or with =true or =false; got 'maybe'."),
    ("", "--swiglu 1", 1, "unexpected word '1': flags begin with --."),
    ("", "-x", 1, "unexpected word '-x': flags begin with --."),
    ("--lr", "", 1, "Missing: --lr."),
    ("--lr --num-layers", "", 1, "Missing: --num-layers, --lr."),
    (
        "--lr --num-layers --seq-length",
        "",
        1,
        "Missing: --num-layers, --seq-length, --lr.",
    ),
    # names
    ("", "--num-layer 4", 1, "unknown flag --num-layer. Did you mean --num-layers?"),
    ("", "--hidden_sizes 4", 1, "unknown flag --hidden_sizes. Did you mean --hidden-size?"),
    (
        "",
        "--override-opt-param-schedule",
        1,
        "unknown flag --override-opt-param-schedule. Did you mean --override-opt_param-scheduler?",
    ),
    ("", "--zzz", 1, "unknown flag --zzz."),
    ("", "--no-preserve-rng-state", 1, "unknown flag --no-preserve-rng-state."),
]


@pytest.mark.parametrize("case", TABLE, ids=ids_of(TABLE))
def test_refusal(case: Refusal) -> None:
    check_refused(case)


_AT_LEAST_ONE = """--num-layers --hidden-size --num-attention-heads --seq-length --micro-batch-size --global-batch-size
--ffn-hidden-size --kv-channels --num-query-groups --max-position-embeddings --vocab-size
--make-vocab-size-divisible-by --tensor-model-parallel-size --pipeline-model-parallel-size --train-iters
--eval-interval --exit-interval --lr-decay-iters --save-interval --log-interval --memory-track-interval
--recompute-num-layers"""


@pytest.mark.parametrize("flag", _AT_LEAST_ONE.split())
@pytest.mark.parametrize("value", ["0", "-2"])
def test_sizes_are_positive(flag: str, value: str) -> None:
    with pytest.raises(UsageError) as caught:
        run(f"{flag} {value}")
    assert str(caught.value) == f"{flag} must be at least 1; got {value}."


@pytest.mark.parametrize("flag", ["--eval-iters", "--num-workers", "--seed", "--lr-warmup-iters"])
def test_counts_may_be_zero_and_not_less(flag: str) -> None:
    run(f"{flag} 0")
    with pytest.raises(UsageError) as caught:
        run(f"{flag} -1")
    assert str(caught.value) == f"{flag} must be at least 0; got -1."


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--context-parallel-size 2",
            "--context-parallel-size 2 is not available in this version: use"
            " --tensor-model-parallel-size with --sequence-parallel.",
        ),
        ("--use-torch-fsdp2", "--use-torch-fsdp2 is not available in this version."),
        ("--num-experts 8", "--num-experts 8 is not part of megackpt: models are dense: leave it out."),
        ],
)
def test_refused_flag_says_so_and_what_to_use(line: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        run(line)
    assert str(caught.value).splitlines() == [
        "this command line cannot be used:",
        f"  {message}",
        "  --ignore-unsupported runs without refused flags; docs/flags.md lists all flags.",
    ]


def test_all_bad_names_are_named_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        run("--use-torch-fsdp2 --num-layer 4 --deepspeed --zero-stage 1 --lr high")
    assert str(caught.value).splitlines() == [
        "this command line cannot be used:",
        "  unknown flag --num-layer. Did you mean --num-layers?",
        "  --lr takes a number; got 'high'.",
        "  --use-torch-fsdp2 is not available in this version.",
        "  --deepspeed is not part of megackpt: there is no DeepSpeed engine: leave it out, and give sizes and batches"
        " by flags.",
        "  --zero-stage 1 is not part of megackpt: stage 1 is --use-distributed-optimizer; there are no others.",
        "  --ignore-unsupported runs without refused flags; docs/flags.md lists all flags.",
    ]
