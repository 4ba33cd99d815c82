"""A run's configuration as the planner takes it: plain numbers."""

from __future__ import annotations

from collections.abc import Sequence

from megackpt.config.run import RunConfig
from megackpt.plan.numbers import Layout, ModelNumbers
from megackpt.plan.policies import Policy
from megackpt.plan.split import Split, split, split_by_counts


def model_numbers(config: RunConfig, vocab: int) -> ModelNumbers:
    """The model of a run; ``vocab`` before padding."""
    m = config.model
    return ModelNumbers(
        layers=m.num_layers,
        hidden=m.hidden_size,
        heads=m.num_attention_heads,
        kv_heads=m.num_query_groups,
        head_size=m.kv_channels,
        ffn=m.ffn_hidden_size,
        vocab=vocab,
        padded_vocab=m.padded_vocab_size(vocab, config.parallel.tensor),
        seq=m.seq_length,
        norm=m.normalization,
        qk_norm=m.qk_layernorm,
        positions=m.position_embedding_type,
        max_positions=m.max_position_embeddings,
        rotary_share=m.rotary_percent,
        biases=m.add_bias_linear,
        tied=m.tie_embeddings,
        activation="swiglu" if m.swiglu else "squared_relu" if m.squared_relu else "gelu",
        hidden_dropout=m.hidden_dropout,
        attention_dropout=m.attention_dropout,
        fused_attention=m.fused_attention,
        softmax_fp32=m.attention_softmax_in_fp32,
        loss_chunk=m.loss_chunk_size or 0,
        resets_positions=config.data.reset_position_ids,
        resets_attention=config.data.reset_attention_mask,
    )


def split_of(config: RunConfig) -> Split:
    """The layers of every chunk of every stage of a run."""
    parallel, layers = config.parallel, config.model.num_layers
    if parallel.layout_counts is not None:
        return split_by_counts(parallel.layout_counts, parallel.pipeline)
    return split(
        layers,
        parallel.pipeline,
        config.chunks,
        first=parallel.first_stage_layers,
        last=parallel.last_stage_layers,
        embedding=parallel.count_embedding,
        loss=parallel.count_loss,
    )


def layout_numbers(config: RunConfig, pieces: Sequence[Sequence[range]], device: str) -> Layout:
    """The layout of a run whose layers lie in ``pieces`` [stage][chunk], on ``device`` (cpu or cuda)."""
    parallel = config.parallel
    return Layout(
        tuple(tuple(stage) for stage in pieces),
        t=parallel.tensor,
        c=parallel.context,
        d=parallel.data,
        n=config.micro_batches,
        micro_batch=config.batch.micro_batch_size,
        sequence_parallel=parallel.sequence_parallel,
        act_bytes=config.precision.params_bytes,
        grad_bytes=config.precision.grad_bytes,
        sharded_optimizer=parallel.distributed_optimizer,
        bucket_size=parallel.bucket_size or 0,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        schedule=parallel.schedule,
        device=device,
    )


def policy_of(config: RunConfig) -> Policy:
    """The policy of the recompute flags."""
    recompute = config.recompute
    return Policy(
        granularity=recompute.granularity,
        method=recompute.method or "uniform",
        num_layers=recompute.num_layers or 1,
        modules=recompute.modules,
        keep=recompute.keep,
        distribute=recompute.distribute and config.parallel.tensor > 1,
        ahead=recompute.ahead,
        chunked_loss=config.model.loss_chunk_size is not None,
    )
