"""Every refusal, by its whole message.  The lines are added to T0 (see base.py)."""

from __future__ import annotations

import pytest

from megackpt.config.errors import UsageError
from tests.config.base import run

BLOCK_MODULES = (
    "core_attn, layernorm, mlp, attn.norm, attn.gather, attn.qkv, attn.qknorm, attn.rope, attn.core, mlp.norm,"
    " mlp.gather, mlp.up, mlp.act"
)

# (flags of T0 left out, flags added, processes, message)
TABLE = [
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

_AT_LEAST_ONE = """--num-layers --hidden-size --num-attention-heads --seq-length --micro-batch-size --global-batch-size
--ffn-hidden-size --kv-channels --num-query-groups --max-position-embeddings --vocab-size
--make-vocab-size-divisible-by --tensor-model-parallel-size --pipeline-model-parallel-size --train-iters
--eval-interval --exit-interval --lr-decay-iters --save-interval --log-interval --memory-track-interval
--recompute-num-layers"""


@pytest.mark.parametrize(("drop", "line", "world_size", "message"), TABLE, ids=[row[1] or row[0] for row in TABLE])
def test_refusal(drop: str, line: str, world_size: int, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        run(line, drop=drop, world_size=world_size)
    assert str(caught.value) == message


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
