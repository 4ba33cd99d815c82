"""Launch arguments of Megatron-LM, as a dictionary of flags without dashes, to the numbers that memory depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megackpt.plan.numbers import ModelNumbers

Arguments = Mapping[str, Any]

# Vocabularies of tokenizers that the arguments only name.
DEFAULT_VOCAB = 50257  # GPT-2's byte pairs, used where no tokenizer is named
KNOWN_VOCABS = {"nemotron_2_256k": 256000}

# Flags whose memory is not modelled, and what a prediction would need to know.
NOT_MODELLED = {
    "num-experts": "tokens that the router sends to each rank",
    "multi-latent-attention": "the low-rank queries, keys and values",
    "fp8-format": "fp8 copies of weights and inputs, and their scales",
    "fp8-hybrid": "fp8 copies of weights and inputs, and their scales",
    "mtp-num-layers": "layers and losses of multi-token prediction",
    "use-megatron-fsdp": "which layers are gathered at a time",
    "use-torch-fsdp2": "which layers are gathered at a time",
    "use-custom-fsdp": "which layers are gathered at a time",
    "optimizer-cpu-offload": "the share of the optimizer on the host",
    "use-precision-aware-optimizer": "the formats of masters, moments and gradients",
    "enable-cuda-graph": "the pools of captured graphs",
    "external-cuda-graph": "the pools of captured graphs",
    "cpu-offloading-num-layers": "activations on the host",
    "hybrid-override-pattern": "state-space layers",
}
_VALUES_THAT_MEAN_NO = (None, False, 0, "", "none", "None")


@dataclass(frozen=True)
class MegatronRun:
    """One run.  ``not_modelled``: flags that change memory in a way this room does not know, with what is missing."""

    model: ModelNumbers
    t: int
    p: int
    c: int
    d: int  # copies of a parameter over data- and context-parallel ranks
    v: int
    n: int
    micro_batch: int
    layers_by_chunk: tuple[int, ...]  # of the last stage
    group: int  # micro-batches per turn of an interleaved schedule
    sequence_parallel: bool
    sharded_optimizer: bool
    optimizer_copies: int
    precision: str  # bf16, fp16, fp32
    transformer_engine: bool
    attention: str  # flash, cudnn or unfused
    attention_is_named: bool
    hopper: bool  # or later
    deterministic: bool
    fused_loss: bool
    fused_accumulation: bool
    loader_mask: bool
    recompute: str = "none"  # none, core, full
    recompute_layers: int = 1
    recompute_method: str = "uniform"
    qk_norm: bool = False
    not_modelled: Mapping[str, str] = field(default_factory=dict)

    def with_copies(self, d: int) -> MegatronRun:
        return replace(self, d=d)

    def with_attention(self, kernel: str) -> MegatronRun:
        return replace(self, attention=kernel)


def read_arguments(args: Arguments, gpus: int, hardware: str) -> MegatronRun:
    """Raises ValueError when sizes contradict each other."""
    t, p = int(args.get("tensor-model-parallel-size", 1)), int(args.get("pipeline-model-parallel-size", 1))
    c, micro = int(args.get("context-parallel-size", 1)), int(args.get("micro-batch-size", 1))
    if gpus % (t * p * c):
        raise ValueError(f"{gpus} GPUs do not divide into {t} x {p} x {c} tensor, pipeline and context ranks")
    data = gpus // (t * p * c)
    chunks = _chunks(args, p)
    # a batch that grows over the run is mostly at its end; more micro-batches than stages change nothing here
    batch = int(args.get("global-batch-size") or micro * data * p)
    engine = args.get("transformer-impl", "transformer_engine") == "transformer_engine"
    hopper = not hardware.lower().startswith(("v100", "a100"))
    kernel, named = _attention(args, engine, hopper)
    recompute = _recompute(args)
    return MegatronRun(
        model=read_model(args, t),
        t=t,
        p=p,
        c=c,
        d=data * c,
        v=len(chunks),
        n=max(1, batch // (micro * data)),
        micro_batch=micro,
        layers_by_chunk=chunks,
        group=int(args.get("microbatch-group-size-per-virtual-pipeline-stage") or p),
        sequence_parallel=bool(args.get("sequence-parallel")) and t > 1,
        sharded_optimizer=bool(args.get("use-distributed-optimizer")),
        optimizer_copies=int(args.get("num-distributed-optimizer-instances") or 1),
        precision="bf16" if args.get("bf16") else "fp16" if args.get("fp16") else "fp32",
        transformer_engine=engine,
        attention=kernel,
        attention_is_named=named,
        hopper=hopper,
        deterministic=bool(args.get("deterministic-mode")),
        fused_loss=bool(args.get("cross-entropy-loss-fusion")),
        fused_accumulation=not args.get("no-gradient-accumulation-fusion"),
        loader_mask=not args.get("no-create-attention-mask-in-dataloader"),
        recompute=recompute,
        recompute_layers=int(args.get("recompute-num-layers") or 1),
        recompute_method=args.get("recompute-method") or "uniform",
        qk_norm=bool(args.get("qk-layernorm")),
        not_modelled={k: why for k, why in NOT_MODELLED.items() if args.get(k) not in _VALUES_THAT_MEAN_NO},
    )


def read_model(args: Arguments, t: int) -> ModelNumbers:
    """The model of the arguments, its vocabulary padded for t ranks."""
    hidden, heads = int(args["hidden-size"]), int(args["num-attention-heads"])
    gated = bool(args.get("swiglu"))
    ffn = args.get("ffn-hidden-size") or (int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden)
    vocab = _vocabulary(args)
    multiple = int(args.get("make-vocab-size-divisible-by") or 128) * t
    return ModelNumbers(
        layers=int(args["num-layers"]),
        hidden=hidden,
        heads=heads,
        kv_heads=int(args["num-query-groups"]) if args.get("group-query-attention") else heads,
        head_size=int(args.get("kv-channels") or hidden // heads),
        ffn=int(ffn),
        vocab=vocab,
        padded_vocab=-(-vocab // multiple) * multiple,
        seq=int(args["seq-length"]),
        norm=args.get("normalization") or "LayerNorm",
        positions=args.get("position-embedding-type") or "learned_absolute",
        max_positions=int(args.get("max-position-embeddings") or args["seq-length"]),
        biases=not args.get("disable-bias-linear"),
        tied=not args.get("untie-embeddings-and-output-weights"),
        activation="swiglu" if gated else "squared_relu" if args.get("squared-relu") else "gelu",
        hidden_dropout=float(args.get("hidden-dropout", 0.1)),
        attention_dropout=float(args.get("attention-dropout", 0.1)),
    )


def _vocabulary(args: Arguments) -> int:
    if args.get("vocab-size"):
        end = 1 if args.get("tokenizer-type") == "NullTokenizer" else 0  # its end-of-document token
        return int(args["vocab-size"]) + end
    name = str(args.get("tokenizer-model") or "")
    return next((size for key, size in KNOWN_VOCABS.items() if key in name), DEFAULT_VOCAB)


def _chunks(args: Arguments, p: int) -> tuple[int, ...]:
    """Layers of the last stage by chunk.  Embedding or loss may stand for a layer, and the ends may be given."""
    layers = int(args["num-layers"])
    loss = 1 if args.get("account-for-loss-in-pipeline-split") and p > 1 else 0
    embedding = 1 if args.get("account-for-embedding-in-pipeline-split") and p > 1 else 0
    first, last = args.get("decoder-first-pipeline-num-layers"), args.get("decoder-last-pipeline-num-layers")
    if last is not None:
        stage = int(last)
    elif first is not None and p > 1:
        stage = (layers - int(first)) // (p - 1)
    else:
        stage = (layers + loss + embedding) // p
    per_chunk = args.get("num-layers-per-virtual-pipeline-stage")
    count = int(args.get("num-virtual-stages-per-pipeline-rank") or (stage // int(per_chunk) if per_chunk else 1))
    chunks = [stage // max(1, count)] * max(1, count)
    chunks[-1] -= loss
    return tuple(chunks)


def _attention(args: Arguments, engine: bool, hopper: bool) -> tuple[str, bool]:
    """The kernel, and whether the arguments name it.  Left alone, transformer-engine takes cuDNN's fused kernel on
    Hopper and later, FlashAttention before."""
    named = str(args.get("attention-backend") or "auto").lower()
    if not engine or named in ("unfused", "local"):
        return "unfused", True
    if named in ("flash", "fused"):
        return {"flash": "flash", "fused": "cudnn"}[named], True
    return ("cudnn" if hopper else "flash"), False


def _recompute(args: Arguments) -> str:
    granularity = args.get("recompute-granularity")
    if granularity == "full" or args.get("checkpoint-activations"):
        return "full"
    if granularity == "selective" or args.get("recompute-activations"):
        return "core" if "core_attn" in (args.get("recompute-modules") or ["core_attn"]) else "none"
    return "none"
