"""What the plan will cost, said before the first step: bytes per stage, work, whether something leaner is needed."""

from __future__ import annotations

from collections import Counter

from megackpt.observe.log_line import format_bytes
from megackpt.observe.numbers import layout_numbers, model_numbers
from megackpt.plan.decision import ChunkPlan
from megackpt.plan.demand import replayed_by_layer
from megackpt.plan.flops import ModelShape, layer_forward, model_flops
from megackpt.plan.numbers import Layout, ModelNumbers
from megackpt.plan.policies import Policy, plan_for
from megackpt.plan.predict import Prediction, predict
from megackpt.plan.profile import absent_steps, profile
from megackpt.plan.schedule import schedule_lists
from megackpt.plan.slots import slots_of
from megackpt.train.auto import auto_task
from megackpt.train.auto import said as auto_lines
from megackpt.train.build import Trainer

LEANEST = Policy(granularity="full", keep="layer-input")
LEANEST_FLAGS = "--recompute-granularity full --recompute-keep layer-input"


def foresee(trainer: Trainer) -> tuple[str, ...]:
    """Sentences for the user: the kept bytes of the chosen plan, of none and of the leanest, and the replayed work."""
    model, layout = numbers_of(trainer)
    made = profile(model, layout)
    pieces = [list(stage) for stage in layout.pieces]
    chosen = predict(model, layout, trainer.plan, made=made)
    none = predict(model, layout, plan_for(pieces, Policy()), made=made)
    leanest = predict(model, layout, plan_for(pieces, LEANEST), made=made)
    flops, hardware = step_flops(trainer)
    said = [
        f"kept activations by stage, predicted: {_kept(chosen)} (none {_kept(none)}{_least(chosen, leanest)});"
        f" replay adds {100 * (hardware / flops - 1):.1f} % to a step's FLOPs"
    ]
    if trainer.config.recompute.granularity == "auto":
        task = auto_task(trainer.config, trainer.vocab, trainer.seam)
        return (*auto_lines(task, trainer.plan), *said)
    last = chosen.stages[-1]
    of_head = last.terms["ends"] + last.terms["transient"]
    if "head." in last.peak_step and of_head > last.terms["activations"] and not model.loss_chunk:
        said.append(
            f"the peak of the last stage, {format_bytes(last.activation_bytes)} of activations, comes in its head"
            f" ({last.peak_step}): recomputing layers does not lower it, --loss-chunk-size does"
        )
    memory = trainer.seam.total_bytes()
    if memory is not None:
        said += _warnings(chosen, leanest, memory)
    return tuple(said)


def prediction_of(trainer: Trainer) -> Prediction:
    """Bytes of the plan at hand as this device's counter sees them."""
    model, layout = numbers_of(trainer)
    return predict(model, layout, trainer.plan, watched=trainer.seam.kind == "cpu")


def _kept(prediction: Prediction) -> str:
    return " / ".join(format_bytes(stage.kept_peak_bytes) for stage in prediction.stages)


def _least(chosen: Prediction, leanest: Prediction) -> str:
    """What the leanest single layers keep, unless the plan keeps less: groups of layers do, and spread boundaries."""
    pairs = [(c.kept_peak_bytes, least.kept_peak_bytes) for c, least in zip(chosen.stages, leanest.stages, strict=True)]
    if any(c < least for c, least in pairs) and not any(c > least for c, least in pairs):
        return ""
    return f"; leanest {_kept(leanest)}, {LEANEST_FLAGS}"


def _warnings(chosen: Prediction, leanest: Prediction, memory: int) -> list[str]:
    """Whether the device has room for what is predicted."""
    if chosen.peak_bytes <= memory:
        return []
    wanted, least = format_bytes(chosen.peak_bytes), format_bytes(leanest.peak_bytes)
    if leanest.peak_bytes <= memory:
        return [f"this plan needs {wanted} of {format_bytes(memory)}; {LEANEST_FLAGS} needs {least} and fits"]
    return [f"this plan needs {wanted} of {format_bytes(memory)}, the leanest still {least}: split the model further"]


def numbers_of(trainer: Trainer) -> tuple[ModelNumbers, Layout]:
    """The run as the planner takes it."""
    pieces = [[layers_of(chunk) for chunk in stage] for stage in trainer.plan.stages]
    return (
        model_numbers(trainer.config, trainer.vocab),
        layout_numbers(trainer.config, pieces, trainer.seam.kind),
    )


def layers_of(chunk: ChunkPlan) -> range:
    """The global layers that a chunk's plan names."""
    named = sorted(int(a.removeprefix("layers.")) for a in chunk.save_sets if a.startswith("layers."))
    return range(named[0], named[-1] + 1) if named else range(0)


def step_flops(trainer: Trainer) -> tuple[float, float]:
    """Model FLOPs and hardware FLOPs of one step over all devices."""
    model, layout = numbers_of(trainer)
    shape = ModelShape(
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_size=model.head_size,
        ffn=model.ffn,
        padded_vocab=model.padded_vocab,
        seq=model.seq,
        gated=model.gated,
    )
    absent, held = absent_steps(model, layout), profile(model, layout).block.held
    batch = trainer.config.batch.global_batch_size
    replayed = 0
    for stage, actions in enumerate(schedule_lists(layout.schedule, layout.p, layout.n, layout.v)):
        for chunk, layers in enumerate(layout.pieces[stage]):
            plans = trainer.plan.slots(stage, chunk)
            counts = Counter(min(slot, len(plans) - 1) for (_, own), slot in slots_of(actions).items() if own == chunk)
            for slot, count in counts.items():
                layer = layer_forward(shape, count * layout.micro_batch * layout.d)
                steps = replayed_by_layer(plans[slot], layers, absent, held)
                replayed += sum(layer.of(name) for names in steps for name in names)
    useful = model_flops(shape, batch)
    return useful, useful + replayed
