"""Flag table: what has no effect here, and what is refused for good."""

from __future__ import annotations

from megackpt.config.flag import Flag, accept, reject

ACCEPTED = "Accepted, no effect here"
REFUSED = "Refused, with what to use"

_FUSION = "Fusion changes no result; the fastest exact form is used."
_DEEPSPEED = "there is no DeepSpeed engine: leave it out, and give sizes and batches by flags."
_MOE = "models are dense: leave it out."

ROWS: tuple[Flag, ...] = (
    accept("--no-gradient-accumulation-fusion", ACCEPTED, "switch", _FUSION),
    accept("--no-masked-softmax-fusion", ACCEPTED, "switch", _FUSION),
    accept("--no-bias-gelu-fusion", ACCEPTED, "switch", _FUSION),
    accept("--no-bias-swiglu-fusion", ACCEPTED, "switch", _FUSION),
    accept("--no-bias-dropout-fusion", ACCEPTED, "switch", _FUSION),
    accept("--no-rope-fusion", ACCEPTED, "switch", _FUSION),
    accept("--no-persist-layer-norm", ACCEPTED, "switch", _FUSION),
    accept("--cross-entropy-loss-fusion", ACCEPTED, "switch", _FUSION),
    accept("--no-async-tensor-model-parallel-allreduce", ACCEPTED, "switch", "Changes no result."),
    accept("--tp-comm-overlap", ACCEPTED, "switch", "Changes no result."),
    accept("--transformer-impl", ACCEPTED, "text", "There is one implementation."),
    accept("--use-mcore-models", ACCEPTED, "switch", "There is one implementation."),
    accept("--use-legacy-models", ACCEPTED, "switch", "There is one implementation."),
    accept("--DDP-impl", ACCEPTED, "text", "There is one implementation."),
    accept("--use-cpu-initialization", ACCEPTED, "switch", "Weights are always drawn on the CPU."),
    reject("--num-experts", REFUSED, "many", _MOE),
    reject("--expert-model-parallel-size", REFUSED, "int", _MOE, "1"),
    reject("--moe-router-topk", REFUSED, "int", _MOE),
    reject(
        "--multi-latent-attention",
        REFUSED,
        "switch",
        "use --group-query-attention for a small key/value cache.",
    ),
    reject("--fp8-format", REFUSED, "text", "use --bf16."),
    reject("--deepspeed", REFUSED, "switch", _DEEPSPEED),
    reject("--deepspeed_config", REFUSED, "text", _DEEPSPEED),
    reject("--zero-stage", REFUSED, "int", "stage 1 is --use-distributed-optimizer; there are no others.", "0"),
    reject(
        "--no-pipeline-parallel",
        REFUSED,
        "switch",
        "use --pipeline-model-parallel-size 1, which is the default.",
    ),
    reject("--train-tokens", REFUSED, "int", "use --train-samples with tokens / sequence length."),
    reject("--context-parallel-algo", REFUSED, "text", "there is no context parallelism: leave it out."),
    reject("--yaml-cfg", REFUSED, "text", "use --config."),
)
