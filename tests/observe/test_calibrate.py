"""The measured machine: what it says, who can use it, and what a machine of shared cores does to a prediction."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from megackpt.cli.main import main
from megackpt.observe import calibrate, calibrate_ranks
from megackpt.plan.accelerators import MACHINES, Machine, machine_named
from megackpt.plan.evaluate import Evaluator
from megackpt.plan.numbers import Layout, ModelNumbers
from megackpt.plan.operations import operations
from megackpt.plan.paces import Company, Overheads
from megackpt.plan.policies import Policy, plan_for
from megackpt.plan.schedule import Action, schedule_lists
from megackpt.plan.simulate import Cost, Order
from megackpt.recompute.stepwise import observe_steps
from megackpt.train import calibrated
from tests.recompute.models import VOCAB, A, B, F, H, S, Subject, shape

RUN = "plan --num-layers 4 --hidden-size 96 --num-attention-heads 8 --seq-length 40 --vocab-size 509 --device cpu"
RUN += " --micro-batch-size 2 --global-batch-size 8 --pipeline-model-parallel-size 2 --world-size 2"


def test_a_measured_machine_is_planned_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two real ranks, with budgets cut short; every figure is told and says how it was found."""
    path = tmp_path / "here.json"
    together = calibrate_ranks.measure_together("cpu", 2)
    assert together.latency_s > 0 and together.collective_bytes_per_s > 0 and together.message_bytes_per_s > 0
    assert together.message_latency_s > 0 and together.message_byte_s >= 0
    assert together.rates[0] == 1.0 and len(together.rates) == 4 and all(0 < rate <= 1 for rate in together.rates)
    cores = len(os.sched_getaffinity(0))
    assert all(rate <= min(1.0, cores / busy) for busy, rate in enumerate(together.rates, 1))
    with mock.patch.object(calibrate, "PRODUCT_S", 0.0), mock.patch.object(
        calibrate, "measure_together", lambda device, nproc: together
    ), mock.patch.object(calibrated, "with_training", lambda machine, nproc, tell: machine):
        assert main(["calibrate", "--out", str(path), "--device", "cpu", "--name", "here"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 16 and f"megackpt plan --machine {path}" in out
    machine = machine_named(str(path))
    assert machine.name == "here" and machine.shared_rates == together.rates
    assert machine.latency_s == together.latency_s and machine.op_seconds > 0
    assert machine.overheads == Overheads(message_byte_s=together.message_byte_s)
    assert machine.companies == (Company(2, 1.0, 0.0, together.message_latency_s, together.latency_s),)
    measured = {name for name in Machine.__dataclass_fields__ if name.endswith(("_s", "_fraction", "_rates", "flops"))}
    rest = {"op_seconds", "memory_bytes", "cores", "kernels", "overheads", "companies"}
    assert measured | rest == set(machine.sources)
    assert main([*RUN.split(), "--machine", str(path)]) == 0
    assert "here" in capsys.readouterr().out


@pytest.mark.full
def test_it_takes_less_than_a_minute(tmp_path: Path) -> None:
    start = time.perf_counter()
    assert main(["calibrate", "--out", str(tmp_path / "m.json")]) == 0
    assert time.perf_counter() - start < 60
    assert json.loads((tmp_path / "m.json").read_text())["peak_flops"]["fp32"] > 1e9


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nproc", "0"], "--nproc must be 1 to 64; got 0"),
        (["--out", "machine.txt"], "--out machine.txt: megackpt plan takes a machine from a .json file"),
        (["--out", "/nowhere/m.json"], "--out /nowhere/m.json: there is no folder /nowhere."),
        (["--devise", "cpu"], "unrecognized arguments: --devise cpu"),
    ],
)
def test_bad_words_are_refused_before_anything_is_measured(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with mock.patch.object(calibrate, "calibrate", side_effect=AssertionError), pytest.raises(SystemExit) as end:
        main(["calibrate", *words])
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_no_gpu_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit) as end:
        main(["calibrate", "--device", "cuda", "--out", str(tmp_path / "m.json")])
    assert end.value.code == 2
    assert "there is no CUDA device here. Nearest valid: --device cpu." in capsys.readouterr().err


@pytest.mark.full
def test_ranks_that_fail_are_named() -> None:
    with mock.patch.object(calibrate_ranks, "_rank", _fails), pytest.raises(RuntimeError, match="ended with code 3"):
        calibrate_ranks.measure_together("cpu", 2)


def _fails(*_: object) -> None:
    raise SystemExit(3)


# -- shared cores ----------------------------------------------------------------------------------------------------


def test_alone_nothing_changes() -> None:
    """With a speed of 1 the shared clock is the plain one, whatever the schedule and the durations."""
    rng = random.Random(1)
    for name, p, n, v in (("1f1b", 3, 5, 1), ("gpipe", 2, 4, 1), ("1f1b", 2, 4, 2), ("zb-h1", 4, 6, 1)):
        order = Order(schedule_lists(name, p, n, v))
        durations = [rng.choice([0.5, 1.0, 2.0, 3.25]) for _ in range(len(order))]
        for ahead in (None, [rng.choice([0.0, 0.25, 0.5]) for _ in durations]):
            plain = order.clock(durations, 0.25, ahead)
            assert order.clock(durations, 0.25, ahead, lambda busy: 1.0) == pytest.approx(plain, abs=1e-12)


def test_two_stages_on_one_core_take_the_sum_of_their_work() -> None:
    """They can never be faster together than one after the other, and waiting costs nothing."""
    lists = schedule_lists("1f1b", 2, 4)
    order = Order(lists)
    durations = order.durations(lambda stage, action: 1.0 + stage + (action.kind == "B"))
    one_core = order.step_seconds(durations, speed=lambda busy: 1.0 / busy)
    assert one_core == pytest.approx(sum(durations))
    half = order.step_seconds(durations, speed=lambda busy: 0.75 if busy == 2 else 1.0)
    assert order.step_seconds(durations) < half < one_core


def test_the_timeline_shows_longer_actions() -> None:
    order = Order(schedule_lists("gpipe", 2, 2))

    def cost(stage: int, action: Action) -> Cost:
        return Cost(1.0)

    timeline = order.run(cost, speed=lambda busy: 1.0 / busy)
    assert timeline.step_seconds == pytest.approx(8.0)
    assert sum(stage.busy_seconds for stage in timeline.stages) > 8.0
    assert all(s.starts[0] >= 0 and list(s.ends) == sorted(s.ends) for s in timeline.stages)


def test_a_prediction_on_shared_cores() -> None:
    model = ModelNumbers.gpt(4, 96, 8, 512, 40)
    layout = Layout.even(4, 2, n=8, micro_batch=2, act_bytes=4, device="cpu")
    plan = plan_for(layout.pieces, Policy())
    own = MACHINES["cpu"]
    shared = Machine.from_json(own.to_json() | {"shared_rates": [1.0, 0.5]})
    assert Machine.from_json(json.loads(json.dumps(shared.to_json()))) == shared
    assert [shared.speed(k) for k in (1, 2, 4)] == [1.0, 0.5, 0.25] and own.speed(7) == 1.0
    alone, together = Evaluator(model, layout, own)(plan), Evaluator(model, layout, shared)(plan)
    work = 8 * sum(stage.total for stage in alone.stages)
    assert together.pipeline_seconds == pytest.approx(work, rel=0.02) and alone.pipeline_seconds < 0.7 * work
    assert together.timeline.step_seconds == pytest.approx(together.pipeline_seconds)
    with pytest.raises(ValueError, match="shared_rates must be above 0 and at most 1"):
        Machine.from_json(own.to_json() | {"shared_rates": [1.0, 1.5]})


# -- operations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_operations_are_those_of_the_model(family: str, fused: bool, dropout: float) -> None:
    """Within two (a step alone also hands its inputs' gradients over) or a quarter: one view more is no other price."""
    drops = {"attention_dropout": dropout, "hidden_dropout": dropout}
    config = shape(family, num_layers=1, fused_attention=fused, qk_layernorm=fused, **drops)
    llama = family == "llama"
    model = ModelNumbers(
        1, H, A, 3 if llama else A, H // A, F, VOCAB, 384, S, norm="RMSNorm" if llama else "LayerNorm",
        positions="rope" if llama else "learned_absolute", biases=not llama, tied=not llama,
        activation="swiglu" if llama else "gelu", hidden_dropout=dropout, attention_dropout=dropout,
        fused_attention=fused, qk_norm=fused,
    )  # fmt: skip
    layout = Layout.even(1, micro_batch=B, act_bytes=4, device="cpu")
    subject = Subject(config)
    for step in observe_steps(lambda: subject.chunk(subject.tokens, subject.labels)):
        forward, backward = operations(step.name, model, layout)
        if step.name == "attn.core" and fused and not dropout:  # one more for each head, which is inside its kernel
            forward, backward = forward - A * B, backward - 2 * A * B
        for seen, said in ((step.forward.operations, forward), (step.backward.operations, backward)):
            assert abs(seen - said) <= max(2, seen / 4), f"{step.name}: {seen} in the model, {said} in operations.py"
