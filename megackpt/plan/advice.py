"""A recommendation in words, and what a user would otherwise find out too late.

Each sentence follows from numbers that are printed beside it; nothing is said that does not apply.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megackpt.plan.decision import REPLAY, Decision, SaveSet
from megackpt.plan.evaluate import Evaluator
from megackpt.plan.evaluation import FIXED, Evaluation
from megackpt.plan.kept import kept_bytes
from megackpt.plan.policies import keep_everything, selective
from megackpt.plan.split import split_flags
from megackpt.plan.steps import GATHERS

MIB, GIB = 2**20, 2**30
# Differences between stages that are worth a sentence.
UNEVEN_SECONDS = 0.05
WORTH_SAYING = 5e-4  # of a step
UNEVEN_BYTES = 0.1


def size_words(size: int) -> str:
    """In GiB from a twentieth of one on (0.1 as it is printed), else in MiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB // 20 or not size else f"{size / MIB:.2f} MiB"


def advise(
    evaluator: Evaluator,
    budget: int,
    given: Evaluation,
    best: Evaluation | None,
    flags: Sequence[Evaluation],
    tried: Sequence[Evaluation],
    why_not: str,
) -> tuple[str, ...]:
    """Sentences, the most important first.  ``flags``: the recompute flags, the first of them keeps everything;
    ``tried``: the choice per stage, with more freedom each time."""
    sentences = [*_choice(evaluator, budget, given, best, flags, why_not), *_won(budget, best, flags, tried)]
    sentences += [*_core(evaluator, given), *_stages(given), *_balance(evaluator, given), *_head(given)]
    return tuple(sentences)


def _choice(
    evaluator: Evaluator,
    budget: int,
    given: Evaluation,
    best: Evaluation | None,
    flags: Sequence[Evaluation],
    why_not: str,
) -> Iterator[str]:
    nothing = flags[0]
    if best is None:
        yield f"Nothing fits, whatever is replayed: {why_not}."
        yield from _smaller(evaluator, given, budget)
    elif nothing.fits(budget):
        spare = size_words(budget - nothing.peak_bytes)
        yield f"Nothing need be replayed: keeping everything fits with {spare} to spare on the fullest stage."
        if given.replays and given.step_seconds > nothing.step_seconds:
            saved = 1 - nothing.step_seconds / given.step_seconds
            yield f"Leave the recompute flags out: the step becomes {saved:.1%} shorter."
    else:
        over = size_words(nothing.peak_bytes - budget)
        yield f"Something must be replayed: keeping everything needs {over} more than the budget."
        yield from _beside(budget, given, best)


def _beside(budget: int, given: Evaluation, best: Evaluation) -> Iterator[str]:
    what = f"the plan '{best.name}' ({_overhead(best)}, peak {size_words(best.peak_bytes)})"
    if not given.fits(budget):
        short = size_words(given.peak_bytes - budget)
        yield f"The flags as given do not fit: they are {short} short. Use {what}."
    elif best.step_seconds < given.step_seconds * (1 - 1e-6):
        gain = 1 - best.step_seconds / given.step_seconds
        yield f"{what[0].upper()}{what[1:]} makes the step {gain:.1%} shorter than the flags as given."
    else:
        yield "The flags as given are the fastest plan that fits."


def _won(
    budget: int, best: Evaluation | None, flags: Sequence[Evaluation], tried: Sequence[Evaluation]
) -> Iterator[str]:
    """What each freedom of the recommended plan is worth, and how to run it."""
    if best is None or all(best is not e for e in tried):
        return
    fitting = [e for e in flags if e.fits(budget)]
    before = min(fitting, key=lambda e: (e.step_seconds, e.peak_bytes), default=None)
    parts = []
    for e in tried:
        if before is not None:
            shorter = 1 - e.step_seconds / before.step_seconds
            if shorter >= WORTH_SAYING:
                parts.append(f"'{e.name}' {shorter:.1%} against '{before.name}'")
        before = e
        if e is best:
            break
    if parts:
        yield f"Won: a step shorter by {', '.join(parts)}."
    auto = "" if split_flags(best.layout.pieces) or best.prediction.stages[0].host_bytes else ", or let"
    auto += " --recompute-granularity auto find it" if auto else ""
    yield f"Write it with --plan-out FILE and train with --recompute-plan FILE{auto}."
    if flags_ := split_flags(best.layout.pieces):
        yield f"It has other numbers of layers per stage: train with {flags_}."
    most = max(row.host_bytes for row in best.prediction.stages)
    if most:
        yield f"Up to {size_words(most)} of a rank wait in host memory."


def _smaller(evaluator: Evaluator, given: Evaluation, budget: int) -> Iterator[str]:
    layout = evaluator.layout
    fixed = max(sum(row.terms.get(name, 0) for name in FIXED) for row in given.prediction.stages)
    if fixed > budget:
        yield (
            f"Before any activation a rank holds {size_words(fixed)} (weights, gradients, optimizer, driver): raise"
            " --tensor-model-parallel-size or --pipeline-model-parallel-size"
            + ("." if layout.sharded_optimizer or layout.d == 1 else ", or give --use-distributed-optimizer.")
        )
        return
    ways = []
    if layout.micro_batch > 1:
        ways.append(f"a --micro-batch-size below {layout.micro_batch}")
    if layout.t > 1 and not layout.sequence_parallel:
        ways.append("--sequence-parallel")
    if not evaluator.model.loss_chunk:
        ways.append("--loss-chunk-size")
    ways.append("more tensor or pipeline parallelism")
    yield f"What helps: {', '.join(ways)}."


def _core(evaluator: Evaluator, given: Evaluation) -> Iterator[str]:
    """What dropping the attention core's tensors is worth (public case: the paper's 70 % turned out to be 2 %)."""
    block = evaluator.made.block
    everything = kept_bytes(block, keep_everything())
    saved = block["attn.core"].internal_bytes + block["attn.core"].mask_bytes
    drops_core = "core_attn" in given.name or "attn.core" in given.name
    if evaluator.model.fused_attention:
        if drops_core:
            masks = SaveSet(dict.fromkeys(GATHERS, Decision(REPLAY)), Decision(masks=REPLAY))
            less = kept_bytes(block, masks) - kept_bytes(block, selective())
            yield (
                "Recomputing core_attn is pointless here: fused attention stores no s x s matrices and rebuilds them in"
                f" backward anyway. It saves {less / everything:.0%} of a layer's bytes; use"
                " --recompute-granularity free or full."
            )
    elif not drops_core and saved > everything / 4 and not given.name.startswith("full"):
        yield (
            f"Unfused attention keeps {saved / everything:.0%} of a layer's bytes ({saved / GIB:.2f} GiB per layer and"
            " micro-batch, 5 a s s b / t) for its s x s matrices: use fused attention, or"
            " --recompute-granularity selective."
        )


def _stages(given: Evaluation) -> Iterator[str]:
    """One number for all ranks would be wrong by this much."""
    totals = [row.total_bytes for row in given.prediction.stages]
    low, high = min(totals), max(totals)
    if high > low * (1 + UNEVEN_BYTES):
        yield (
            f"Ranks differ: stage {totals.index(high)} peaks at {size_words(high)}, stage {totals.index(low)} at"
            f" {size_words(low)}. Early stages hold more micro-batches in flight, the ends hold the vocabulary."
        )


def _balance(evaluator: Evaluator, given: Evaluation) -> Iterator[str]:
    if len(given.stages) == 1:
        return
    totals = [stage.total for stage in given.stages]
    mean, slowest = sum(totals) / len(totals), max(range(len(totals)), key=totals.__getitem__)
    if totals[slowest] <= mean * (1 + UNEVEN_SECONDS):
        return
    made, clock = evaluator.made, evaluator.clock
    layer = clock.layer_forward(made.block) + clock.layer_backward(made.block)
    head = (clock.layer_forward(made.head) + clock.layer_backward(made.head)) / layer
    sentence = (
        f"Stages are uneven: stage {slowest} takes {totals[slowest] / mean - 1:.0%} longer than the mean, and the"
        " slowest one sets the pace."
    )
    if slowest == len(totals) - 1 and head >= 0.5:
        vocabulary = evaluator.model.padded_vocab
        sentence += (
            f" The head (vocabulary {vocabulary:,}) weighs as {head:.1f} layers: in balance the last stage would have"
            " that many layers fewer than the others."
        )
    yield sentence


def _head(given: Evaluation) -> Iterator[str]:
    """Recompute inside layers does not touch a peak that the head makes."""
    row = max(given.prediction.stages, key=lambda row: row.total_bytes)
    moment = row.terms["transient"] + row.terms["ends"]
    if row.peak_step.startswith("head") and moment > row.terms["activations"] and moment > row.total_bytes / 10:
        yield (
            f"The peak of stage {row.stage} is the head's ({size_words(moment)} of logits and loss), not the layers':"
            " --loss-chunk-size lowers it, recomputing layers does not."
        )


def _overhead(e: Evaluation) -> str:
    return f"{e.overhead:.1%} over no replay" if e.replays else "no replay"
