"""Processes, stages, batches: every refusal by its whole message.  The lines are added to T0 (see base.py)."""

from __future__ import annotations

import pytest

from tests.config.base import Refusal, check_refused, ids_of

# (flags of T0 left out, flags added, processes, message)
TABLE: list[Refusal] = [
    # processes against the mesh
    (
        "",
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
        6,
        "6 processes cannot be arranged as --tensor-model-parallel-size 2 x --pipeline-model-parallel-size 2 = 4 ranks"
        " per copy of the model. Nearest valid number of processes: 4 or 8.",
    ),
    (
        "",
        "--tensor-model-parallel-size 2",
        1,
        "1 process cannot be arranged as --tensor-model-parallel-size 2 x --pipeline-model-parallel-size 1 = 2 ranks"
        " per copy of the model. Nearest valid number of processes: 2.",
    ),
    # stages and parallelism
    (
        "",
        "--pipeline-model-parallel-size 5",
        5,
        "--num-layers 4 is fewer than --pipeline-model-parallel-size 5: a stage would be empty. Nearest valid:"
        " --num-layers 5 or --pipeline-model-parallel-size 4.",
    ),
    (
        "",
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
        2,
        "--num-layers-per-virtual-pipeline-stage 3 does not divide --num-layers 4 over 2 stages in chunks of equal"
        " size. Nearest valid: --num-layers 6, or --num-virtual-stages-per-pipeline-rank 1, which need not divide.",
    ),
    (
        "--num-layers",
        "--num-layers 11 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
        2,
        "--num-layers-per-virtual-pipeline-stage 2 does not divide --num-layers 11 over 2 stages in chunks of equal"
        " size. Nearest valid: --num-layers 8 or 12, or --num-virtual-stages-per-pipeline-rank 3, which need not"
        " divide.",
    ),
    (
        "",
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3",
        2,
        "--num-virtual-stages-per-pipeline-rank 3 of 2 stages are 6 chunks, but there are only --num-layers 4. Nearest"
        " valid: --num-virtual-stages-per-pipeline-rank 2, or --num-layers 6.",
    ),
    (
        "",
        "--num-virtual-stages-per-pipeline-rank 2",
        1,
        "--num-virtual-stages-per-pipeline-rank 2 needs several stages: on one there is no bubble that chunks could"
        " shrink. Nearest valid: --pipeline-model-parallel-size 2, or leave --num-virtual-stages-per-pipeline-rank"
        " out.",
    ),
    (
        "",
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
        " --num-layers-per-virtual-pipeline-stage 1",
        2,
        "--num-layers-per-virtual-pipeline-stage 1 and --num-virtual-stages-per-pipeline-rank 2 say the same in two"
        " ways: give one of them.",
    ),
    (
        "",
        "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 4",
        2,
        "--decoder-first-pipeline-num-layers 4 leave 0 of --num-layers 4 for 1 other stage, which needs 1. Nearest"
        " valid: --decoder-first-pipeline-num-layers 3.",
    ),
    (
        "",
        "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 2",
        2,
        "--decoder-first-pipeline-num-layers 1 and --decoder-last-pipeline-num-layers 2 leave 1 of --num-layers 4 for"
        " 0 other stages. Nearest valid: --decoder-last-pipeline-num-layers 3.",
    ),
    (
        "",
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
        " --decoder-last-pipeline-num-layers 1",
        2,
        "--decoder-last-pipeline-num-layers 1 cannot fill 2 chunks. Nearest valid: --decoder-last-pipeline-num-layers"
        " 2.",
    ),
    (
        "",
        "--decoder-last-pipeline-num-layers 2",
        1,
        "--decoder-last-pipeline-num-layers 2 needs several stages. Nearest valid: --pipeline-model-parallel-size 2, or"
        " leave --decoder-last-pipeline-num-layers out.",
    ),
    (
        "",
        "--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 2"
        " --account-for-loss-in-pipeline-split",
        2,
        "--decoder-last-pipeline-num-layers and --account-for-loss-in-pipeline-split both say how many layers a stage"
        " has: give one of them, and chunks by --num-virtual-stages-per-pipeline-rank.",
    ),
    (
        "",
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2"
        " --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
        2,
        "--num-layers-per-virtual-pipeline-stage 2 does not divide --num-layers 4 and the embedding and loss, which"
        " count as one each over 2 stages in chunks of equal size. Nearest valid: --num-layers 2 or 6, or"
        " --num-virtual-stages-per-pipeline-rank 1, which need not divide.",
    ),
    (
        "",
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|ttL",
        2,
        "--pipeline-model-parallel-layout 'Et|ttL' has 3 layers (t), but --num-layers is 4.",
    ),
    (
        "",
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t|ttL",
        2,
        "--pipeline-model-parallel-layout 'Et|t|ttL' has 3 chunks, which do not divide over"
        " --pipeline-model-parallel-size 2. Nearest valid number of chunks: 2 or 4.",
    ),
    (
        "",
        "--pipeline-model-parallel-layout Ett|ttL",
        1,
        "--pipeline-model-parallel-layout 'Ett|ttL' has 2 chunks, which do not divide over"
        " --pipeline-model-parallel-size 1. Nearest valid number of chunks: 1.",
    ),
    (
        "",
        "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Ett||tt|L",
        4,
        "--pipeline-model-parallel-layout 'Ett||tt|L' leaves stage 1 of 4 without a layer: its chunk is empty. Nearest"
        " valid: --pipeline-model-parallel-size 3, or a t for that stage.",
    ),
    (
        "",
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tttL"
        " --decoder-last-pipeline-num-layers 3",
        2,
        "--pipeline-model-parallel-layout says what --decoder-last-pipeline-num-layers says too: give one of them.",
    ),
    (
        "",
        "--pipeline-model-parallel-size 2 --pipeline-schedule zbv",
        2,
        "--pipeline-schedule takes 1f1b, gpipe or zb-h1; got 'zbv'.",
    ),
    (
        "",
        "--pipeline-schedule zb-h1",
        1,
        "--pipeline-schedule zb-h1 fills the gaps between several stages. Nearest valid:"
        " --pipeline-model-parallel-size 2, or --pipeline-schedule 1f1b.",
    ),
    (
        "",
        "--pipeline-schedule gpipe --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
        2,
        "--pipeline-schedule gpipe has one chunk per stage, and several are asked for. Nearest valid:"
        " --pipeline-schedule 1f1b, or leave the chunks out.",
    ),
    ("", "--distributed-timeout-minutes 0", 1, "--distributed-timeout-minutes must be above 0; got 0.0."),
    ("", "--distributed-backend mpi", 1, "--distributed-backend takes nccl or gloo; got 'mpi'."),
    ("", "--device tpu", 1, "--device takes cpu or cuda; got 'tpu'."),
    (
        "",
        "--distributed-backend nccl --device cpu",
        1,
        "--distributed-backend nccl contradicts --device cpu: nccl moves GPU memory only. Use --distributed-backend"
        " gloo, or leave it out.",
    ),
    # batch
    (
        "",
        "--global-batch-size 9",
        1,
        "--global-batch-size 9 is not divisible by --micro-batch-size 2 x data-parallel size 1 = 2. Nearest valid:"
        " --global-batch-size 8 or 10.",
    ),
    (
        "",
        "--global-batch-size 12",
        4,
        "--global-batch-size 12 is not divisible by --micro-batch-size 2 x data-parallel size 4 = 8. Nearest valid:"
        " --global-batch-size 8 or 16.",
    ),
    (
        "",
        "--micro-batch-size 3",
        1,
        "--global-batch-size 8 is not divisible by --micro-batch-size 3 x data-parallel size 1 = 3. Nearest valid:"
        " --global-batch-size 6 or 9.",
    ),
]


@pytest.mark.parametrize("case", TABLE, ids=ids_of(TABLE))
def test_refusal(case: Refusal) -> None:
    check_refused(case)
