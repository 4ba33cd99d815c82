"""``megackpt plan``: exit codes, what it prints and writes, and what it says in words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megackpt.cli.main import main
from megackpt.cli.plan import make_report, read_own
from megackpt.config.errors import UsageError
from megackpt.persist.convert import write_checkpoint
from megackpt.plan.accelerators import GIB, MACHINES
from megackpt.plan.decision import Plan
from megackpt.plan.evaluate import Evaluator
from megackpt.plan.numbers import Layout, ModelNumbers
from megackpt.plan.policies import Policy, plan_for
from megackpt.plan.predict import predict
from megackpt.plan.report import Report
from tests.persist.convert.made import llama, weights_of
from tests.pool import ROOT

MODEL = "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --vocab-size 32000 --bf16"
RUN = f"{MODEL} --micro-batch-size 2 --global-batch-size 16 --pipeline-model-parallel-size 2 --hidden-dropout 0"


def words(line: str = "", base: str = RUN) -> list[str]:
    return [*base.split(), *line.split()]


def report(line: str = "", base: str = RUN) -> Report:
    return make_report(*read_own(words(line, base)))


def said(made: Report) -> str:
    return " ".join(made.advice)


def test_fits_and_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words()]) == 0
    out = capsys.readouterr().out
    assert "As given: none: fits" in out and "Nothing need be replayed" in out
    least = min(e.peak_bytes for e in report().ladder) / GIB
    assert main(["plan", *words(f"--memory-budget-gib {least - 0.2}")]) == 1
    out = capsys.readouterr().out
    assert "DOES NOT FIT: stages 0, 1" in out and "Nothing fits, whatever is replayed: stage" in out


def test_the_model_may_come_from_a_checkpoint(tmp_path: Path) -> None:
    """--use-checkpoint-args, as the trainer has it: shape, vocabulary and padding heads."""
    write_checkpoint(tmp_path, weights_of(llama(9, 3, 10)), tensor_parallel=2)
    rest = "--micro-batch-size 2 --global-batch-size 16 --tensor-model-parallel-size 2 --seq-length 37"
    given = report(f"--load {tmp_path} --use-checkpoint-args --num-layers 3 --vocab-size 9 {rest}", base="")
    shape = (
        "--num-layers 5 --hidden-size 48 --num-attention-heads 12 --group-query-attention --num-query-groups 4"
        " --unpadded-query-groups 3 --kv-channels 10 --ffn-hidden-size 168 --position-embedding-type rope --swiglu"
        " --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --vocab-size 257"
        " --hidden-dropout 0 --attention-dropout 0"
    )
    assert given.model == report(f"{shape} {rest}", base="").model and given.model.heads == 12
    assert any("--num-layers 5 instead of 3, from" in notice for notice in given.notices)
    with pytest.raises(UsageError, match="--use-checkpoint-args needs --load"):
        report(f"--use-checkpoint-args {rest}", base="")


def test_rows_are_the_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    """ME-09: one row per stage, and first and last stage differ as predicted."""
    model = ModelNumbers.gpt(8, 1024, 16, 32000, 1024, attention_dropout=0.1)
    layout = Layout.even(8, 2, n=8, micro_batch=2)
    expected = predict(model, layout, plan_for(layout.pieces, Policy()), MACHINES["h100-80gb"])
    made = report()
    assert made.given.prediction == expected
    assert main(["plan", *words()]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(("  0 ", "  1 "))]
    assert [row[8] for row in rows] == [f"{stage.total_bytes / GIB:.2f}" for stage in expected.stages]
    assert rows[0][8] != rows[1][8]


def test_the_plan_that_fits_is_written_and_read_back(tmp_path: Path) -> None:
    rich, lean = (next(e for e in report().ladder if e.name.startswith(name)) for name in ("none", "full, uniform 1"))
    budget = (rich.peak_bytes + lean.peak_bytes) / 2 / GIB
    path = tmp_path / "plan.json"
    assert main(["plan", *words(f"--memory-budget-gib {budget} --plan-out {path}")]) == 1
    plan = Plan.from_json(json.loads(path.read_text()))
    assert main(["plan", *words(f"--memory-budget-gib {budget} --recompute-plan {path}")]) == 0
    made = report(f"--memory-budget-gib {budget}")
    assert made.best is not None and made.best.plan.digest() == plan.digest()
    assert made.best.peak_bytes <= budget * GIB < made.given.peak_bytes
    assert made.best.step_seconds < lean.step_seconds
    assert "Use the plan 'per stage, ahead'" in said(made)


def test_neighbours() -> None:
    made = report("--recompute-granularity full")
    assert made.leaner is not None and made.leaner.peak_bytes < made.given.peak_bytes
    assert made.faster is not None and made.faster.step_seconds < made.given.step_seconds
    assert "Leave the recompute flags out" in said(made)
    assert report().faster is None


def test_core_attn_with_fused_and_unfused_attention() -> None:
    """ME-01: a fused core has nothing to drop, an unfused one keeps 5 a s s b / t."""
    assert "core_attn is pointless here" in said(report("--recompute-activations"))
    made = report("--attention-backend unfused --recompute-activations")
    assert "pointless" not in said(made)
    kept = report("--attention-backend unfused")
    assert "Unfused attention keeps" in said(kept)
    core = next(row for row in kept.decisions if row.name == "attn.core")
    assert core.bytes >= 5 * 16 * 1024 * 1024 * 2 - 2 * 16 * 1024 * 1024  # less the mask, which is a row of its own


def test_a_large_vocabulary_is_named_as_the_imbalance() -> None:
    """PP-09: 250k tokens weigh as layers on the last stage."""
    big = said(report(base=RUN.replace("32000", "250880")))
    assert "Stages are uneven: stage 1 takes" in big and "vocabulary 250,880) weighs as" in big
    assert "uneven" not in said(report(base=RUN.replace("32000", "128")))


def test_utilisation_is_labelled_and_its_peak_is_dense(capsys: pytest.CaptureFixture[str]) -> None:
    """MX-03, MX-04: the peak is explicit and dense, replayed work counts in HFU only."""
    full = report("--recompute-granularity full --recompute-keep layer-input")
    none = report()
    assert none.given.mfu == none.given.hfu
    useful, hardware = full.given.model_flops, full.given.model_flops + full.given.replayed_flops
    assert useful == none.given.model_flops and useful < hardware < useful * 4 / 3
    assert full.given.mfu / full.given.hfu == pytest.approx(useful / hardware)
    half = report("--peak-tflops 494.5")
    assert half.given.peak_flops == pytest.approx(494.5e12)
    assert main(["plan", *words()]) == 0
    out = capsys.readouterr().out
    assert "MFU" in out and "useful work: 3 x forward" in out and "dense bf16 peak 989 TFLOP/s" in out


def test_a_script_is_planned_without_what_it_has_too_much(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "run.sh"
    flags = RUN.replace("--bf16", "--fp16").replace("--vocab-size 32000", "")
    script.write_text(
        f"ARGS='{flags}'\ntorchrun --nproc_per_node 4 pretrain_gpt.py $ARGS --merge-file $M --vocab-file $V"
        " --use-distributed-optimizer --no-such-flag 3 --num-layers-per-virtual-pipeline-stage 2\n"
    )
    assert main(["plan", str(script), "--global-batch-size", "8"]) == 0
    out = capsys.readouterr().out
    assert "4 ranks (tp 1 x cp 1 x dp 2 x pp 2 x 2 chunks), 2 micro-batches of 2" in out
    assert "vocabulary 50,304 (padded)" in out and "optimizer sharded" in out
    for note in ("unknown flag --no-such-flag", "--world-size 4, as"):
        assert note in out
    assert main(["plan", str(script), "--world-size", "2"]) == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--no-such-flag", "unknown flag --no-such-flag"),
        ("--machine h1000", "--machine: machine 'h1000' is neither"),
        ("--world-size 3", "3 processes cannot be arranged"),
        ("--json no/such/folder/x.json", "cannot be written"),
        ("--fp8-format hybrid", "--fp8-format"),
        ("--memory-budget-gib 1e300", "--memory-budget-gib must be above 0 and at most 1,000,000; got 1e+300"),
    ],
)
def test_refusals(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["plan", *words(line)])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_documented_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every field of the document is in docs/plan.md, and its terms add up."""
    path = tmp_path / "a.json"
    assert main(["plan", *words(f"--json {path}")]) == 0
    document = json.loads(path.read_text())
    text = (ROOT / "docs" / "plan.md").read_text()
    given = document["given"]
    for key in (*document, *given, *given["stages"][0], *given["stages"][0]["terms"], *given["seconds"]):
        assert f"`{key}`" in text, key
    for stage in given["stages"]:
        assert sum(stage["terms"].values()) == stage["total_bytes"]
    assert max(stage["total_bytes"] for stage in given["stages"]) == given["peak_bytes"]
    other = tmp_path / "b.json"
    main(["plan", *words(f"--recompute-granularity full --json {other}")])
    capsys.readouterr()
    assert main(["compare", str(path), str(other)]) == 0
    out = capsys.readouterr().out
    assert "full, uniform 1, boundaries" in out and "activations -" in out
    with pytest.raises(SystemExit):
        main(["compare", str(path), str(ROOT / "README.md")])


def test_without_torch() -> None:
    code = "import sys; from megackpt.cli.main import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    argv: list[Any] = [sys.executable, "-c", code, "plan", *words()]
    assert subprocess.run(argv, cwd=ROOT, capture_output=True, timeout=60).returncode == 0


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize(("p", "v", "n"), [(1, 1, 9), (2, 1, 9), (3, 2, 15), (4, 1, 3), (4, 3, 16)])
def test_the_step_is_cut_short_without_loss(schedule: str, p: int, v: int, n: int) -> None:
    """Peaks are taken from a step of fewer micro-batches; the memory curve of the whole step reaches the same ones."""
    if v > 1 and schedule != "1f1b":
        return
    model = ModelNumbers.gpt(2 * p * v, 256, 8, 512, 64, hidden_dropout=0.1)
    layout = Layout.even(model.layers, p, v, t=2, n=n, schedule=schedule, sequence_parallel=True)
    evaluator = Evaluator(model, layout, MACHINES["h100-80gb"])
    for policy in (Policy(), Policy("full"), Policy("full", num_layers=2)):
        plan = plan_for(layout.pieces, policy)
        e = evaluator(plan)
        assert e.prediction == predict(model, layout, plan, MACHINES["h100-80gb"])
        assert e.timeline.peak_bytes == tuple(stage.total_bytes for stage in e.prediction.stages)
        assert e.timeline.step_seconds == pytest.approx(e.pipeline_seconds)
        assert e.timeline.bubble_share == pytest.approx(e.bubble_share)


def test_documents_apart_cost_a_joined_output_and_the_positions() -> None:
    """Stage 0: 4 layers, 2 micro-batches in flight, 2 x 1024 tokens of 1024 numbers in bf16; int64 positions."""
    kept = [
        report(line).given.prediction.stages[0].kept_peak_bytes
        for line in ("", "--reset-attention-mask", "--reset-attention-mask --reset-position-ids")
    ]
    assert [kept[1] - kept[0], kept[2] - kept[1]] == [2 * 4 * 2048 * 1024 * 2, 2 * 2048 * 8]
