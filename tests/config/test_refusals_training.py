"""Length, schedules, optimizer, precision: every refusal by its message.  Lines are added to T0 (see base.py)."""

from __future__ import annotations

import pytest

from tests.config.base import Refusal, check_refused, ids_of

# (flags of T0 left out, flags added, processes, message)
TABLE: list[Refusal] = [
    # length and schedule
    ("--train-iters", "", 1, "The length of training is missing: give --train-iters or --train-samples."),
    (
        "",
        "--train-samples 80",
        1,
        "--train-iters 5 and --train-samples 80 contradict each other: give one of them.",
    ),
    (
        "--train-iters",
        "--train-samples 7",
        1,
        "--train-samples 7 is less than one step of --global-batch-size 8. Nearest valid: --train-samples 8.",
    ),
    (
        "",
        "--lr-decay-samples 80",
        1,
        "--lr-decay-samples 80 contradicts --train-iters 5: the schedule is counted as training is. Use"
        " --lr-decay-iters.",
    ),
    (
        "--train-iters",
        "--train-samples 80 --lr-warmup-iters 2",
        1,
        "--lr-warmup-iters 2 contradicts --train-samples 80: the schedule is counted as training is. Use"
        " --lr-warmup-samples.",
    ),
    (
        "",
        "--lr-warmup-iters 5",
        1,
        "--lr-warmup-iters 5 must be less than the decay length, --train-iters 5. Nearest valid: --lr-warmup-iters 4.",
    ),
    (
        "",
        "--lr-warmup-iters 4 --lr-decay-iters 3",
        1,
        "--lr-warmup-iters 4 must be less than the decay length, --lr-decay-iters 3. Nearest valid:"
        " --lr-warmup-iters 2.",
    ),
    (
        "",
        "--lr-warmup-iters 1 --lr-warmup-fraction 0.1",
        1,
        "--lr-warmup-fraction 0.1 and --lr-warmup-iters 1 contradict each other: give one of them.",
    ),
    (
        "",
        "--exit-signal SIGUSR1",
        1,
        "--exit-signal SIGUSR1 needs --exit-signal-handler. Add it, or leave it out.",
    ),
    ("", "--exit-duration-in-mins -5", 1, "--exit-duration-in-mins must be at least 0; got -5.0."),
    ("", "--lr-warmup-fraction 1", 1, "--lr-warmup-fraction must be in [0.0, 1.0); got 1.0."),
    ("", "--lr-warmup-init 0.1", 1, "--lr-warmup-init 0.1 is above --lr 0.001. Nearest valid: --lr-warmup-init 0.001."),
    ("", "--min-lr 0.1", 1, "--min-lr 0.1 is above --lr 0.001. Nearest valid: --min-lr 0.001."),
    (
        "",
        "--lr-decay-style wave",
        1,
        "--lr-decay-style takes cosine, linear, constant, inverse-square-root or WSD; got 'wave'.",
    ),
    ("", "--lr -1", 1, "--lr must be at least 0; got -1.0."),
    ("", "--optimizer lamb", 1, "--optimizer takes adam or sgd; got 'lamb'."),
    ("", "--adam-beta2 1", 1, "--adam-beta2 must be in [0.0, 1.0); got 1.0."),
    ("", "--adam-eps 0", 1, "--adam-eps must be above 0; got 0.0."),
    ("", "--clip-grad -1", 1, "--clip-grad must be at least 0; got -1.0."),
    ("", "--weight-decay -1", 1, "--weight-decay must be at least 0; got -1.0."),
    (
        "",
        "--use-checkpoint-opt_param-scheduler --override-opt_param-scheduler",
        1,
        "--use-checkpoint-opt_param-scheduler and --override-opt_param-scheduler contradict each other: either the"
        " checkpoint's schedule wins or the flags do.",
    ),
    (
        "",
        "--bf16 --params-dtype fp32",
        1,
        "--bf16 and --params-dtype fp32 contradict each other: --bf16 means --params-dtype bf16.",
    ),
    (
        "",
        "--fp16 --grad-reduce-in-bf16",
        1,
        "--grad-reduce-in-bf16 contradicts --params-dtype fp16: it is for bf16 parameters. Use --bf16, or leave it"
        " out.",
    ),
    (
        "",
        "--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32",
        1,
        "--accumulate-allreduce-grads-in-fp32 and --grad-reduce-in-bf16 contradict each other:"
        " --accumulate-allreduce-grads-in-fp32 means --grad-reduce-in-bf16=false.",
    ),
    ("", "--params-dtype fp8", 1, "--params-dtype takes fp32, bf16, fp16 or fp64; got 'fp8'."),
    # schedules and rates
    (
        "",
        "--lr-decay-style WSD",
        1,
        "--lr-decay-style WSD needs the length of its last phase: --lr-wsd-decay-iters (with --train-iters) or"
        " --lr-wsd-decay-samples (with --train-samples).",
    ),
    (
        "",
        "--lr-wsd-decay-iters 2",
        1,
        "--lr-wsd-decay-iters 2 has no effect with --lr-decay-style linear: use --lr-decay-style WSD, or leave"
        " --lr-wsd-decay-iters out.",
    ),
    (
        "",
        "--lr-decay-style WSD --lr-wsd-decay-samples 16",
        1,
        "--lr-wsd-decay-samples 16 contradicts --train-iters 5: the schedule is counted as training is. Use"
        " --lr-wsd-decay-iters.",
    ),
    (
        "",
        "--lr-decay-style WSD --lr-wsd-decay-iters 4 --lr-warmup-iters 2",
        1,
        "--lr-wsd-decay-iters 4 and --lr-warmup-iters 2 overlap: together they are longer than the decay length 5."
        " Nearest valid: --lr-wsd-decay-iters 3.",
    ),
    (
        "",
        "--lr-decay-style WSD --lr-wsd-decay-iters 4 --lr-warmup-fraction 0.3",
        1,
        "--lr-wsd-decay-iters 4 and --lr-warmup-fraction 0.3 (of 5) overlap: together they are longer than the decay"
        " length 5. Nearest valid: --lr-wsd-decay-iters 3.",
    ),
    (
        "",
        "--decoupled-min-lr 1e-5",
        1,
        "--decoupled-min-lr 1e-05 has no effect without --decoupled-lr: add it, or leave --decoupled-min-lr out.",
    ),
    (
        "",
        "--decoupled-lr 1e-4 --decoupled-min-lr 1e-3",
        1,
        "--decoupled-min-lr 0.001 is above --decoupled-lr 0.0001. Nearest valid: --decoupled-min-lr 0.0001.",
    ),
    (
        "",
        "--fp16 --min-loss-scale 16 --initial-loss-scale 8",
        1,
        "--min-loss-scale 16 is above --initial-loss-scale 8. Nearest valid: --min-loss-scale 8.",
    ),
    ("", "--fp16 --loss-scale 0", 1, "--loss-scale must be above 0; got 0.0."),
    ("", "--fp16 --hysteresis 0", 1, "--hysteresis must be at least 1; got 0."),
    ("", "--max-skipped-iterations 0", 1, "--max-skipped-iterations must be at least 1; got 0."),
    (
        "",
        "--deterministic-mode --compile",
        1,
        "--deterministic-mode contradicts --compile: the compiler chooses kernels by their time, and another run may"
        " get others. Leave --compile out.",
    ),
    ("", "--check-replicas-interval 0", 1, "--check-replicas-interval must be at least 1; got 0."),
    # a batch that grows
    (
        "--train-iters",
        "--train-samples 64 --rampup-batch-size 16 16",
        1,
        "--rampup-batch-size 16 16: give three whole numbers, the first batch size, its increment, and the samples over"
        " which it grows, such as --rampup-batch-size 16 16 100000.",
    ),
    (
        "--train-iters",
        "--train-samples 64 --rampup-batch-size 16 16 100",
        1,
        "--rampup-batch-size 16 16 100 begins above --global-batch-size 8. Nearest valid: a first batch size of 8.",
    ),
    (
        "--train-iters",
        "--train-samples 64 --rampup-batch-size 2 4 100",
        1,
        "--rampup-batch-size 2 4 100 never meets --global-batch-size 8, which is not 2 and a multiple of 4. Nearest"
        " valid: --global-batch-size 6 or 10.",
    ),
    (
        "--train-iters",
        "--train-samples 64 --rampup-batch-size 4 0 100",
        1,
        "--rampup-batch-size 4 0 100: the first batch size and its increment must be at least 1.",
    ),
    (
        "--train-iters",
        "--train-samples 64 --rampup-batch-size 4 1 100",
        1,
        "--rampup-batch-size 4 1 100 passes through a global batch of 5, which is not divisible by --micro-batch-size 2"
        " x data-parallel size 1 = 2. Use a first batch size and an increment that are multiples of 2.",
    ),
    (  # CK-15: 16 and 16 capped data parallel at 8
        "--train-iters --global-batch-size",
        "--train-samples 640 --global-batch-size 64 --rampup-batch-size 16 16 100",
        16,
        "--rampup-batch-size 16 16 100 passes through a global batch of 16, which is not divisible by"
        " --micro-batch-size 2 x data-parallel size 16 = 32. Use a first batch size and an increment that are multiples"
        " of 32.",
    ),
    (
        "",
        "--rampup-batch-size 4 2 100",
        1,
        "--rampup-batch-size 4 2 100 needs --train-samples: with a batch that grows, --train-iters 5 says neither how"
        " long the run nor how long its schedule is.",
    ),
    (
        "--train-iters",
        "--train-samples 3 --rampup-batch-size 4 2 100",
        1,
        "--train-samples 3 is less than one step of --rampup-batch-size 4. Nearest valid: --train-samples 4.",
    ),
    ("", "--optimizer sgd --sgd-momentum 1.0", 1, "--sgd-momentum must be in [0.0, 1.0); got 1.0."),
]


@pytest.mark.parametrize("case", TABLE, ids=ids_of(TABLE))
def test_refusal(case: Refusal) -> None:
    check_refused(case)
