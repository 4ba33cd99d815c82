"""The recompute flags of the trainer beyond the named policies: stored plans, spread boundaries, loss in chunks,
verified replay, compiled steps, and what is said about them before the first step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megackpt.config.errors import UsageError
from megackpt.config.run import RunConfig
from megackpt.observe.log_line import format_bytes
from megackpt.plan import Decision, Plan, SaveSet
from megackpt.plan.decision import OFFLOAD_HOST, REPLAY, ChunkPlan
from megackpt.plan.policies import full_layer
from megackpt.recompute.tiers import HostTier
from megackpt.train.foresight import foresee
from megackpt.train.step import Stepper
from tests.layouts import SMALL_GPT, SMALL_LLAMA, Flags, Layout, built, steps
from tests.pool import run_distributed

DROPOUT: Flags = {"hidden-dropout": 0.1, "attention-dropout": 0.1}


Outcome = tuple[list[float], dict[str, torch.Tensor]]


def _gradients(rank: int, world_size: int, flags: Flags, layout: Layout) -> Outcome:
    trace = steps(built(flags, layout), 2, gradients_of=2)
    return trace.losses, trace.grads[-1]


@pytest.mark.parametrize("extra", [{}, {"recompute-num-layers": 2}], ids=["single", "groups"])
def test_spread_boundaries_give_the_same_bits(extra: Flags) -> None:
    flags = SMALL_GPT | DROPOUT | {"recompute-granularity": "full", **extra}
    whole = run_distributed(_gradients, 2, flags, Layout(tp=2))
    spread = run_distributed(_gradients, 2, flags | {"distribute-saved-activations": True}, Layout(tp=2))
    for (losses, gradients), (same_losses, same) in zip(whole, spread, strict=True):
        assert losses == same_losses
        assert all(torch.equal(gradients[name], same[name]) for name in gradients)


def test_spread_boundaries_contradict_sequence_parallel() -> None:
    flags = SMALL_GPT | {"recompute-granularity": "full", "distribute-saved-activations": True}
    with pytest.raises(UsageError, match="--distribute-saved-activations contradicts --sequence-parallel"):
        RunConfig.from_flags(flags | Layout(tp=2, sp=True).flags, 2)


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("family", [SMALL_GPT, SMALL_LLAMA], ids=["gpt", "llama"])
def test_a_chunked_loss_is_the_loss(family: Flags, sp: bool) -> None:
    """20 positions in parts of 7, 7 and 6; the weight gradient is summed in another order, so fp64 to 1e-12."""
    flags = family | {"params-dtype": "fp64"}
    layout = Layout(tp=2, sp=sp)
    whole = run_distributed(_gradients, 2, flags, layout)
    parts = run_distributed(_gradients, 2, flags | {"loss-chunk-size": 7}, layout)
    for (losses, gradients), (same_losses, same) in zip(whole, parts, strict=True):
        assert same_losses == pytest.approx(losses, rel=1e-12)
        for name, gradient in gradients.items():
            assert float((same[name] - gradient).norm()) <= 1e-12 * float(gradient.norm()) + 1e-20, name


def _one_plan(layers: int) -> Plan:
    """A plan that no flag gives: something else in every layer, and one tensor in host memory."""
    sets = {f"layers.{i}": full_layer() for i in range(layers)}
    sets["layers.1"] = SaveSet({"mlp.act": Decision(REPLAY, REPLAY), "attn.core": Decision(output=OFFLOAD_HOST)})
    return Plan(((ChunkPlan(sets),),), "by hand")


def test_a_stored_plan_runs(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(_one_plan(2).dumps())
    flags = SMALL_GPT | DROPOUT
    ((losses, gradients),) = run_distributed(_gradients, 1, flags, Layout())
    ((same_losses, same),) = run_distributed(_gradients, 1, flags | {"recompute-plan": str(path)}, Layout())
    assert losses == same_losses
    assert all(torch.equal(gradients[name], same[name]) for name in gradients)


def _refused(rank: int, world_size: int, flags: Flags, layout: Layout) -> str:
    with pytest.raises(UsageError) as refusal:
        built(flags, layout)
    return str(refusal.value)


def test_a_stored_plan_for_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(_one_plan(3).dumps())
    (said,) = run_distributed(_refused, 1, SMALL_GPT | {"recompute-plan": str(path)}, Layout())
    assert said == f"--recompute-plan {path}: stage 0 has layers [0, 1, 2] there and [0, 1] here"
    path.write_text(json.dumps({"version": 7}))
    (said,) = run_distributed(_refused, 1, SMALL_GPT | {"recompute-plan": str(path)}, Layout())
    assert said == f"--recompute-plan {path}: not a plan of this version (plan version 7; this code reads version 2)"
    path.write_text(_one_plan(2).dumps().replace("mlp.act", "mlp.actt"))
    (said,) = run_distributed(_refused, 1, SMALL_GPT | {"recompute-plan": str(path)}, Layout())
    assert said == f"--recompute-plan {path}: layers.1 has no step named mlp.actt"
    (said,) = run_distributed(_refused, 1, SMALL_GPT | {"recompute-plan": str(tmp_path / "none")}, Layout())
    assert said == f"--recompute-plan {tmp_path}/none cannot be read: No such file or directory"


def test_verified_replay_raises_no_false_alarm() -> None:
    flags = SMALL_GPT | DROPOUT | {"recompute-granularity": "full"}
    ((losses, _),) = run_distributed(_gradients, 1, flags, Layout())
    ((same, _),) = run_distributed(_gradients, 1, flags | {"verify-replay": True}, Layout())
    assert losses == same


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", [SMALL_GPT, SMALL_LLAMA], ids=["gpt", "llama"])
def test_compiled_steps_replay_bitwise(family: Flags) -> None:
    """RC-10: forward and replay call the same compiled function."""
    flags = family | DROPOUT | {"compile": True}
    ((losses, gradients),) = run_distributed(_gradients, 1, flags, Layout(), timeout=500)
    full = flags | {"recompute-granularity": "full"}
    ((same_losses, same),) = run_distributed(_gradients, 1, full, Layout(), timeout=500)
    assert losses == same_losses
    assert all(torch.equal(gradients[name], same[name]) for name in gradients)


def _foreseen(rank: int, world_size: int, flags: Flags, layout: Layout) -> tuple[str, ...]:
    return foresee(built(flags, layout))


def test_what_is_said_before_the_first_step() -> None:
    """Two layers keep 2 boundaries each, 20 x 2 x 48 fp32 numbers; the ends keep ids, norm statistics, the head's
    input, softmax and targets.  Replayed: qkv 6, core 4s/h and up 7 of b s h^2 (f = 3.5h), of both layers."""
    ((said, *_),) = run_distributed(_foreseen, 1, SMALL_GPT | {"recompute-granularity": "full"}, Layout())
    s, b, h, vocab = 20, 2, 48, 512
    boundary = 4 * s * b * h
    ends = 8 * s * b + (boundary + 8 * s * b) + boundary + (4 * s * b * vocab + 8 * s * b)
    assert f"predicted: {format_bytes(2 * 2 * boundary + ends)} (none " in said
    assert "; leanest " in said and "--recompute-granularity full --recompute-keep layer-input" in said
    model = 3 * (2 * (6 + 4 * s / h + 2 + 7 + 7) + 2 * vocab / h)
    replayed = 2 * (6 + 4 * s / h + 7)
    assert said.endswith(f"replay adds {100 * replayed / model:.1f} % to a step's FLOPs")
    groups = {"recompute-granularity": "full", "recompute-num-layers": 2}
    ((said, *_),) = run_distributed(_foreseen, 1, SMALL_GPT | groups, Layout())
    assert f"predicted: {format_bytes(boundary + ends)} (none " in said
    assert "leanest" not in said, "a group of layers keeps less than single ones can"


def _kept(rank: int, world_size: int, flags: Flags, layout: Layout) -> tuple[int, tuple[str, ...]]:
    trainer = built(flags, layout)
    stepper = Stepper(trainer)
    stepper.count_bytes = True
    steps(trainer, 1, stepper=stepper)
    return trainer.account.peak, foresee(trainer)


def test_full_keeps_less_than_selective_and_that_less_than_none() -> None:
    """ME-02, with the unfused core; and a head that dominates is named, since no layer can help it."""
    deep: Flags = {"attention-backend": "unfused", "num-layers": 6, "vocab-size": 97, "make-vocab-size-divisible-by": 1}
    policies = ("none", "selective", "full")
    kept = [
        run_distributed(_kept, 1, SMALL_GPT | deep | {"recompute-granularity": name}, Layout())[0] for name in policies
    ]
    assert kept[0][0] > kept[1][0] > kept[2][0]
    assert all(len(said) == 1 for _, said in kept[:2])
    fat = SMALL_GPT | {"vocab-size": 4001, "recompute-granularity": "full"}
    ((_, said),) = run_distributed(_kept, 1, fat, Layout())
    assert "comes in its head" in said[1] and said[1].endswith("--loss-chunk-size does")
    ((_, said),) = run_distributed(_kept, 1, fat | {"loss-chunk-size": 4}, Layout())
    assert len(said) == 1


def _offloaded(layers: int, stages: int = 1) -> Plan:
    """Every output that anybody saves, and every internal, waits in host memory."""
    away = SaveSet(default=Decision(output=OFFLOAD_HOST, internals=OFFLOAD_HOST))
    cuts = [stage * layers // stages for stage in range(stages + 1)]
    own = [range(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
    return Plan(tuple((ChunkPlan({f"layers.{i}": away for i in numbers}),) for numbers in own), "offload")


def _ten_steps(rank: int, world_size: int, flags: Flags, layout: Layout) -> list[float]:
    return steps(built(flags, layout), 10).losses


@pytest.mark.parametrize("sp", [False, True])
def test_offload_under_tensor_parallelism_changes_nothing(sp: bool, tmp_path: Path) -> None:
    """OF-04: ten steps, dropout on."""
    path = tmp_path / "plan.json"
    path.write_text(_offloaded(2).dumps())
    flags = SMALL_GPT | DROPOUT | {"train-iters": 10}
    plain = run_distributed(_ten_steps, 2, flags, Layout(tp=2, sp=sp))
    away = run_distributed(_ten_steps, 2, flags | {"recompute-plan": str(path)}, Layout(tp=2, sp=sp))
    assert plain == away


def _held_at_forwards(rank: int, world_size: int, flags: Flags, layout: Layout) -> list[tuple[int, int]]:
    """At the start of each forward: how many tensors were sent away so far, and the bytes of them that still wait for
    a writer who is slow."""
    trainer = built(flags, layout)
    tier, tickets, seen = trainer.tiers[OFFLOAD_HOST], [], []  # type: ignore[var-annotated]
    assert isinstance(tier, HostTier)
    tier._delay_s, put = 0.002, tier.put
    stepper = Stepper(trainer)
    forward = stepper.executor.stage_forward

    def kept(base: Tensor) -> object:
        tickets.append(put(base))
        return tickets[-1]

    def watched(*args: Any) -> Any:
        seen.append((len(tickets), sum(ticket.held_bytes() for ticket in tickets)))
        return forward(*args)

    tier.put, stepper.executor.stage_forward = kept, watched  # type: ignore[method-assign,assignment]
    steps(trainer, 1, stepper=stepper)
    return seen


def test_one_forward_at_a_time_has_tensors_on_their_way_out(tmp_path: Path) -> None:
    """A stage whose forwards come one after the other would else hold what all of them sent away, for as long as
    a GPU has not come to it.  The prediction counts one on its way out and one on its way back."""
    path = tmp_path / "plan.json"
    path.write_text(_offloaded(2, stages=2).dumps())
    first, last = run_distributed(_held_at_forwards, 2, SMALL_GPT | {"recompute-plan": str(path)}, Layout(pp=2))
    for seen in (first, last):
        put = seen[1][0]
        assert put > 5 and seen == [(0, 0), (put, 0)]
