"""Flag table: parallelism and recomputation."""

from __future__ import annotations

from megackpt.config.flag import Flag, later, works
from megackpt.config.parallel import BACKENDS, DEVICES, SCHEDULES
from megackpt.config.recompute import GRANULARITIES, KEEPS, METHODS, MODULES

PARALLEL = "Parallelism"
RECOMPUTE = "Recomputation"

_OFFLOAD = "use --recompute-granularity to save the same bytes by recomputing."
_FULL = "use --recompute-granularity full."

ROWS: tuple[Flag, ...] = (
    works(
        "--tensor-model-parallel-size",
        PARALLEL,
        "int",
        "parallel.tensor",
        "Ranks that share every layer's weights.",
        minimum=1,
    ),
    works(
        "--pipeline-model-parallel-size",
        PARALLEL,
        "int",
        "parallel.pipeline",
        "Stages that share the layers; the remainder of an uneven split goes to the middle stages.",
        minimum=1,
    ),
    works(
        "--pipeline-schedule",
        PARALLEL,
        "text",
        "parallel.schedule",
        "1f1b (interleaved, with several chunks per stage); gpipe keeps all micro-batches of a step; zb-h1 puts weight"
        " gradients off to fill the pipeline's idle time, and keeps their factors meanwhile.",
        choices=SCHEDULES,
    ),
    works(
        "--num-layers-per-virtual-pipeline-stage",
        PARALLEL,
        "int",
        "parallel.layers_per_chunk",
        "Interleave: every stage has several chunks of this many layers, which shrinks the pipeline's idle time and"
        " keeps more activations. Any number of micro-batches.",
        minimum=1,
    ),
    works(
        "--num-virtual-stages-per-pipeline-rank",
        PARALLEL,
        "int",
        "parallel.chunks",
        "Interleave: chunks per stage. The layers need not divide evenly.",
        minimum=1,
    ),
    works(
        "--decoder-first-pipeline-num-layers",
        PARALLEL,
        "int",
        "parallel.first_stage_layers",
        "Layers of the first stage; the others share the rest.",
        minimum=1,
    ),
    works(
        "--decoder-last-pipeline-num-layers",
        PARALLEL,
        "int",
        "parallel.last_stage_layers",
        "Layers of the last stage; the others share the rest.",
        minimum=1,
    ),
    works(
        "--account-for-embedding-in-pipeline-split",
        PARALLEL,
        "switch",
        "parallel.count_embedding",
        "Count the embedding as a layer of the first stage when layers are divided.",
    ),
    works(
        "--account-for-loss-in-pipeline-split",
        PARALLEL,
        "switch",
        "parallel.count_loss",
        "Count the head, a product over the vocabulary, as a layer of the last stage when layers are divided.",
    ),
    works(
        "--pipeline-model-parallel-layout",
        PARALLEL,
        "text",
        "parallel.layout",
        "What every chunk holds: E embedding, t layer, L loss, | between chunks, x*3 and (xy|)*3 repeat, as in"
        " Et*3|(tt|)*2,t|L. The first chunk of every stage comes first, then the second of every stage.",
        metavar="TEXT",
    ),
    works(
        "--sequence-parallel",
        PARALLEL,
        "switch",
        "parallel.sequence_parallel",
        "Split norms, residuals and dropout along the sequence over the tensor-parallel ranks.",
    ),
    works(
        "--distributed-backend",
        PARALLEL,
        "text",
        "parallel.backend",
        "Communication library.",
        choices=BACKENDS,
        default="nccl on GPUs, gloo on CPUs",
    ),
    works(
        "--distributed-timeout-minutes",
        PARALLEL,
        "float",
        "parallel.timeout_minutes",
        "A collective that takes longer ends the run.",
    ),
    works(
        "--device",
        PARALLEL,
        "text",
        "parallel.device",
        "Where to compute.",
        choices=DEVICES,
        default="cuda if present",
    ),
    works(
        "--use-distributed-optimizer",
        PARALLEL,
        "switch",
        "parallel.distributed_optimizer",
        "Spread the optimizer over the d data-parallel ranks (ZeRO-1): 6 + 12/d bytes per 16-bit parameter instead of"
        " 18. Gradients are reduce-scattered and updated parameters all-gathered, once per bucket and step; the result"
        " is the same.",
    ),
    works(
        "--ddp-bucket-size",
        PARALLEL,
        "int",
        "parallel.bucket_size",
        "Elements from which on a bucket of gradients is closed; one collective reduces a bucket.",
        minimum=1,
        default="40,000,000, or 1,000,000 per data-parallel rank if that is more",
    ),
    works(
        "--overlap-grad-reduce",
        PARALLEL,
        "switch",
        "parallel.overlap_grad_reduce",
        "Reduce a bucket as soon as its last gradient of the step is there, beside the backward. Changes no result.",
    ),
    works(
        "--overlap-param-gather",
        PARALLEL,
        "switch",
        "parallel.overlap_param_gather",
        "With --use-distributed-optimizer: gather updated parameters beside the next forward. Changes no result.",
    ),
    later(
        "--context-parallel-size",
        PARALLEL,
        "int",
        "use --tensor-model-parallel-size with --sequence-parallel.",
        "1",
    ),
    later("--cp-comm-type", PARALLEL, "many", "leave it out.", "p2p"),
    later("--use-tp-pp-dp-mapping", PARALLEL, "switch", "ranks are ordered tp, then dp, then pp."),
    later("--use-torch-fsdp2", PARALLEL, "switch"),
    works(
        "--recompute-granularity",
        RECOMPUTE,
        "text",
        "recompute.granularity",
        "What backward rebuilds instead of keeping. Bytes per layer in 16-bit formats (s sequence, b micro-batch,"
        " h hidden, a heads, t tensor-parallel size with sequence parallel): none keeps everything, 34sbh/t, and with"
        " --attention-backend unfused 5ass*b/t more; free drops norm outputs, the activation output and dropout masks"
        " at almost no work; selective drops what --recompute-modules names; full keeps 4sbh/t (see"
        " --recompute-keep) and replays about a fifth of the step; auto chooses per stage and chunk what replays least"
        " within --memory-budget-gib.",
        choices=GRANULARITIES,
    ),
    works(
        "--recompute-modules",
        RECOMPUTE,
        "many",
        "recompute.modules",
        f"Of selective, what is dropped: {', '.join(MODULES)}. core_attn (attn.core) drops the s x s matrices,"
        " 5ass*b/t, of the unfused core; with fused attention, which never stores them, it saves almost nothing:"
        " name other modules there. layernorm drops both norm outputs, 4sbh/t; mlp drops the MLP's products,"
        " 16sbh/t, for about a third of the forward.",
        metavar="NAME ...",
    ),
    works(
        "--recompute-method",
        RECOMPUTE,
        "text",
        "recompute.method",
        "Of full: uniform replays groups of --recompute-num-layers layers, each from the group's input; block replays"
        " the first --recompute-num-layers layers of every stage and keeps the others whole.",
        choices=METHODS,
        default="uniform with full",
    ),
    works(
        "--recompute-num-layers",
        RECOMPUTE,
        "int",
        "recompute.num_layers",
        "Of full: layers per group (uniform: 2sbh/t per group when above 1; a last group may be smaller) or replayed"
        " layers per stage (block).",
        minimum=1,
        default="1 with uniform; needed with block",
    ),
    works(
        "--recompute-keep",
        RECOMPUTE,
        "text",
        "recompute.keep",
        "Of full with single layers: boundaries keeps the layer's input and the residual after attention, 4sbh/t, and"
        " replays no reduction; layer-input keeps 2sbh/t, as Megatron does, and replays one product and one reduction"
        " more.",
        choices=KEEPS,
    ),
    works(
        "--recompute-ahead-layers",
        RECOMPUTE,
        "int",
        "recompute.ahead",
        "With several stages: so many of a chunk's last layers are rebuilt while the gradient of its output is still on"
        " its way, for the bytes of all that is rebuilt at once.",
    ),
    works(
        "--recompute-activations",
        RECOMPUTE,
        "switch",
        None,
        "The same as --recompute-granularity selective.",
        implies=(("recompute-granularity", "selective"),),
    ),
    works(
        "--checkpoint-activations",
        RECOMPUTE,
        "switch",
        None,
        "Old name of --recompute-granularity full (activation checkpointing).",
        implies=(("recompute-granularity", "full"),),
        warning="--checkpoint-activations is an old name: it is read as --recompute-granularity full"
        " --recompute-method uniform --recompute-num-layers 1 (unless those say otherwise).",
    ),
    works(
        "--activations-checkpoint-method",
        RECOMPUTE,
        "text",
        None,
        "Old name of --recompute-granularity full with this --recompute-method.",
        choices=METHODS,
        implies=(("recompute-granularity", "full"), ("recompute-method", None)),
        warning="--activations-checkpoint-method is an old name: it is read as --recompute-granularity full with"
        " --recompute-method.",
    ),
    works(
        "--checkpoint-num-layers",
        RECOMPUTE,
        "int",
        None,
        "Old name of --recompute-num-layers.",
        minimum=1,
        implies=(("recompute-num-layers", None),),
        warning="--checkpoint-num-layers is an old name: it is read as --recompute-num-layers.",
    ),
    later("--deepspeed-activation-checkpointing", RECOMPUTE, "switch", _FULL),
    works(
        "--distribute-saved-activations",
        RECOMPUTE,
        "switch",
        "recompute.distribute",
        "Of full: each tensor-parallel rank keeps 1/t of a boundary and gathers it at replay (one all-gather each);"
        " with --sequence-parallel boundaries are split already.",
    ),
    works(
        "--partition-activations",
        RECOMPUTE,
        "switch",
        None,
        "DeepSpeed's name of --distribute-saved-activations.",
        implies=(("distribute-saved-activations", True),),
    ),
    works(
        "--recompute-plan",
        RECOMPUTE,
        "text",
        "recompute.plan_file",
        "Run the plan in this JSON file instead of a policy: megackpt plan --plan-out writes one, and every run with"
        " --run-dir its own.",
        metavar="FILE",
    ),
    works(
        "--memory-budget-gib",
        RECOMPUTE,
        "float",
        "recompute.memory_budget_gib",
        "Of auto: memory of a rank in GiB, for weights, gradients, optimizer and activations; on a GPU also for driver,"
        " communicators and a margin of 2 % of its memory. Needed on a CPU.",
        default="what the GPU has",
    ),
    works(
        "--recompute-adapt",
        RECOMPUTE,
        "switch",
        "recompute.adapt",
        "Of auto: after the first steps compare the measured peak with the predicted one and choose again, leaner where"
        " the budget is broken, faster where bytes are left. Losses and gradients stay the same to the bit.",
    ),
    works(
        "--verify-replay",
        RECOMPUTE,
        "switch",
        "recompute.verify",
        "Compare every replayed tensor with a digest of the original and stop at the first difference, naming layer,"
        " step, tensor and cause. Slow: for finding faults. What --compile compiles runs uncompiled meanwhile.",
    ),
    later("--cpu-offloading", RECOMPUTE, "switch", _OFFLOAD),
    later("--cpu-offloading-num-layers", RECOMPUTE, "int", _OFFLOAD, "0"),
    later("--fine-grained-activation-offloading", RECOMPUTE, "switch", _OFFLOAD),
    later("--offload-modules", RECOMPUTE, "many", _OFFLOAD),
)
