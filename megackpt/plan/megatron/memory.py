"""Allocator counters of a Megatron run on its last pipeline stage, term by term.

Every term is a rule about that system: what its layers save, how its loss is written, which buffers it never frees,
which workspaces its libraries take.  Nothing depends on a run's name or on particular sizes.

Letters: s sequence, b micro-batch, h hidden, a heads, V padded vocabulary, t, c, p, d parallel sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megackpt.plan.megatron.arguments import MegatronRun
from megackpt.plan.parameters import embedding_parameters, head_parameters, layer_parameters

MIB = 2**20

# cuBLAS keeps a workspace per handle, and the thread of the backward has a handle of its own.
CUBLAS_HANDLES = 2
CUBLAS_WORKSPACE = 8 * MIB + 128 * 1024 + 2048  # :4096:2:16:8
CUBLAS_WORKSPACE_LARGE = 32 * MIB  # :4096:8, on Hopper and in deterministic mode
ENGINE_WORKSPACE = 4 * MIB
ENGINE_WORKSPACE_HOPPER = 32 * MIB + 1024

# Tensors of the size of a stage boundary that exist beside the activations of the micro-batch at hand.
MESSAGES_AT_PEAK = {False: 2, True: 3}  # interleaved: the next one is received while this one is computed
MESSAGES_BETWEEN_STEPS = 2  # per chunk: what was sent and received last stays bound to its names

# Bytes per logit at most.  Plain: the 16-bit logits and their fp32 copy, on which all work is done in place.
LOSS_BYTES = 6
# The fused loss is compiled, out of place: one more copy on Hopper, two where its fusions do not go as far.
FUSED_LOSS_BYTES = {True: 10, False: 14}


@dataclass(frozen=True)
class MegatronMemory:
    """Bytes by term: ``between`` steps (what the counter of current bytes shows) and at the ``peak``."""

    between: Mapping[str, int]
    peak: Mapping[str, int]
    parameters: int

    @property
    def between_bytes(self) -> int:
        return sum(self.between.values())

    @property
    def peak_bytes(self) -> int:
        return sum(self.peak.values())


def predict_memory(run: MegatronRun) -> MegatronMemory:
    """The last stage's counters.  Raises ValueError for a run with flags that are not modelled, naming them."""
    if run.not_modelled:
        reasons = "; ".join(f"{flag} needs {why}" for flag, why in run.not_modelled.items())
        raise ValueError(f"not modelled: {reasons}")
    count = parameter_count(run)
    standing = {"buffers": standing_buffers(run), "workspaces": workspaces(run)}
    message = boundary_bytes(run)
    between = {
        "state": state_bytes(run, count, in_step=False),
        **standing,
        "messages": message * MESSAGES_BETWEEN_STEPS * run.v if run.p > 1 else 0,
    }
    peak = {
        "state": state_bytes(run, count, in_step=True),
        **standing,
        "activations": activation_bytes(run),
        "ends": end_bytes(run),
        "transient": transient_bytes(run),
        "messages": message * MESSAGES_AT_PEAK[run.v > 1] if run.p > 1 else 0,
        "data": loader_mask_bytes(run),
    }
    return MegatronMemory(between, peak, count)


# -- state -------------------------------------------------------------------------------------------------------


def parameter_count(run: MegatronRun) -> int:
    """Of the last stage, on one rank; a tied output matrix is a copy of its own unless there is one stage."""
    model, t = run.model, run.t
    count = layer_parameters(model, t).times(sum(run.layers_by_chunk)).total
    if run.qk_norm:
        count += 2 * model.head_size * (2 if model.norm == "LayerNorm" else 1) * sum(run.layers_by_chunk)
    alone = run.p == 1
    count += head_parameters(model, t, own_matrix=not (alone and model.tied)).total
    return count + (embedding_parameters(model, t).total if alone else 0)


def state_bytes(run: MegatronRun, count: int, *, in_step: bool) -> int:
    """Weights, gradients, masters and moments.  bf16 sums gradients in fp32.  fp16 sums them in fp16; fp32 copies are
    made for the optimizer and stay until the next step begins."""
    if run.precision == "fp32":
        return count * 16
    gradients = 4 if run.precision == "bf16" else 2 + (0 if in_step or run.sharded_optimizer else 4)
    share = run.d // run.optimizer_copies if run.sharded_optimizer else 1
    return count * (2 + gradients) + -(-12 * count // max(1, share))


def workspaces(run: MegatronRun) -> int:
    """What cuBLAS and transformer-engine hold for their products."""
    large = run.hopper or run.deterministic
    total = CUBLAS_HANDLES * (CUBLAS_WORKSPACE_LARGE if large else CUBLAS_WORKSPACE)
    if run.transformer_engine:
        total += ENGINE_WORKSPACE_HOPPER if run.hopper else ENGINE_WORKSPACE
    return total


def standing_buffers(run: MegatronRun) -> int:
    """A buffer of the global pool, made once: the operand of the local core attention's first product, as large as
    its scores."""
    return 0 if run.transformer_engine else scores_count(run) * width(run)


# -- activations -------------------------------------------------------------------------------------------------


def width(run: MegatronRun) -> int:
    """Bytes of an activation."""
    return 4 if run.precision == "fp32" else 2


def rows(run: MegatronRun) -> int:
    """s b / c."""
    return run.model.seq // run.c * run.micro_batch


def shard_rows(run: MegatronRun) -> int:
    return rows(run) // run.t if run.sequence_parallel else rows(run)


def scores_count(run: MegatronRun) -> int:
    return run.model.heads // run.t * run.model.seq * rows(run)


def boundary_bytes(run: MegatronRun) -> int:
    return shard_rows(run) * run.model.hidden * width(run)


def core_bytes(run: MegatronRun) -> int:
    """What the core attention saves besides queries, keys, values and the input of the projection."""
    model, w = run.model, width(run)
    if run.attention == "unfused":
        return scores_count(run) * (2 * w + 1 if model.attention_dropout else w)
    heads = model.heads // run.t
    log_sum = 4 * heads * rows(run)
    # FlashAttention writes [b, s, h] and saves that; the projection saves its [s, b, h] copy
    copied = run.attention == "flash" and run.micro_batch > 1
    return log_sum + (rows(run) * heads * model.head_size * w if copied else 0)


def layer_bytes(run: MegatronRun) -> int:
    """What one layer saves for its backward: Korthikanti et al. 2022, and the statistics of its norms."""
    model, w = run.model, width(run)
    shard, whole = shard_rows(run), rows(run)
    queries, keys = model.heads * model.head_size // run.t, model.kv_heads * model.head_size // run.t
    up = model.ffn * (2 if model.gated else 1) // run.t
    masks = 2 * shard * model.hidden if model.hidden_dropout else 0
    norms = 2 * shard * (8 if model.norm == "LayerNorm" else 4)
    normed_heads = whole * ((queries + keys) * w + 8 * (model.heads + model.kv_heads) // run.t) if run.qk_norm else 0
    return (
        4 * shard * model.hidden * w  # inputs and outputs of both norms
        + whole * (queries + 2 * keys) * w
        + (0 if run.recompute == "core" else core_bytes(run))
        + whole * queries * w  # input of the projection
        + whole * (up + model.ffn // run.t) * w
        + masks
        + norms
        + normed_heads
    )


def flights(run: MegatronRun) -> tuple[int, ...]:
    """Micro-batches in flight of each chunk of the last stage when its last chunk is computed."""
    return (*[min(run.group, run.n)] * (run.v - 1), 1)


def activation_bytes(run: MegatronRun) -> int:
    """All layers of all micro-batches in flight on the last stage."""
    total = 0
    for layers, count in zip(run.layers_by_chunk, flights(run), strict=True):
        replayed = layers if run.recompute_method == "uniform" else min(layers, run.recompute_layers)
        if run.recompute != "full":
            total += count * layers * layer_bytes(run)
        else:
            groups = -(-replayed // run.recompute_layers) if run.recompute_method == "uniform" else replayed
            total += count * (groups * boundary_bytes(run) + (layers - replayed) * layer_bytes(run))
    return total


def end_bytes(run: MegatronRun) -> int:
    """The final norm and the input of the output layer; the embedding's dropout mask where there is one stage."""
    shard, model = shard_rows(run), run.model
    statistics = shard * (8 if model.norm == "LayerNorm" else 4)
    head = 2 * shard * model.hidden * width(run) + statistics
    mask = shard * model.hidden if run.p == 1 and model.hidden_dropout else 0
    return head + mask


def transient_bytes(run: MegatronRun) -> int:
    """Logits and loss, or what the last layer's backward rebuilds and makes: whichever is more."""
    per_logit = FUSED_LOSS_BYTES[run.hopper] if run.fused_loss else LOSS_BYTES
    if run.precision == "fp32":
        per_logit = 8
    logits = rows(run) * run.model.padded_vocab // run.t * per_logit
    return max(logits, backward_bytes(run))


def backward_bytes(run: MegatronRun) -> int:
    """The last layer's backward: what it replays, the gradients around its activation, one weight gradient."""
    model, w = run.model, width(run)
    up = model.ffn * (2 if model.gated else 1) // run.t
    rebuilt = {"none": 0, "core": core_bytes(run), "full": layer_bytes(run)}[run.recompute]
    if run.recompute == "full" and run.recompute_method == "uniform":
        rebuilt *= min(run.recompute_layers, run.layers_by_chunk[-1])
    flowing = rows(run) * (model.ffn // run.t + up) * w + 2 * boundary_bytes(run)
    weight = 0 if run.fused_accumulation else up * model.hidden * w
    return rebuilt + flowing + weight


def loader_mask_bytes(run: MegatronRun) -> int:
    """The s x s mask that the data loader makes for every micro-batch, one byte an element, wanted or not."""
    return run.micro_batch * (run.model.seq // run.c) * run.model.seq if run.loader_mask else 0
