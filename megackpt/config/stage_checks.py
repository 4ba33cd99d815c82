"""Whether the layers of a model can be dealt to stages and chunks as the flags ask; what is refused, and what would be
valid."""

from __future__ import annotations

from megackpt.config.checks import either, nearest_multiples
from megackpt.config.errors import UsageError
from megackpt.config.parallel import ParallelConfig
from megackpt.config.stage_layout import FLAG as LAYOUT

FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
PER_CHUNK, CHUNKS = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"


def chunks_of(parallel: ParallelConfig, layers: int) -> int:
    """Chunks per stage, once `check_split` has passed."""
    if parallel.layout_counts is not None:
        return len(parallel.layout_counts) // parallel.pipeline
    if parallel.layers_per_chunk is not None:
        return (layers + parallel.counted_ends) // (parallel.pipeline * parallel.layers_per_chunk)
    return parallel.chunks or 1


def check_split(parallel: ParallelConfig, layers: int) -> None:
    """Raises UsageError for a split that is impossible with so many layers."""
    if parallel.layout_counts is not None:
        _check_layout(parallel, layers)
        return
    stages, counted = parallel.pipeline, layers + parallel.counted_ends
    if layers < stages and not parallel.counted_ends:
        raise UsageError(
            f"--num-layers {layers} is fewer than --pipeline-model-parallel-size {stages}: a stage would be"
            f" empty. Nearest valid: --num-layers {stages} or --pipeline-model-parallel-size {layers}."
        )
    per_chunk = parallel.layers_per_chunk
    if per_chunk is not None and counted % (stages * per_chunk):
        raise UsageError(
            f"{PER_CHUNK} {per_chunk} does not divide --num-layers {layers}{_and_ends(parallel)} over"
            f" {stages} stages in chunks of equal size. Nearest valid: --num-layers"
            f" {_less(nearest_multiples(counted, stages * per_chunk), parallel.counted_ends)}, or {CHUNKS}"
            f" {max(1, min(counted, round(counted / per_chunk)) // stages)}, which need not divide."
        )
    chunks = chunks_of(parallel, layers)
    if counted < stages * chunks:
        nearest = [f"{CHUNKS} {counted // stages}"] if counted >= stages else []
        nearest.append(f"--num-layers {stages * chunks - parallel.counted_ends}")
        raise UsageError(
            f"{CHUNKS} {chunks} of {stages} stages are {stages * chunks} chunks, but there are only --num-layers"
            f" {layers}{_and_ends(parallel)}. Nearest valid: {', or '.join(nearest)}."
        )
    _check_ends(parallel, layers, chunks)


def _and_ends(parallel: ParallelConfig) -> str:
    names = ["embedding"] * parallel.count_embedding + ["loss"] * parallel.count_loss
    return f" and the {' and '.join(names)}, which count as one each" if names else ""


def _less(numbers: str, by: int) -> str:
    return either([int(number) - by for number in numbers.split(" or ") if int(number) > by])


def _check_layout(parallel: ParallelConfig, layers: int) -> None:
    counts, stages = parallel.layout_counts or (), parallel.pipeline
    if sum(counts) != layers:
        raise UsageError(f"{LAYOUT} {parallel.layout!r} has {sum(counts)} layers (t), but --num-layers is {layers}.")
    chunks = len(counts) // stages
    for stage in range(1, stages - 1):  # the first and the last have an end of the model
        if not any(counts[stage::stages]):
            where = "its chunk is" if chunks == 1 else f"its {chunks} chunks are"
            raise UsageError(
                f"{LAYOUT} {parallel.layout!r} leaves stage {stage} of {stages} without a layer: {where} empty."
                f" Nearest valid: --pipeline-model-parallel-size {stages - 1}, or a t for that stage."
            )


def _check_ends(parallel: ParallelConfig, layers: int, chunks: int) -> None:
    """The layers of the first and the last stage, where they are given."""
    given = {FIRST: parallel.first_stage_layers, LAST: parallel.last_stage_layers}
    given = {flag: count for flag, count in given.items() if count is not None}
    for flag, count in given.items():
        if count is not None and count < chunks:
            raise UsageError(f"{flag} {count} cannot fill {chunks} chunks. Nearest valid: {flag} {chunks}.")
    if not given:
        return
    left = layers - sum(count for count in given.values() if count is not None)
    others = parallel.pipeline - len(given)
    if (others == 0 and left != 0) or left < others * chunks:
        flag, count = list(given.items())[-1]
        assert count is not None
        said = " and ".join(f"{name} {value}" for name, value in given.items())
        valid = count + left if others == 0 else count + left - others * chunks
        better = f"{flag} {valid}" if valid >= chunks else f"--num-layers {layers - left + others * chunks}"
        rest = f"{left} of --num-layers {layers} for {others} other stage{'s' * (others != 1)}"
        needs = "" if others == 0 else f", which need{'s' * (others == 1)} {others * chunks}"
        raise UsageError(f"{said} leave {rest}{needs}. Nearest valid: {better}.")
