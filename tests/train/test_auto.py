"""``--recompute-granularity auto``: real runs within a budget, as predicted, with the bits of a run that keeps all."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from megackpt.config.errors import UsageError
from megackpt.config.run import RunConfig
from megackpt.mesh.launch import LaunchEnvironment
from megackpt.observe.auto import Task, gib, machine_of, refuse_impossible, task_of
from megackpt.observe.log_line import format_bytes
from megackpt.plan import Plan
from megackpt.plan.accelerators import GIB
from megackpt.plan.choose.problem import DoesNotFit
from megackpt.plan.policies import Policy, plan_for
from megackpt.plan.predict import predict
from megackpt.plan.slots import slots_of
from megackpt.train.agree import everyone
from megackpt.train.auto import auto_task, predicted
from megackpt.train.loop import loader, run, train
from megackpt.train.step import Stepper
from tests.layouts import GPT, LLAMA, SMALL_GPT, Flags, Layout, built, steps
from tests.plan.live_run import WIDE, PatientTracker
from tests.pool import run_distributed

DROPOUT: Flags = {"hidden-dropout": 0.1, "attention-dropout": 0.1}
PARTS = (1 / 8, 1 / 2, 7 / 8)  # of the way from the floor to the ceiling


@dataclass(frozen=True)
class Seen:
    """One rank under one budget."""

    live: int  # state, and the peak of a step
    predicted: int
    state: int
    predicted_state: int
    same_bits: bool
    digest: str
    chunks: int  # of its stage, with different save-sets
    slots: int
    ahead: tuple[tuple[int, int], ...]  # of its stage, by chunk: layers, and forwards in flight


def task(flags: Flags, layout: Layout) -> Task:
    config = RunConfig.from_flags(
        {**flags, **layout.flags, "recompute-granularity": "auto", "memory-budget-gib": 1.0}, layout.world_size
    )
    return task_of(config, 509, machine_of("cpu"), "cpu")


def budgets(flags: Flags, layout: Layout) -> list[float]:
    """In GiB, between what the leanest plan needs and what keeping everything needs."""
    made = task(flags, layout)
    least = made.least_bytes()
    everything = plan_for(made.layout.pieces, Policy())
    most = predict(made.model, made.layout, everything, made.machine, watched=True).peak_bytes
    assert most > least
    return [(least + part * (most - least)) / GIB for part in PARTS]


def _auto(rank: int, world_size: int, flags: Mapping[str, object], gibs: Sequence[float], layout: Layout) -> list[Seen]:
    plain = built(flags, layout)
    stepper = Stepper(plain)
    expected = steps(plain, 2, gradients_of=2, stepper=stepper)
    del stepper, plain
    return [_one(flags, budget, layout, expected.losses, expected.grads) for budget in gibs]


def _one(
    flags: Mapping[str, object],
    budget: float,
    layout: Layout,
    losses: list[float],
    grads: list[dict[str, torch.Tensor]],
) -> Seen:
    trainer = built({**flags, "recompute-granularity": "auto", "memory-budget-gib": budget}, layout)
    stepper = Stepper(trainer)
    trace = steps(trainer, 2, gradients_of=2, stepper=stepper)
    same = trace.losses == losses and all(
        torch.equal(mine[name], other[name]) for mine, other in zip(trace.grads, grads, strict=True) for name in other
    )
    peaks = []
    with closing(loader(trainer, trainer.datasets.train, 0)) as batches:
        for _ in range(2):
            with PatientTracker() as tracker:
                stepper.accumulate(batches)
            peaks.append(tracker.peak_bytes)
    stage = trainer.mesh.pp.index
    made = auto_task(trainer.config, trainer.vocab, trainer.seam)
    made = replace(made, layout=replace(made.layout, tp_rank=trainer.mesh.tp.index))  # ranks differ in padded rows
    row = predicted(made, trainer.plan).stages[stage]
    numel = sum(p.numel() for p, _ in trainer.parameters)
    state = 8 * numel + -(-8 * numel // (trainer.mesh.dp.size if flags.get("use-distributed-optimizer") else 1))
    plan = trainer.plan
    own = [plan.chunk(stage, chunk).save_sets for chunk in range(len(trainer.chunks))]
    sets = {tuple(own[p.chunk][f"layers.{layer}"] for layer in p.layers) for p in trainer.pieces}
    return Seen(
        state + min(peaks), row.total_bytes, state, row.state_bytes, same, plan.digest(), len(sets),
        max(len(plan.slots(stage, c)) for c in range(len(trainer.chunks))),
        tuple((chunk.ahead, chunk.ahead_within) for chunk in plan.stages[stage]),
    )  # fmt: skip


def check(flags: Flags, layout: Layout, within: float) -> list[list[Seen]]:
    gibs = budgets(flags, layout)
    seen = run_distributed(_auto, layout.world_size, flags, gibs, layout, timeout=300)
    for place, budget in enumerate(gibs):
        ranks = [rows[place] for rows in seen]
        assert all(rank.same_bits for rank in ranks)
        assert len({rank.digest for rank in ranks}) == 1
        for rank in ranks:
            assert 0 <= rank.predicted_state - rank.state <= 1024  # the gradient buffer is padded to whole lines
            assert rank.live - rank.state == pytest.approx(rank.predicted - rank.state, rel=within)
            assert max(rank.live, rank.predicted) <= budget * GIB
    return seen


def test_within_the_budget_as_predicted_and_the_same_bits() -> None:
    """T0 with dropout: three budgets, three plans, live peaks within 3 %.  Stage 0 replays ahead of the gradient: a
    layer in every backward, then all while one micro-batch is in flight."""
    seen = check(GPT | DROPOUT, Layout(pp=2), 0.03)
    assert len({rank.digest for rank in seen[0]}) == 3
    assert [rank.ahead for rank in seen[0]] == [((1, 0),), ((2, 1),), ((2, 1),)]
    assert {rank.ahead for rank in seen[1]} == {((0, 0),)}


def _stored(rank: int, world_size: int, flags: Flags, layout: Layout) -> tuple[bool, int, int]:
    auto = built(flags, layout)
    expected = steps(auto, 2, gradients_of=1)
    (path,) = (str(flags["run-dir"]) + "/plan.json",)
    if rank == 0:
        Path(path).write_text(auto.plan.dumps())
    everyone(None)
    kept = {name: value for name, value in flags.items() if name not in ("recompute-granularity", "memory-budget-gib")}
    stored = built({**kept, "recompute-plan": path}, layout)
    trace = steps(stored, 2, gradients_of=1)
    same = stored.plan == auto.plan and trace.losses == expected.losses
    same = same and all(torch.equal(trace.grads[0][name], g) for name, g in expected.grads[0].items())
    stage = auto.mesh.pp.index
    tapes = []
    stepper = Stepper(stored)
    stepper._slots = slots_of(stepper.executor.schedule(2, stage, 4))
    for micro_batch in range(4):
        tapes.append(stepper._open_tape(0, micro_batch).plan)
    return same, len(auto.plan.slots(stage)), len({id(plan) for plan in tapes})


def test_a_stored_plan_runs_as_it_is_slots_included(tmp_path: Path) -> None:
    """Stage 0 keeps more of the micro-batch in its first slot; the stored plan gives the same bits."""
    layout = Layout(pp=2)
    flags = SMALL_GPT | DROPOUT | {"num-layers": 5, "global-batch-size": 8, "run-dir": str(tmp_path)}
    made = task(flags, layout)
    least = made.least_bytes()
    slotted = (b for b in range(least, 2 * least, 1 << 15) if len(made.choose(b).choice.plan.slots(0)) > 1)
    auto: Flags = {"recompute-granularity": "auto", "memory-budget-gib": next(slotted) / GIB}
    seen = run_distributed(_stored, 2, flags | auto, layout)
    assert [same for same, _, _ in seen] == [True, True]
    assert seen[0][1:] == (2, 2) and seen[1][1:] == (1, 1)


def test_a_run_says_stores_and_checkpoints_its_plan(tmp_path: Path) -> None:
    layout = Layout(pp=2)
    flags = SMALL_GPT | {"num-layers": 5, "global-batch-size": 8, "train-iters": 2}
    budget = budgets(flags, layout)[0]
    paths: Flags = {"run-dir": str(tmp_path / "run"), "save": str(tmp_path / "ckpt")}
    auto: Flags = {"recompute-granularity": "auto", "memory-budget-gib": budget}
    (_, text) = run_distributed(_said, 2, flags | auto | paths, layout)
    plan = Plan.from_json(json.loads((tmp_path / "run" / "plan.json").read_text()))
    lines = [line.removeprefix("megackpt: auto: ") for line in text.splitlines() if line.startswith("megackpt: auto:")]
    within = f" within {format_bytes(int(budget * GIB))} a rank: predicted peak by stage "
    assert lines[0].startswith(f"{plan.name}{within}") and plan.name.startswith("per stage")
    assert lines[1].startswith("stage 0: ") and lines[2].startswith("stage 1: ")
    assert lines[1].removeprefix("stage 0") != lines[2].removeprefix("stage 1")
    (saved,) = (tmp_path / "ckpt").glob("iter_*/run.json")
    assert json.loads(saved.read_text())["extra"]["plan"] == plan.to_json()


def _said(rank: int, world_size: int, flags: Flags, layout: Layout) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as text:
        train(built(flags, layout))
    return text.getvalue()


def test_an_impossible_budget_is_refused_before_any_group(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 of a rank that never meets another."""
    flags = GPT | Layout(pp=2).flags | {"recompute-granularity": "auto", "memory-budget-gib": 0.0042, "device": "cpu"}
    environment = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    assert run(RunConfig.from_flags(flags, 2), LaunchEnvironment.detect(environment)) == 2
    said = capsys.readouterr().err
    asked = task_of(RunConfig.from_flags(flags, 2), 509, machine_of("cpu"), "cpu")
    least = asked.least_bytes()
    assert said.startswith(
        "megackpt: error: --memory-budget-gib 0.0042 is impossible: even with everything replayed stage "
    )
    assert f" needs at least {least:,} bytes with 2 layers (" in said and "the budget is 4,509,715. Nearest " in said
    lean = replace(asked, layout=replace(asked.layout, micro_batch=1, n=8)).least_bytes()
    assert f"What reaches it: --micro-batch-size 1 ({gib(lean)} GiB), or --tensor-model-parallel-size 2 on 4" in said
    assert least <= float(gib(least)) * GIB < least * 1.001
    nearest = float(said.split("Nearest possible: --memory-budget-gib ")[1].split()[0].rstrip("."))
    made = task_of(RunConfig.from_flags(flags | {"memory-budget-gib": nearest}, 2), 509, machine_of("cpu"), "cpu")
    made.choose()
    refuse_impossible(made)


@pytest.mark.parametrize(
    ("schedule", "text", "stages", "layers"),
    [("1f1b", "E|tttt|L", 3, [[0], [4], [0]]), ("zb-h1", "E|tttt|L", 3, [[0], [4], [0]]),
     ("1f1b", "Et|tt||||tL", 2, [[1, 0, 0], [2, 0, 1]])],
)  # fmt: skip
def test_stages_and_chunks_without_layers_have_nothing_to_choose(
    schedule: str, text: str, stages: int, layers: list[list[int]]
) -> None:
    """Only the ends of the model are counted there; from the least budget on there is a plan."""
    made = task(GPT | {"pipeline-model-parallel-layout": text, "pipeline-schedule": schedule}, Layout(pp=stages))
    least = made.least_bytes()
    for budget in (least, 2 * least):
        plan = made.choose(budget).choice.plan
        assert [[len(c.save_sets) - 2 for c in stage] for stage in plan.stages] == layers  # but those of the ends
        assert max(stage.total_bytes for stage in predicted(made, plan).stages) <= budget
    with pytest.raises(DoesNotFit):
        made.choose(least - 1024)


def test_on_a_cpu_a_budget_is_needed() -> None:
    flags = GPT | {"recompute-granularity": "auto"}
    with pytest.raises(UsageError, match="auto needs --memory-budget-gib on a CPU"):
        task_of(RunConfig.from_flags(flags, 1), 509, machine_of("cpu"), "cpu")
    gpu = task_of(RunConfig.from_flags(flags, 1), 509, machine_of("cuda", "NVIDIA H200", 150_000_000_000), "cuda")
    assert gpu.budget_bytes == 150_000_000_000 and gpu.machine.name == "h200-141gb"
    assert gpu.machine.margin_bytes == 3_000_000_000
    assert machine_of("cuda", "NVIDIA A100-SXM4-40GB", 42_000_000_000).name == "a100-40gb"
    assert machine_of("cuda", "Unknown", 1 << 34).memory_bytes == 1 << 34


FULL = [
    Layout(), Layout(pp=4), Layout(tp=2), Layout(tp=2, sp=True), Layout(tp=2, pp=2, sp=True), Layout(pp=2, vp=2),
    Layout(pp=2, dp=2),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", FULL, ids=str)
def test_layouts_under_auto(layout: Layout) -> None:
    check(GPT | DROPOUT, layout, 0.03)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_zero_bubble_under_auto() -> None:
    check(GPT | DROPOUT | {"pipeline-schedule": "zb-h1"}, Layout(pp=2), 0.03)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_ends_of_the_model_alone_under_auto() -> None:
    check(GPT | DROPOUT | {"pipeline-model-parallel-layout": "E|tttt|L"}, Layout(pp=3), 0.03)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_sharded_optimizer_under_auto() -> None:
    check(GPT | DROPOUT | {"use-distributed-optimizer": True}, Layout(pp=2, dp=2), 0.03)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(), Layout(pp=2), Layout(pp=4), Layout(tp=2, pp=2, sp=True), Layout(pp=2, vp=2), Layout(pp=2, vp=3),
    ],
    ids=str,
)
def test_a_wider_model_within_one_percent(layout: Layout) -> None:
    layers = 7 if layout.vp == 3 else 5
    check(GPT | WIDE | {"num-layers": layers, "max-position-embeddings": 64}, layout, 0.01)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_wider_model_within_one_percent_under_zero_bubble() -> None:
    zero: Flags = {"num-layers": 5, "max-position-embeddings": 64, "pipeline-schedule": "zb-h1"}
    check(GPT | WIDE | zero, Layout(pp=2), 0.01)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_three_chunks_per_stage_differ() -> None:
    seen = check(LLAMA | {"num-layers": 7}, Layout(pp=2, vp=3), 0.03)
    assert max(rank.chunks for rows in seen for rank in rows) > 1
