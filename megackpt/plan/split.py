"""Which layers a pipeline stage owns: contiguous ranges, every layer in exactly one of them.

A layer count that the stages do not divide leaves a remainder of r < p layers. They go one each to stages in
this order: inner stages from the middle outwards (of two equally near, the later one: under 1F1B it holds
fewer micro-batches), then the first, and never the last, because the last also has the head's product over
the vocabulary::

    p = 4, who gets the remainder           L = 28   7  7  7  7
                                            L = 29   7  7  8  7
    stage      0    1    2    3             L = 30   7  8  8  7
    order      3.   2.   1.   never         L = 31   8  8  8  7

A split is a value: ranges of global layers by [stage][chunk]. Piece c*p + i of the model is chunk c of stage i.
"""

from __future__ import annotations

from collections.abc import Sequence

Split = tuple[tuple[range, ...], ...]
"""Layers by [stage][chunk]."""


def even_split(num_layers: int, stages: int, chunks: int = 1) -> Split:
    """Layers of equally large pieces, the remainder in the middle of the model. ValueError as `split_layers`."""
    return split(num_layers, stages, chunks)


def split(
    num_layers: int,
    stages: int,
    chunks: int = 1,
    *,
    first: int | None = None,
    last: int | None = None,
    embedding: bool = False,
    loss: bool = False,
) -> Split:
    """Layers where the ends count: ``first`` and ``last`` are the layers of those stages (the others share the rest
    evenly, and a stage deals what it has to its chunks as evenly); ``embedding`` and ``loss`` stand for a layer each
    of the first and the last piece, if there are several stages.

    Raises ValueError when a piece without an end of the model would have no layer.
    """
    if first is None and last is None:
        front, back = embedding and stages > 1, loss and stages > 1
        counts = [len(piece) for piece in split_layers(num_layers + front + back, stages * chunks)]
        counts[0] -= front
        counts[-1] -= back
        return split_by_counts(counts, stages)
    rest = num_layers - (first or 0) - (last or 0)
    others = stages - (first is not None) - (last is not None)
    between = [len(layers) for layers in split_layers(rest, others)] if others or rest else []
    by_stage = [count for count in (first,) if count is not None] + between
    by_stage += [count for count in (last,) if count is not None]
    dealt = [[len(layers) for layers in split_layers(count, chunks)] for count in by_stage]
    return split_by_counts([row[chunk] for chunk in range(chunks) for row in dealt], stages)


def split_by_counts(counts: Sequence[int], stages: int) -> Split:
    """Pieces of so many layers, in the order of the model, dealt to the stages in turn."""
    ranges, start = [], 0
    for count in counts:
        ranges.append(range(start, start + count))
        start += count
    return tuple(tuple(ranges[stage::stages]) for stage in range(stages))


def split_flags(pieces: Split) -> str:
    """The flags that give this split, as Megatron spells them; empty where it is the even one."""
    stages, chunks = len(pieces), len(pieces[0])
    layers = sum(len(piece) for stage in pieces for piece in stage)
    ends = (("--decoder-first-pipeline-num-layers", "first", 0), ("--decoder-last-pipeline-num-layers", "last", -1))
    for some in ((), ends[:1], ends[1:], ends):
        counts = {name: sum(len(piece) for piece in pieces[stage]) for _, name, stage in some}
        try:
            if split(layers, stages, chunks, **counts) == pieces:  # type: ignore[arg-type]
                return " ".join(f"{flag} {counts[name]}" for flag, name, _ in some)
        except ValueError:
            continue
    return f"--pipeline-model-parallel-layout '{layout_text(pieces)}'"


def layout_text(pieces: Split) -> str:
    """What every chunk holds, in the words of --pipeline-model-parallel-layout: ``Et*3|t*4|t*2L``."""
    counts = [len(stage[chunk]) for chunk in range(len(pieces[0])) for stage in pieces]
    texts = ["" if count == 0 else "t" if count == 1 else f"t*{count}" for count in counts]
    texts[0] = f"E{texts[0]}"
    texts[-1] += "L"
    return "|".join(texts)


def split_layers(num_layers: int, stages: int) -> list[range]:
    """Layers of each stage, in model order: ``split_layers(6, 4) -> [range(0, 1), range(1, 3), range(3, 5),
    range(5, 6)]``.

    Raises ValueError when there are fewer layers than stages (a stage without a layer is refused, never
    built).
    """
    if stages < 1:
        raise ValueError(f"the number of pipeline stages must be at least 1, got {stages}")
    if num_layers < stages:
        raise ValueError(f"{num_layers} layers cannot fill {stages} pipeline stages; use at most {num_layers} stages")
    base, remainder = divmod(num_layers, stages)
    favoured = set(_by_favour(stages)[:remainder])
    ranges, start = [], 0
    for stage in range(stages):
        stop = start + base + (stage in favoured)
        ranges.append(range(start, stop))
        start = stop
    return ranges


def _by_favour(stages: int) -> list[int]:
    """Stages in the order in which they take one layer of the remainder; the last stage comes last."""
    centre = (stages - 1) / 2
    inner = sorted(range(1, stages - 1), key=lambda stage: (abs(stage - centre), -stage))
    return [*inner, 0, stages - 1] if stages > 1 else [0]
