"""The one composition root: one builder per room, called in the order in which things depend on each other.

Read top to bottom: who am I (mesh), what do I draw from and where do gradients go (tensor), which part of the model
is mine (pipeline, model), what is kept of its forward (plan), who updates it (optim), what is it fed (data).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from megackpt.config.errors import UsageError
from megackpt.config.run import RunConfig
from megackpt.data.build import (
    Datasets,
    SampleCounts,
    build_datasets,
    build_mock_datasets,
    build_split_datasets,
)
from megackpt.data.gpt_dataset import SampleFormat
from megackpt.data.tokenizer import NullTokenizer, Tokenizer, build_tokenizer
from megackpt.mesh.deferred import DeferredSink
from megackpt.mesh.device import DeviceSeam
from megackpt.mesh.parameter import ParameterRecord, records
from megackpt.mesh.process_mesh import ProcessMesh
from megackpt.model import GPTChunk, build_chunk, compile_steps
from megackpt.observe.auto import refuse_impossible
from megackpt.observe.numbers import policy_of, split_of
from megackpt.observe.stored_plan import check_shards, own_plans, read_plan
from megackpt.optim.buffer import GradientBuffer
from megackpt.optim.lr_schedule import LearningRate
from megackpt.optim.master import MasterOptimizer
from megackpt.optim.reduction import GradientReduction
from megackpt.pipeline.stages import Piece, pieces
from megackpt.plan import ChunkPlan, Plan, plan_for
from megackpt.plan.decision import OFFLOAD_HOST, SHARD
from megackpt.plan.split import Split
from megackpt.precision.policy import Precision
from megackpt.precision.scaler import LossScaler
from megackpt.recompute import KeptBytes, RngLedger
from megackpt.recompute.tiers import HostTier, ShardTier, Tier
from megackpt.tensor.collectives import gather_flat
from megackpt.tensor.context import TensorParallel
from megackpt.train.agree import agree, together
from megackpt.train.auto import auto_task, chosen_plan
from megackpt.train.health import Health


@dataclass(frozen=True)
class Trainer:
    """Everything one rank needs to train, built and wired.  ``pieces`` and ``chunks`` are this stage's, by chunk;
    ``parameters`` are those of all its chunks."""

    config: RunConfig
    seam: DeviceSeam
    mesh: ProcessMesh
    precision: Precision
    ledger: RngLedger
    pieces: tuple[Piece, ...]
    chunks: tuple[GPTChunk, ...]
    parameters: list[tuple[torch.nn.Parameter, ParameterRecord]]
    plan: Plan
    tiers: dict[str, Tier]
    account: KeptBytes
    buffer: GradientBuffer
    deferred: DeferredSink | None
    reduction: GradientReduction
    optimizer: MasterOptimizer
    learning_rate: LearningRate
    scaler: LossScaler
    health: Health
    datasets: Datasets
    vocab: int
    tokenizer: Tokenizer | None


def build(config: RunConfig, seam: DeviceSeam) -> Trainer:
    """Build this rank's part of the run.  The default process group must exist; called by all ranks together."""
    mesh = ProcessMesh.create(config.parallel, seam)
    precision = Precision.from_config(config.precision)
    tokenizer, vocab = together(lambda: build_vocabulary(config))

    ledger = RngLedger(defaults=False)  # the model draws from its streams only
    buffer = GradientBuffer()
    deferred = DeferredSink(buffer) if config.parallel.splits_backward else None
    tp = TensorParallel.create(
        mesh,
        sequence_parallel=config.parallel.sequence_parallel,
        ledger=ledger,
        sink=buffer if deferred is None else deferred,
        dtype=precision.params_dtype,
        device=seam.device,
        seed=config.train.seed,
    )
    split = split_of(config)
    own = pieces(split)[mesh.pp.index]
    chunks = tuple(build_chunk(config.model, tp, vocab, p.layers, first=p.is_first, last=p.is_last) for p in own)
    if config.model.compile:
        for chunk in chunks:
            compile_steps(chunk)
    parameters = [pair for chunk in chunks for pair in records(chunk.named_parameters())]
    if config.recompute.granularity == "auto":
        plan = chosen_plan(config, vocab, seam)
    else:
        plan = together(lambda: build_plan(config, split))
    agree(plan.digest(), "recompute plan")

    size, sharded = config.parallel.bucket_size, config.parallel.distributed_optimizer
    buffer.attach(parameters, precision.main_grad_dtype, dp=mesh.dp, bucket_size=size, sharded=sharded)
    return Trainer(
        config=config,
        seam=seam,
        mesh=mesh,
        precision=precision,
        ledger=ledger,
        pieces=own,
        chunks=chunks,
        parameters=parameters,
        plan=plan,
        tiers=build_tiers(own_plans(plan, mesh.pp.index), tp),
        account=KeptBytes(),
        buffer=buffer,
        deferred=deferred,
        reduction=build_reduction(config, buffer, mesh),
        optimizer=build_optimizer(config, buffer, chunks),
        learning_rate=LearningRate.from_config(config.optimizer, config.train, config.batch),
        scaler=LossScaler.from_config(config.precision),
        health=Health(config.train.max_skipped_iterations if config.train.check_for_nan else None),
        datasets=together(lambda: build_data(config, vocab, tokenizer)),
        vocab=vocab,
        tokenizer=tokenizer,
    )


def refuse_ahead(config: RunConfig, seam: DeviceSeam) -> None:
    """Refuse a budget of auto that nothing meets; needs no other rank.  A tokenizer that cannot be read is left to
    `build`, where all ranks say the same."""
    if config.recompute.granularity != "auto":
        return
    try:
        _, vocab = build_vocabulary(config)
    except (UsageError, OSError):
        return
    refuse_impossible(auto_task(config, vocab, seam))


def build_reduction(config: RunConfig, buffer: GradientBuffer, mesh: ProcessMesh) -> GradientReduction:
    """What sums the gradients of the buffer over the ranks."""
    sequence_parallel, overlap = config.parallel.sequence_parallel, config.parallel.overlap_grad_reduce
    return GradientReduction(buffer, mesh, sequence_parallel=sequence_parallel, overlap=overlap)


def build_optimizer(config: RunConfig, buffer: GradientBuffer, chunks: Sequence[GPTChunk]) -> MasterOptimizer:
    """The optimizer.  Where it gathers parameters beside the next forward, every end and layer waits at its own
    forward for the parameters that it uses."""
    overlap = config.parallel.overlap_param_gather
    optimizer = MasterOptimizer(buffer, config.optimizer, overlap_gather=overlap)
    flat = optimizer.flat
    if flat is None or not overlap:
        return optimizer
    for chunk in chunks:
        ends = list(chunk.embedding.parameters()) if chunk.embedding is not None else []
        if chunk.embedding is not None:
            flat.guard(chunk.embedding, ends)
        for layer in chunk.layers.values():
            flat.guard(layer, layer.parameters())
        if chunk.head is not None:
            flat.guard(chunk.head, [*chunk.head.parameters(), *ends])  # whose weight may be the embedding's
    return optimizer


def build_vocabulary(config: RunConfig) -> tuple[Tokenizer | None, int]:
    """The tokenizer, if one is named, and the size of the vocabulary before padding."""
    named = config.data.tokenizer
    if named is None:
        assert config.data.vocab_size is not None
        return None, config.data.vocab_size
    tokenizer = build_tokenizer(named)
    own, asked = tokenizer.vocab_size, config.model.vocab_size
    if asked is None or isinstance(tokenizer, NullTokenizer):  # whose --vocab-size does not count its eod
        return tokenizer, own
    if asked < own:
        raise UsageError(f"--vocab-size {asked} is less than {tokenizer}. Nearest valid: --vocab-size {own}.")
    return tokenizer, asked


def build_plan(config: RunConfig, split: Split) -> Plan:
    """The plan of the recompute flags for the model as it is split, or the one in ``--recompute-plan``."""
    if config.recompute.plan_file is not None:
        plan = read_plan(config.recompute.plan_file, split)
        if config.parallel.tensor > 1:
            check_shards(config.recompute.plan_file, plan, config.parallel.sequence_parallel)
        return plan
    return plan_for(split, policy_of(config))


def build_tiers(plans: Sequence[ChunkPlan], tp: TensorParallel) -> dict[str, Tier]:
    """The places that the plans of this rank's chunks ask for."""
    choices = {choice for plan in plans for choice in plan.choices()}
    tiers: dict[str, Tier] = {}
    if SHARD in choices:
        tiers[SHARD] = ShardTier(tp.axis.index, tp.axis.size, partial(gather_flat, axis=tp.axis))
    if OFFLOAD_HOST in choices:
        tiers[OFFLOAD_HOST] = HostTier()
    return tiers


def build_data(
    config: RunConfig, vocab: int, tokenizer: Tokenizer | None, train_samples: int | None = None
) -> Datasets:
    """Training data for the whole run (of `train_samples` in all, if given), and one evaluation's worth of validation
    and test data.

    Every evaluation reads the same samples, so that two of them compare.
    """
    batch, train, data = config.batch, config.train, config.data
    if train_samples is None:
        train_samples = config.last_sample(0, 0)
    counts = SampleCounts.of_run(train_samples, batch.global_batch_size, train.eval_iters, evaluations=1)
    if data.mock_data:
        return build_mock_datasets(counts, config.model.seq_length, vocab, train.seed)
    sample_format = SampleFormat(
        config.model.seq_length,
        vocab_size=vocab,
        eod=tokenizer.special.eod if tokenizer is not None else None,
        eod_mask_loss=data.eod_mask_loss,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
    )
    if data.train_data_path:
        paths = {"train": data.train_data_path, "valid": data.valid_data_path, "test": data.test_data_path}
        built = build_split_datasets(
            paths, counts, sample_format, train.seed, data.data_cache_path, data.multiple_validation_sets
        )
    else:
        built = build_datasets(data.data_path, data.split, counts, sample_format, train.seed, data.data_cache_path)
    built.train[0]  # tokens of another tokenizer are refused here, not within a step
    return built
