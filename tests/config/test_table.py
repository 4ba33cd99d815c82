"""The flag table is whole and consistent, and the pages written from it are current."""

from __future__ import annotations

import csv
from dataclasses import fields
from pathlib import Path

import pytest

from megackpt.config.flags import BY_KEY, BY_TARGET, DETAILS, EXCLUSIVE, FLAGS
from megackpt.config.help import WIDTH, help_text, markdown
from megackpt.config.resolve import SECTION_TYPES
from tests.config.base import parsed

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
with (HERE / "megatron-flags.csv").open() as file:
    USED = list(csv.DictReader(file))

_WORKS = """
--num-layers --hidden-size --num-attention-heads --seq-length --max-position-embeddings --init-method-std
--attention-dropout --hidden-dropout --ffn-hidden-size --disable-bias-linear --untie-embeddings-and-output-weights
--swiglu --normalization --position-embedding-type --num-query-groups --group-query-attention
--use-rotary-position-embeddings --kv-channels --rotary-percent --make-vocab-size-divisible-by
--attention-softmax-in-fp32 --rotary-base --vocab-size --norm-epsilon
--lr --micro-batch-size --global-batch-size --weight-decay --lr-decay-style --eval-interval --clip-grad --min-lr
--eval-iters --train-iters --adam-beta1 --adam-beta2 --lr-decay-iters --bf16 --fp16 --train-samples --lr-warmup-fraction
--seed --finetune --lr-decay-samples --lr-warmup-samples --lr-warmup-iters --exit-interval --adam-eps --optimizer
--exit-duration-in-mins --exit-signal-handler
--use-checkpoint-opt_param-scheduler --override-opt_param-scheduler --decoupled-lr
--deterministic-mode --rampup-batch-size --loss-scale --initial-loss-scale --hysteresis
--no-check-for-nan-in-loss-and-grad
--tensor-model-parallel-size --pipeline-model-parallel-size --sequence-parallel --distributed-backend
--distributed-timeout-minutes --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
--num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank
--decoder-first-pipeline-num-layers --pipeline-model-parallel-layout --account-for-embedding-in-pipeline-split
--recompute-granularity --recompute-method --recompute-num-layers --recompute-activations --recompute-modules
--checkpoint-activations --checkpoint-num-layers --activations-checkpoint-method
--save --load --save-interval --no-load-optim --no-load-rng --no-save-optim --no-save-rng
--ckpt-format --use-checkpoint-args --exit-on-missing-checkpoint --pretrained-checkpoint --async-save
--dist-ckpt-strictness --save-retain-interval --ckpt-step
--data-path --split --tokenizer-type --tokenizer-model --vocab-file --merge-file --data-cache-path
--train-data-path --valid-data-path --test-data-path --reset-attention-mask --reset-position-ids
--tokenizer-name-or-path
--mock-data --num-workers
--log-interval --log-throughput --log-num-zeros-in-grad --log-params-norm --tensorboard-dir --wandb-project
--wandb-exp-name --use-flash-attn --attention-backend
"""
WORKS = _WORKS.split()

WRITTEN_ANYWAY = (
    "--log-validation-ppl-to-tensorboard",
    "--log-timers-to-tensorboard",
    "--log-batch-size-to-tensorboard",
    "--log-memory-to-tensorboard",
    "--timing-log-level",
)


def test_every_flag_that_launch_scripts_use_is_in_the_table() -> None:
    assert len(USED) == 191
    assert [row["flag"] for row in USED if row["flag"].removeprefix("--").replace("_", "-") not in BY_KEY] == []
    spelled = {flag.name for flag in FLAGS}
    assert [row["flag"] for row in USED if row["flag"] not in spelled] == []


@pytest.mark.parametrize("row", USED, ids=lambda row: row["flag"])
def test_state_follows_from_tier(row: dict[str, str]) -> None:
    flag = next(flag for flag in FLAGS if flag.name == row["flag"])
    if flag.name in WORKS:
        assert flag.state == "works"
    elif row["tier"] == "accept" or row["group"].startswith("Accept"):
        assert flag.state == "accept"
    elif row["tier"] == "reject" or row["group"].startswith("Reject"):
        assert flag.state == "reject" and flag.help
    elif row["tier"] == "later":
        assert flag.state == "later" and flag.help
    elif row["tier"] == "must":
        assert flag.state == "later" or flag.name in (
            "--tensorboard-queue-size",
            *WRITTEN_ANYWAY,
        )


def test_names_and_targets_are_unique() -> None:
    assert len(BY_KEY) == len(FLAGS)
    targets = [flag.target for flag in FLAGS if flag.target]
    assert len(targets) == len(BY_TARGET)


def test_every_field_has_a_flag_and_every_target_a_field() -> None:
    existing = {f"{section}.{field.name}" for section, kind in SECTION_TYPES.items() for field in fields(kind)}
    # The mesh size comes from the launcher, the context axis from its own issue, the second vocab_size from the first.
    assert existing - set(BY_TARGET) == {"parallel.world_size", "parallel.context", "data.vocab_size"}
    assert set(BY_TARGET) <= existing


def test_cross_references_name_flags_that_work() -> None:
    named = {key for flag in FLAGS for key, _ in flag.implies}
    named |= {key for rivals in EXCLUSIVE for key in rivals} | {key for keys in DETAILS.values() for key in keys}
    assert [key for key in named if BY_KEY[key].state != "works"] == []


def test_every_refused_flag_refuses_and_every_accepted_one_is_listed() -> None:
    for flag in FLAGS:
        if flag.state in ("reject", "later"):
            assert flag.refusal(True if flag.kind == "switch" else 7), flag.name
    accepted = [flag for flag in FLAGS if flag.state == "accept"]
    line = " ".join(flag.name if flag.kind == "switch" else f"{flag.name} 3" for flag in accepted)
    names = ", ".join(sorted(flag.name for flag in accepted))
    assert parsed(line).notices == (f"accepted, no effect here: {names}",)


def test_help_names_every_flag_once_and_fits_a_terminal() -> None:
    text = help_text()
    described, listed = text.split("\n\nAccepted, no effect here:\n")
    heads = [line.split()[0] for line in described.splitlines() if line.startswith("  --")] + listed.split()
    for flag in FLAGS:
        assert heads.count(flag.name) == 1, flag.name
    assert max(len(line) for line in text.splitlines()) <= WIDTH


def test_help_says_what_recomputation_does_to_bytes() -> None:
    text = " ".join(help_text().split())
    for piece in ("34sbh/t", "4sbh/t", "2sbh/t", "with fused attention, which never stores them, it saves almost"):
        assert piece in text


def test_flag_page_is_current() -> None:
    page = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    assert page == markdown(), "run python tools/write_flag_docs.py"
    assert all(f"`{flag.name}" in page for flag in FLAGS)
