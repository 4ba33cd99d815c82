"""The model, its attention, its recomputation: every refusal by its message.  Lines are added to T0 (see base.py)."""

from __future__ import annotations

import pytest

from tests.config.base import Refusal, check_refused, ids_of

BLOCK_MODULES = (
    "core_attn, layernorm, mlp, attn.norm, attn.gather, attn.qkv, attn.qknorm, attn.rope, attn.core, mlp.norm,"
    " mlp.gather, mlp.up, mlp.act"
)

# (flags of T0 left out, flags added, processes, message)
TABLE: list[Refusal] = [
    # heads, groups, ffn, sequence against tensor parallel
    (
        "--ffn-hidden-size",
        "--tensor-model-parallel-size 3",
        3,
        "--num-attention-heads 8 is not divisible by --tensor-model-parallel-size 3. Nearest valid:"
        " --num-attention-heads 6 or 9, or --tensor-model-parallel-size 2 or 4. Or keep the model and pad it with heads"
        " that are zero: --num-attention-heads 9 --unpadded-query-groups 8 --kv-channels 12, which loads its"
        " checkpoints as they are (megackpt convert --target-tensor-parallel-size 3 sets them for you).",
    ),
    (
        "",
        "--tensor-model-parallel-size 4 --group-query-attention --num-query-groups 2",
        4,
        "--num-query-groups 2 is not divisible by --tensor-model-parallel-size 4. Nearest valid:"
        " --num-query-groups 4, or --tensor-model-parallel-size 2. Or keep the model and pad it with heads that are"
        " zero: --num-attention-heads 16 --group-query-attention --num-query-groups 4 --unpadded-query-groups 2"
        " --kv-channels 12, which loads its checkpoints as they are (megackpt convert --target-tensor-parallel-size 4"
        " sets them for you).",
    ),
    (
        "--ffn-hidden-size",
        "--tensor-model-parallel-size 4 --ffn-hidden-size 334",
        4,
        "--ffn-hidden-size 334 is not divisible by --tensor-model-parallel-size 4. Nearest valid:"
        " --ffn-hidden-size 332 or 336, or --tensor-model-parallel-size 2 or 167.",
    ),
    (
        "--seq-length",
        "--seq-length 62 --tensor-model-parallel-size 4 --sequence-parallel",
        4,
        "--seq-length 62 is not divisible by --tensor-model-parallel-size 4 (with --sequence-parallel). Nearest valid:"
        " --seq-length 60 or 64, or --tensor-model-parallel-size 2 or 31.",
    ),
    # the model alone
    (
        "--hidden-size",
        "--hidden-size 100",
        1,
        "--hidden-size 100 is not divisible by --num-attention-heads 8. Nearest valid: --hidden-size 96 or 104,"
        " --num-attention-heads 5 or 10, or give the size of a head with --kv-channels.",
    ),
    (
        "",
        "--group-query-attention --num-query-groups 3",
        1,
        "--num-attention-heads 8 is not divisible by --num-query-groups 3. Nearest valid: --num-query-groups 2 or 4.",
    ),
    (
        "",
        "--num-query-groups 2",
        1,
        "--num-query-groups 2 has no effect without --group-query-attention: add it, or leave --num-query-groups out.",
    ),
    (
        "",
        "--max-position-embeddings 39",
        1,
        "--seq-length 40 exceeds --max-position-embeddings 39: learned positions end there. Nearest valid:"
        " --max-position-embeddings 40.",
    ),
    ("", "--hidden-dropout 1.0", 1, "--hidden-dropout must be in [0.0, 1.0); got 1.0."),
    ("", "--attention-dropout -0.1", 1, "--attention-dropout must be in [0.0, 1.0); got -0.1."),
    ("", "--rotary-percent 1.5", 1, "--rotary-percent must be above 0 and at most 1; got 1.5."),
    ("", "--rotary-percent 0", 1, "--rotary-percent must be above 0 and at most 1; got 0.0."),
    ("", "--rotary-base 0", 1, "--rotary-base must be above 0; got 0.0."),
    (
        "",
        "--position-embedding-type rope --rotary-percent 0.3",
        1,
        "--position-embedding-type rope rotates pairs of channels, but --rotary-percent 0.3 of 12 channels per head"
        " (--kv-channels) is 3, which is not an even number of at least 2.",
    ),
    (
        "",
        "--position-embedding-type alibi",
        1,
        "--position-embedding-type takes learned_absolute, rope or none; got 'alibi'.",
    ),
    (
        "",
        "--position-embedding-type learned_absolute --use-rotary-position-embeddings",
        1,
        "--use-rotary-position-embeddings and --position-embedding-type learned_absolute contradict each other:"
        " --use-rotary-position-embeddings means --position-embedding-type rope.",
    ),
    (
        "",
        "--normalization rmsnorm",
        1,
        "--normalization takes LayerNorm or RMSNorm; got 'rmsnorm'. Did you mean RMSNorm?",
    ),
    ("", "--norm-epsilon 0", 1, "--norm-epsilon must be above 0; got 0.0."),
    ("", "--init-method-std -1", 1, "--init-method-std must be above 0; got -1.0."),
    ("", "--swiglu --squared-relu", 1, "--swiglu and --squared-relu contradict each other: an MLP has one activation."),
    (
        "",
        "--use-flash-attn --attention-backend unfused",
        1,
        "--use-flash-attn and --attention-backend unfused contradict each other: --use-flash-attn means"
        " --attention-backend flash.",
    ),
    (
        "",
        "--tie-embeddings --untie-embeddings-and-output-weights",
        1,
        "--tie-embeddings and --untie-embeddings-and-output-weights contradict each other: --tie-embeddings means"
        " --untie-embeddings-and-output-weights=false.",
    ),
    # recompute
    (
        "",
        "--recompute-granularity selective --recompute-method uniform",
        1,
        "--recompute-method uniform contradicts --recompute-granularity selective: it says how full recomputation is"
        " done. Use --recompute-granularity full, or leave --recompute-method out.",
    ),
    (
        "",
        "--recompute-num-layers 2",
        1,
        "--recompute-num-layers 2 contradicts --recompute-granularity none: it says how full recomputation is done."
        " Use --recompute-granularity full, or leave --recompute-num-layers out.",
    ),
    (
        "",
        "--recompute-activations --recompute-keep layer-input",
        1,
        "--recompute-keep layer-input contradicts --recompute-granularity selective: it says how full recomputation is"
        " done. Use --recompute-granularity full, or leave --recompute-keep out.",
    ),
    (
        "",
        "--recompute-granularity full --recompute-method block",
        1,
        "--recompute-method block needs --recompute-num-layers: how many layers of each stage are replayed.",
    ),
    (
        "",
        "--recompute-granularity full --recompute-modules mlp",
        1,
        "--recompute-modules mlp contradicts --recompute-granularity full, which drops all of them: use"
        " --recompute-granularity selective.",
    ),
    (
        "",
        "--recompute-modules mlp layernorm",
        1,
        "--recompute-modules mlp layernorm contradicts --recompute-granularity none: use --recompute-granularity"
        " selective.",
    ),
    (
        "",
        "--recompute-granularity selective --recompute-modules moe_act",
        1,
        f"--recompute-modules takes names among {BLOCK_MODULES}; got 'moe_act'.",
    ),
    (
        "",
        "--recompute-granularity selective --recompute-modules attn.nrom",
        1,
        f"--recompute-modules takes names among {BLOCK_MODULES}; got 'attn.nrom'. Did you mean attn.norm?",
    ),
    (
        "",
        "--recompute-granularity selective --recompute-modules mlp.down",
        1,
        "--recompute-modules mlp.down: replaying this step frees nothing, since it is a boundary or only feeds one. To"
        " keep less than every boundary use --recompute-granularity full.",
    ),
    (
        "",
        "--recompute-granularity selective --recompute-modules attn.qknorm",
        1,
        "--recompute-modules attn.qknorm needs --qk-layernorm: this model norms no heads.",
    ),
    (
        "",
        "--recompute-granularity selective --recompute-modules attn.rope",
        1,
        "--recompute-modules attn.rope contradicts --position-embedding-type learned_absolute: this model rotates"
        " nothing.",
    ),
    (
        "",
        "--recompute-activations --recompute-granularity full",
        1,
        "--recompute-activations and --recompute-granularity full contradict each other: --recompute-activations means"
        " --recompute-granularity selective.",
    ),
    (
        "",
        "--recompute-activations --checkpoint-activations",
        1,
        "--checkpoint-activations and --recompute-activations contradict each other: --checkpoint-activations means"
        " --recompute-granularity full.",
    ),
    (
        "",
        "--recompute-granularity half",
        1,
        "--recompute-granularity takes none, free, selective, full or auto; got 'half'.",
    ),
    # auto
    (
        "",
        "--memory-budget-gib 0",
        1,
        "--memory-budget-gib must be above 0; got 0.0.",
    ),
    (
        "",
        "--recompute-granularity auto --memory-budget-gib 85899345920",
        1,
        "--memory-budget-gib is the memory of one rank, at most 1,000,000; got 8.58993e+10.",
    ),
    (
        "",
        "--memory-budget-gib 2.5 --recompute-granularity full",
        1,
        "--memory-budget-gib 2.5 contradicts --recompute-granularity full, which says itself what is kept: use"
        " --recompute-granularity auto, or leave --memory-budget-gib out.",
    ),
    (
        "",
        "--recompute-adapt --recompute-plan plan.json",
        1,
        "--recompute-adapt contradicts --recompute-plan, which says itself what is kept: use --recompute-granularity"
        " auto, or leave --recompute-adapt out.",
    ),
]


@pytest.mark.parametrize("case", TABLE, ids=ids_of(TABLE))
def test_refusal(case: Refusal) -> None:
    check_refused(case)
